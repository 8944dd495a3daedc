"""VGG networks: groups of padded 3x3 convolutions, each group closed by a pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raysim.lazy import nn
from raysim.models.cnn import dense
from raysim.models.staged import Inputs, classifier, stage, width

if TYPE_CHECKING:
    from raysim.models.model import Model


def _blocks(inputs: Inputs, groups: Sequence[Sequence[int]], norm: bool) -> dict[str, nn.Sequential]:
    """A stage a group of convolution widths; the convolutions keep their bias, with BatchNorm or without."""
    channels, height, wide = inputs.image()
    rows, columns = max(32 - height, 0), max(32 - wide, 0)  # 28x28 (FEMNIST) would not survive the fifth pooling
    pad = nn.ZeroPad2d((columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    stages = {}
    for b, group in enumerate(groups, 1):
        modules: dict[str, nn.Module] = {"pad": pad} if b == 1 and rows + columns else {}
        for i, filters in enumerate(group, 1):
            modules[f"conv{i}"] = nn.Conv2d(channels, filters, 3, padding=1)
            if norm:
                modules[f"norm{i}"] = nn.BatchNorm2d(filters)
            if i == len(group):
                modules["pool"] = nn.MaxPool2d(2)  # before the ReLU, as in cnn.py
            modules[f"relu{i}"] = nn.ReLU()
            channels = filters
        stages[f"block{b}"] = stage(**modules)
    stages[f"block{len(groups)}"].add_module("flatten", nn.Flatten())
    return stages


def vgg9(inputs: Inputs) -> Model:
    """FedLDF's VGG-9 with BatchNorm in usual widths, which the paper leaves open; 9 231 114 parameters on CIFAR-10."""
    return classifier(inputs, _blocks(inputs, [(64,), (128,), (256, 256), (512, 512), (512, 512)], norm=True))


def vgg16(inputs: Inputs, norm: bool = True) -> Model:
    """CCN's VGG-16 with a 128-d latent; on CIFAR-10 15 044 298 parameters, with BatchNorm (norm) 15 052 746."""
    stages = _blocks(inputs, [(64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3], norm)
    return classifier(inputs, {**stages, "fc1": dense(width(inputs, stages), 512), "fc2": dense(512, 128)})
