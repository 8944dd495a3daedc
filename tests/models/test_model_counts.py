"""Trainable parameters, by model, layer and stage, against the numbers printed in the papers and their code."""

import pytest
import torch
from torch import nn

from raysim.models import Inputs, build
from raysim.models.model import Model

CIFAR10, CIFAR100 = Inputs((3, 32, 32), 10), Inputs((3, 32, 32), 100)
TINY_IMAGENET = Inputs((3, 64, 64), 200)
MNIST, FASHION = Inputs((1, 28, 28), 10), Inputs((1, 28, 28), 10)
AG_NEWS_001, AG_NEWS_000 = Inputs((200,), 4, vocab=98_635), Inputs((200,), 4, vocab=32_000)


def counted(name: str, inputs: Inputs, **options: object) -> Model:
    with torch.device("meta"):  # shapes only
        return build(name, inputs, **options)


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def unit_sizes(model: Model) -> list[int]:
    """Parameters by leaf module, a norm's counted with the leaf before it."""
    sizes: list[int] = []
    for module in model.modules():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            sizes[-1] += own
        elif own:
            sizes.append(own)
    return sizes


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("simple_cnn", CIFAR10, 122_570),
        ("simple_cnn", CIFAR100, 128_420),
        ("bn_cnn", FASHION, 39_786),
        ("mlp", FASHION, 199_210),
        ("mlp", CIFAR10, 656_810),
        ("lenet", FASHION, 28_938),
        ("alexnet", CIFAR10, 23_272_266),
        ("resnet8", CIFAR10, 78_042),
        ("resnet8", CIFAR100, 83_892),
        ("resnet20", CIFAR10, 272_474),
        ("resnet20", CIFAR100, 278_324),
        ("resnet56", CIFAR10, 855_770),
        ("resnet110", CIFAR10, 1_730_714),
        ("wrn56_4", CIFAR10, 13_628_234),
        ("wrn56_4", CIFAR100, 13_651_364),
        ("resnet18", CIFAR10, 11_173_962),
        ("resnet18", TINY_IMAGENET, 11_271_432),
        ("resnet18_imagenet", CIFAR10, 11_181_642),
        ("resnet18_imagenet", TINY_IMAGENET, 11_279_112),
        ("densenet121", CIFAR10, 6_956_298),
        ("densenet121", CIFAR100, 7_048_548),
        ("vit", CIFAR10, 9_523_722),
        ("vit", CIFAR100, 9_569_892),
        ("vgg9", CIFAR10, 9_231_114),
        ("vgg16", CIFAR10, 15_044_298 + 2 * 4_224),  # BatchNorm: scale and shift of 4 224 channels
        ("fedavg_cnn", MNIST, 582_026),
        ("fedavg_cnn", CIFAR10, 878_538),
        ("fedavg_cnn", CIFAR100, 924_708),
        ("fedavg_cnn", TINY_IMAGENET, 5_694_600),
        ("fasttext", AG_NEWS_001, 3_157_508),
        ("text_cnn", AG_NEWS_000, 1_063_904),
        ("char_gru", Inputs((40,), 51, vocab=51), 51 * 32 + 3 * 128 * (32 + 128 + 2) + 129 * 51),
        ("amazon_mlp", Inputs((5000,), 2), 5_551_802),
        ("small_cnn", Inputs((1, 8, 8), 10), 13_706),
        ("tiny_bn_cnn", Inputs((1, 8, 8), 10), 1_946),
    ],
)
def test_parameters(name: str, inputs: Inputs, expected: int) -> None:
    assert parameters(counted(name, inputs)) == expected


def test_vgg16_without_norm() -> None:
    assert parameters(counted("vgg16", CIFAR10, norm=False)) == 15_044_298
    assert parameters(counted("vgg16", Inputs((3, 32, 32), 62), norm=False)) == 15_051_006
    # FEMNIST itself has one channel, not the three of the printed number: two 3x3 kernels fewer for each of 64 filters.
    femnist = counted("vgg16", Inputs((1, 28, 28), 62), norm=False)
    assert parameters(femnist) == 15_051_006 - 2 * 9 * 64
    assert femnist.head.in_features == 128


def test_mlp_hidden_layers() -> None:
    assert parameters(counted("mlp", MNIST, hidden=[200])) == 784 * 200 + 200 + 200 * 10 + 10


def test_text_cnn_embedding() -> None:
    narrow, wide = counted("text_cnn", AG_NEWS_000), counted("text_cnn", AG_NEWS_000, embedding=64)
    assert parameters(wide) - parameters(narrow) == 32 * (32_000 + 100 * (3 + 4 + 5))


@pytest.mark.parametrize(
    ("name", "tensors", "weights"),
    [
        ("fedavg_cnn", [2, 4, 6, 8], [5_130, 529_930, 581_194, 582_026]),
        ("fasttext", [2, 4, 5], [132, 1_188, 3_157_508]),
        (
            "resnet18_imagenet",
            [2, 17, 32, 47, 59, 62],
            [5_130, 8_398_858, 10_498_570, 11_024_138, 11_172_106, 11_181_642],
        ),
    ],
)
def test_last_stages_are_the_ranges_of_ala(name: str, tensors: list[int], weights: list[int]) -> None:
    model = counted(name, AG_NEWS_001 if name == "fasttext" else CIFAR10 if name == "resnet18_imagenet" else MNIST)
    tails = [list(model[-p:].parameters()) for p in range(1, len(model) + 1)]
    assert [len(tail) for tail in tails] == tensors
    assert [sum(t.numel() for t in tail) for tail in tails] == weights


def test_unit_sizes() -> None:
    assert unit_sizes(counted("simple_cnn", CIFAR10)) == [896, 18_496, 36_928, 65_600, 650]
    vgg = [1_920, 74_112, 295_680, 590_592, 1_181_184, 2_360_832, 2_360_832, 2_360_832, 5_130]
    assert unit_sizes(counted("vgg9", CIFAR10)) == vgg
    assert len(unit_sizes(counted("vgg16", CIFAR10))) == 16


def test_stage_sizes_of_resnet18_imagenet() -> None:
    sizes = [parameters(stage) for stage in counted("resnet18_imagenet", CIFAR10)]
    assert sizes == [9_536, 147_968, 525_568, 2_099_712, 8_393_728, 5_130]


def test_tensors_of_resnet20() -> None:
    names = [name for name, _ in counted("resnet20", CIFAR10).named_parameters()]
    assert len(names) == 65
    assert sum("bias" in name for name in names) == 22


def test_projection_follows_the_main_branch() -> None:
    block = counted("resnet20", CIFAR10).stage2[0]
    assert [name for name, _ in block.named_parameters()] == [
        *("conv1.weight", "norm1.weight", "norm1.bias", "conv2.weight", "norm2.weight", "norm2.bias"),
        *("shortcut.conv.weight", "shortcut.norm.weight", "shortcut.norm.bias"),
    ]
