"""Plain convolutional networks and multi-layer perceptrons."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from raysim.core.bounds import Count
from raysim.lazy import nn
from raysim.models.staged import Inputs, ModelError, classifier, stage, width

if TYPE_CHECKING:
    from raysim.models.model import Model


def conv(
    channels: int, width: int, kernel: int, padding: int = 0, norm: bool = False, pool: bool = False, bias: bool = True
) -> dict[str, nn.Module]:
    """Convolution, BatchNorm, max-pooling, ReLU. The bias, idle before a norm, is in the parameter counts of the papers' code.

    Papers pool after the ReLU. Both orders give the same numbers and gradients; in this one the ReLU has a quarter of the
    elements.
    """
    modules: dict[str, nn.Module] = {"conv": nn.Conv2d(channels, width, kernel, padding=padding, bias=bias)}
    if norm:
        modules["norm"] = nn.BatchNorm2d(width)
    if pool:
        modules["pool"] = nn.MaxPool2d(2)
    return modules | {"relu": nn.ReLU()}


def dense(features: int, width: int) -> nn.Sequential:
    return stage(linear=nn.Linear(features, width), relu=nn.ReLU())


def simple_cnn(inputs: Inputs) -> Model:
    """FedLAW's and FedLWS's CNN: 3 unpadded convolutions 3x3, 2 linear; 122 570 parameters on CIFAR-10."""
    channels, _, _ = inputs.image()
    stages = {
        "conv1": stage(**conv(channels, 32, 3, pool=True)),
        "conv2": stage(**conv(32, 64, 3, pool=True)),
        "conv3": stage(**conv(64, 64, 3), flatten=nn.Flatten()),
    }
    return classifier(inputs, {**stages, "fc1": dense(width(inputs, stages), 64)})


def bn_cnn(inputs: Inputs) -> Model:
    """FedLWS's FashionMNIST CNN with BatchNorm, of its released code; 39 786 parameters on 1x28x28."""
    channels, _, _ = inputs.image()
    stages = {
        "conv1": stage(**conv(channels, 16, 5, padding=2, norm=True, pool=True)),
        "conv2": stage(**conv(16, 32, 3, norm=True)),
        "conv3": stage(**conv(32, 64, 3, norm=True, pool=True), flatten=nn.Flatten()),
    }
    return classifier(inputs, stages)


def lenet(inputs: Inputs) -> Model:
    """FedLAW's LeNet: 2 padded convolutions 5x5, 1 linear; 28 938 parameters on 1x28x28."""
    channels, _, _ = inputs.image()
    stages = {
        "conv1": stage(**conv(channels, 16, 5, padding=2, pool=True)),
        "conv2": stage(**conv(16, 32, 5, padding=2, pool=True), flatten=nn.Flatten()),
    }
    return classifier(inputs, stages)


def alexnet(inputs: Inputs) -> Model:
    """FedLAW's AlexNet (not released: a usual CIFAR variant, without dropout); 23 272 266 parameters on CIFAR-10."""
    channels, _, _ = inputs.image()
    stages = {
        "conv1": stage(conv=nn.Conv2d(channels, 64, 3, stride=2, padding=1), pool=nn.MaxPool2d(2), relu=nn.ReLU()),
        "conv2": stage(**conv(64, 192, 3, padding=1, pool=True)),
        "conv3": stage(**conv(192, 384, 3, padding=1)),
        "conv4": stage(**conv(384, 256, 3, padding=1)),
        "conv5": stage(**conv(256, 256, 3, padding=1, pool=True), flatten=nn.Flatten()),
    }
    return classifier(inputs, {**stages, "fc1": dense(width(inputs, stages), 4096), "fc2": dense(4096, 4096)})


def fedavg_cnn(inputs: Inputs) -> Model:
    """FedALA's 4-layer CNN, after McMahan et al. 2017; 582 026 parameters on MNIST, 878 538 on CIFAR-10."""
    channels, _, _ = inputs.image()
    stages = {
        "conv1": stage(**conv(channels, 32, 5, pool=True)),
        "conv2": stage(**conv(32, 64, 5, pool=True), flatten=nn.Flatten()),
    }
    return classifier(inputs, {**stages, "fc1": dense(width(inputs, stages), 512)})


def small_cnn(inputs: Inputs) -> Model:
    """Ours, for quick runs: 2 padded convolutions 3x3, 2 linear; 13 706 parameters on the 1x8x8 digits."""
    channels, _, _ = inputs.image()
    stages = {
        "conv1": stage(**conv(channels, 16, 3, padding=1, pool=True)),
        "conv2": stage(**conv(16, 32, 3, padding=1, pool=True), flatten=nn.Flatten()),
    }
    return classifier(inputs, {**stages, "fc1": dense(width(inputs, stages), 64)})


def tiny_bn_cnn(inputs: Inputs, bias: bool = True) -> Model:
    """Ours, for tests of methods with BatchNorm: 2 padded convolutions 3x3, 1 linear; 1 946 parameters on 1x8x8."""
    # Without the convolutions' idle bias, whose gradient is all rounding, Adam's steps can be computed again.
    channels, _, _ = inputs.image()
    stages = {
        "conv1": stage(**conv(channels, 8, 3, 1, norm=True, pool=True, bias=bias)),
        "conv2": stage(**conv(8, 16, 3, 1, norm=True, pool=True, bias=bias), flatten=nn.Flatten()),
    }
    return classifier(inputs, stages)


def mlp(inputs: Inputs, hidden: tuple[Count, ...] = (200, 200)) -> Model:
    """FedLAW's perceptron, ReLU after each hidden layer; 199 210 parameters on 1x28x28, FedLWS: 656 810 on CIFAR-10."""
    if inputs.vocab is not None:
        raise ModelError(f"needs images or features, not {inputs}")
    if not hidden:
        raise ModelError("hidden is empty, but a model needs a feature stage before its head")
    sizes = pairwise([prod(inputs.shape), *hidden])
    stages = {  # Flatten is for images: features pass it as they are
        f"fc{i}": stage(flatten=nn.Flatten(), linear=nn.Linear(size, wide), relu=nn.ReLU())
        for i, (size, wide) in enumerate(sizes, 1)
    }
    return classifier(inputs, stages)


def amazon_mlp(inputs: Inputs) -> Model:
    """FedLWS's perceptron for Amazon Review, 5000-1000-500-100-2; 5 551 802 parameters."""
    return mlp(inputs, hidden=(1000, 500, 100))
