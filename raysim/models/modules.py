"""Modules of the models that PyTorch does not have. This file imports PyTorch, so builders import it when they build."""

from __future__ import annotations

from raysim.lazy import F, Tensor, nn, torch
from raysim.models.staged import stage


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, plus the input: [B, c_in, H, W] -> [B, c_out, H / stride, W / stride]."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(c_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = stage(conv=nn.Conv2d(c_in, c_out, 1, stride=stride, bias=False), norm=nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        z = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(z)) + self.shortcut(x))


class DenseLayer(nn.Module):
    """Bottleneck and convolution, norms first; the result joins its input: [B, c, H, W] -> [B, c + growth, H, W]."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv1(F.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(F.relu(self.norm2(z)))], dim=1)


class MeanEmbedding(nn.Embedding):
    """Tokens [B, T] -> their mean embedding [B, E], over all T positions: the papers' code counts the padding too."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).mean(dim=1)


class NGramConvs(nn.ModuleList):
    """Embeddings [B, T, E] -> the maximum over time of every filter of every convolution, [B, filters]."""

    def __init__(self, embedding: int, filters: int, lengths: tuple[int, ...]) -> None:
        super().__init__(nn.Conv1d(embedding, filters, n) for n in lengths)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT  # [B, E, T]
        return torch.cat([conv(x).relu().amax(dim=2) for conv in self], dim=1)


class Recurrent(nn.GRU):
    """Embeddings [B, T, E] -> the states after every position, [B, T, H]."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # without the last states
        states: Tensor = super().forward(x)[0]
        return states
