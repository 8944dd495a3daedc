"""Torchvision's classification models. Torchvision itself is imported when one of them is asked for, not before."""

from __future__ import annotations

import re
from collections import OrderedDict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.lazy import nn
from raysim.models.staged import Inputs, ModelError, stage, width

if TYPE_CHECKING:
    from raysim.models.model import Model

_REGISTERED = re.compile(r"^@register_model\(\)\n(?:@.*\n)*def (\w+)", re.MULTILINE)


@cache
def architectures() -> list[str]:
    """Names of torchvision's classification models; none where torchvision is not installed."""
    found = find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        return []
    # Its source is read, because importing it takes seconds, and a misspelt name is reported at once.
    sources = Path(found.submodule_search_locations[0], "models").glob("*.py")
    names = [name for source in sources for name in _REGISTERED.findall(source.read_text(encoding="utf-8"))]
    return sorted(names)


def _network(architecture: str, inputs: Inputs) -> Any:
    """The network with its own initialisation, for these classes, channels and image size."""
    from torchvision import models

    channels, height, width = inputs.image()
    options: dict[str, object] = {}
    if architecture.startswith("vit_"):
        options = {"image_size": height}
    elif architecture.startswith("maxvit"):
        options = {"input_size": (height, width)}
    elif architecture in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}  # a model has one head
    try:
        network = models.get_model(architecture, num_classes=inputs.classes, **options)
    except (AssertionError, ValueError) as error:  # an image size that its patches or windows do not divide
        raise ModelError(f"cannot be built for {height}x{width} images: {error}") from error
    stem: Any
    path, stem = next((path, m) for path, m in network.named_modules() if isinstance(m, nn.Conv2d))
    if stem.in_channels != channels:
        bias = stem.bias is not None
        conv = nn.Conv2d(channels, stem.out_channels, stem.kernel_size, stem.stride, stem.padding, bias=bias)
        network.set_submodule(path, conv)
    return network


def classifier(architecture: str, inputs: Inputs) -> nn.Module:
    """Torchvision's model of that name, without auxiliary classifiers."""
    network: nn.Module = _network(architecture, inputs)
    width(inputs, {architecture: network})  # says so where the images are too small
    return network


def resnet18_imagenet(inputs: Inputs) -> Model:
    """FedALA's ResNet-18, torchvision's with its 7x7 stem; 11 279 112 parameters on Tiny-ImageNet."""
    from raysim.models.model import Model

    network = _network("resnet18", inputs)
    stages = {
        "stem": stage(conv=network.conv1, norm=network.bn1, relu=network.relu, pool=network.maxpool),
        "stage1": network.layer1,
        "stage2": network.layer2,
        "stage3": network.layer3,
        "stage4": network.layer4.extend([network.avgpool, nn.Flatten()]),
    }
    width(inputs, stages)
    return Model(OrderedDict(stages, head=network.fc))
