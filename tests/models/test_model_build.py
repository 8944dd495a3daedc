"""Building by name: what is refused, and in which words; torchvision's models."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raysim.models import MODELS, Inputs, ModelError, build
from raysim.models.torchvision import architectures

CIFAR10, TOKENS = Inputs((3, 32, 32), 10), Inputs((200,), 4, vocab=100)


def test_import_leaves_torchvision_alone() -> None:
    script = (
        "import sys; from raysim.models import Inputs, build; build('small_cnn', Inputs((1, 8, 8), 10));"
        "sys.exit(any(name.split('.')[0] == 'torchvision' for name in sys.modules))"
    )
    quickstart = Path(__file__).parents[2] / "configs/quickstart.yaml"
    assert subprocess.run([sys.executable, "-c", script, quickstart], check=False).returncode == 0


def test_a_wrong_name_is_told_without_torch() -> None:
    script = (
        "import sys; from raysim.config import ConfigError, load\n"
        "try: load(sys.argv[1], ['model.name=resnet51'])\n"
        "except ConfigError as error: sys.exit('torch' in sys.modules or 'Did you mean' not in str(error))"
    )
    quickstart = Path(__file__).parents[2] / "configs/quickstart.yaml"
    assert subprocess.run([sys.executable, "-c", script, quickstart], check=False).returncode == 0


def test_every_model_says_where_it_is_from() -> None:
    for name, builder in MODELS.items():
        assert builder.__doc__ and "\n" not in builder.__doc__, name
        assert "parameters" in builder.__doc__, name


@pytest.mark.parametrize(
    ("name", "inputs", "options", "message"),
    [
        ("resnet2O", CIFAR10, {}, "unknown model 'resnet2O'. Did you mean 'resnet20'"),
        ("effcientnet_b0", CIFAR10, {}, "'efficientnet_b0'"),
        ("transformer-xxl", CIFAR10, {}, "unknown model 'transformer-xxl'."),
        ("mlp", CIFAR10, {"hiden": (10,)}, "mlp: unknown option 'hiden'. Did you mean 'hidden'? It takes hidden."),
        ("lenet", CIFAR10, {"norm": True}, "lenet: unknown option 'norm'. It takes none."),
        ("torchvision.resnet18", CIFAR10, {"norm": True}, "unknown option 'norm'. It takes none."),
        ("mlp", CIFAR10, {"hidden": ()}, "mlp: hidden is empty"),
        ("simple_cnn", Inputs((1, 8, 8), 9), {}, "simple_cnn: samples of shape (1, 8, 8) do not fit its stage 'conv2'"),
        ("alexnet", Inputs((1, 8, 8), 10), {}, "alexnet: samples of shape (1, 8, 8) do not fit its stage 'conv5'"),
        ("text_cnn", Inputs((4,), 4, vocab=100), {}, "text_cnn: samples of shape (4,) do not fit its stage 'ngrams'"),
        ("vit", Inputs((1, 30, 30), 10), {}, "vit: cuts images into 4x4 patches, but they are 30x30"),
        ("resnet20", TOKENS, {}, "resnet20: needs images of shape (C, H, W), not (200,) with a vocabulary of 100"),
        ("resnet18_imagenet", TOKENS, {}, "resnet18_imagenet: needs images"),
        ("vgg9", Inputs((5000,), 2), {}, "vgg9: needs images of shape (C, H, W), not (5000,) with no vocabulary"),
        ("mlp", TOKENS, {}, "mlp: needs images or features, not (200,) with a vocabulary of 100"),
        ("fasttext", CIFAR10, {}, "fasttext: needs tokens of shape (T,) and a vocabulary"),
        ("torchvision.alexnet", CIFAR10, {}, "torchvision.alexnet: samples of shape (3, 32, 32) do not fit"),
        ("vit_b_16", Inputs((3, 30, 30), 10), {}, "vit_b_16: cannot be built for 30x30 images"),
        ("vit_b_16", Inputs((3, 32, 48), 10), {}, "vit_b_16: samples of shape (3, 32, 48) do not fit"),
    ],
)
def test_refused(name: str, inputs: Inputs, options: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError) as error:
        build(name, inputs, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "squeezenet1_1", "mobilenet_v3_small", "torchvision.resnet18"])
def test_torchvision_models(name: str) -> None:
    """As torchvision makes them, but for the channels of the stem: their tensors have torchvision's names."""
    from torchvision import models

    model = build(name, Inputs((1, 64, 64), 7))
    theirs = models.get_model(name.removeprefix("torchvision."), num_classes=7)
    assert model.state_dict().keys() == theirs.state_dict().keys()
    model(torch.randn(2, 1, 64, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "side"), [("vit_b_32", 64), ("maxvit_t", 224), ("googlenet", 64), ("inception_v3", 96), ("swin_t", 32)]
)
def test_torchvision_models_that_need_arguments(name: str, side: int) -> None:
    with torch.device("meta"):
        model = build(name, Inputs((3, side, side), 7))
        assert model(torch.zeros(2, 3, side, side)).shape == (2, 7)


def test_torchvisions_models_are_known_by_name() -> None:
    from torchvision import models

    assert architectures() == models.list_models(module=models)


def test_the_papers_models_come_before_torchvisions() -> None:
    with torch.device("meta"):
        ours, theirs = build("resnet18", CIFAR10), build("torchvision.resnet18", CIFAR10)
    assert ours.stem.conv.kernel_size == (3, 3)
    assert theirs.conv1.kernel_size == (7, 7)
    assert sum(p.numel() for p in theirs.parameters()) == 11_181_642
