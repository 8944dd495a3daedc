"""DenseNet-BC of Huang et al. 2017, in its CIFAR form."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.models.staged import Inputs, Model, classifier, stage

GROWTH = 32


class DenseLayer(nn.Module):
    """Bottleneck and convolution, norms first; the result joins its input: [B, c, H, W] -> [B, c + GROWTH, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * GROWTH, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * GROWTH)
        self.conv2 = nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv1(F.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(F.relu(self.norm2(z)))], dim=1)


def _transition(channels: int) -> nn.Sequential:
    """Halves the channels and the resolution."""
    conv = nn.Conv2d(channels, channels // 2, 1, bias=False)
    return stage(norm=nn.BatchNorm2d(channels), relu=nn.ReLU(), conv=conv, pool=nn.AvgPool2d(2))


def densenet121(inputs: Inputs) -> Model:
    """FedLAW's and FedLWS's DenseNet-121 with a bare 3x3 stem; 6 956 298 parameters (C = 10)."""
    in_channels, _, _ = inputs.image()
    channels = 2 * GROWTH
    stages = {"stem": stage(conv=nn.Conv2d(in_channels, channels, 3, padding=1, bias=False))}
    for b, layers in enumerate((6, 12, 24, 16), 1):
        modules: dict[str, nn.Module] = {}
        for i in range(1, layers + 1):
            modules[f"layer{i}"] = DenseLayer(channels)
            channels += GROWTH
        if b < 4:
            modules["transition"] = _transition(channels)
            channels //= 2
        else:
            modules |= {"norm": nn.BatchNorm2d(channels), "relu": nn.ReLU()}
            modules |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        stages[f"dense{b}"] = stage(**modules)
    return classifier(inputs, stages)
