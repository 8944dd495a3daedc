"""Residual networks of He et al. 2016 (and, widened, of Zagoruyko and Komodakis 2016), with projection shortcuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raysim.lazy import nn
from raysim.models.staged import Inputs, classifier, stage

if TYPE_CHECKING:
    from raysim.models.model import Model


def _resnet(inputs: Inputs, widths: Sequence[int], blocks: int, **pool: nn.Module) -> Model:
    """A 3x3 stem, one stage of basic blocks a width, each but the first at half the resolution; global average."""
    from raysim.models.modules import BasicBlock

    channels, _, _ = inputs.image()
    c_in = widths[0]
    conv = nn.Conv2d(channels, c_in, 3, padding=1, bias=False)
    stages = {"stem": stage(conv=conv, norm=nn.BatchNorm2d(c_in), **pool, relu=nn.ReLU())}
    for s, c_out in enumerate(widths, 1):
        first = BasicBlock(c_in, c_out, stride=1 if s == 1 else 2)
        stages[f"stage{s}"] = nn.Sequential(first, *(BasicBlock(c_out, c_out, 1) for _ in range(blocks - 1)))
        c_in = c_out
    stages[f"stage{len(widths)}"].extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    return classifier(inputs, stages)


def resnet8(inputs: Inputs) -> Model:
    """FedLAW's CIFAR ResNet of depth 8; 78 042 parameters (C = 10)."""
    return _resnet(inputs, (16, 32, 64), blocks=1)


def resnet20(inputs: Inputs) -> Model:
    """CIFAR ResNet of depth 20 (He et al. 2016, 4.2; FedLAW, FedLWS); 272 474 parameters (C = 10)."""
    return _resnet(inputs, (16, 32, 64), blocks=3)


def resnet56(inputs: Inputs) -> Model:
    """CIFAR ResNet of depth 56 (He et al. 2016, 4.2; FedLAW); 855 770 parameters (C = 10)."""
    return _resnet(inputs, (16, 32, 64), blocks=9)


def resnet110(inputs: Inputs) -> Model:
    """CIFAR ResNet of depth 110 (He et al. 2016, 4.2; FedLAW); 1 730 714 parameters (C = 10)."""
    return _resnet(inputs, (16, 32, 64), blocks=18)


def wrn56_4(inputs: Inputs) -> Model:
    """resnet56, four times as wide (FedLAW, FedLWS); 13 628 234 parameters (C = 10)."""
    return _resnet(inputs, (64, 128, 256), blocks=9)


def resnet18(inputs: Inputs) -> Model:
    """FedLWS's ResNet-18 with a 3x3 stem of stride 1 and its max-pool; 11 271 432 parameters on Tiny-ImageNet."""
    return _resnet(inputs, (64, 128, 256, 512), blocks=2, pool=nn.MaxPool2d(3, stride=2, padding=1))
