"""DenseNet-BC of Huang et al. 2017, in its CIFAR form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.lazy import nn
from raysim.models.staged import Inputs, classifier, stage

if TYPE_CHECKING:
    from raysim.models.model import Model

GROWTH = 32


def _transition(channels: int) -> nn.Sequential:
    """Halves the channels and the resolution."""
    conv = nn.Conv2d(channels, channels // 2, 1, bias=False)
    return stage(norm=nn.BatchNorm2d(channels), relu=nn.ReLU(), conv=conv, pool=nn.AvgPool2d(2))


def densenet121(inputs: Inputs) -> Model:
    """FedLAW's and FedLWS's DenseNet-121 with a bare 3x3 stem; 6 956 298 parameters (C = 10)."""
    from raysim.models.modules import DenseLayer

    in_channels, _, _ = inputs.image()
    channels = 2 * GROWTH
    stages = {"stem": stage(conv=nn.Conv2d(in_channels, channels, 3, padding=1, bias=False))}
    for b, layers in enumerate((6, 12, 24, 16), 1):
        modules: dict[str, nn.Module] = {}
        for i in range(1, layers + 1):
            modules[f"layer{i}"] = DenseLayer(channels, GROWTH)
            channels += GROWTH
        if b < 4:
            modules["transition"] = _transition(channels)
            channels //= 2
        else:
            modules |= {"norm": nn.BatchNorm2d(channels), "relu": nn.ReLU()}
            modules |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        stages[f"dense{b}"] = stage(**modules)
    return classifier(inputs, stages)
