"""What the vision transformer is made of. This file imports PyTorch, so its builder imports it when it builds."""

from __future__ import annotations

from raysim.lazy import Tensor, nn, torch

PATCH, WIDTH, DEPTH, HEADS, HEAD_WIDTH, MLP_WIDTH = 4, 512, 6, 8, 64, 512


class Embed(nn.Module):
    """Image [B, C, H, W] -> class token and patches, with their positions: [B, 1 + HW / PATCH², WIDTH]."""

    def __init__(self, channels: int, height: int, width: int, dropout: float) -> None:
        super().__init__()
        patches = (height // PATCH) * (width // PATCH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 1 + patches, WIDTH))
        self.patch = nn.Conv2d(channels, WIDTH, PATCH, stride=PATCH)  # one linear map of every patch
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT  # [B, T, WIDTH]
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        embedded: Tensor = self.dropout(x + self.position)
        return embedded


class Attention(nn.Module):
    """Multi-head self-attention on normalised tokens, plus its input: [B, T, WIDTH] -> the same."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_WIDTH, bias=False)
        self.out = nn.Linear(HEADS * HEAD_WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)  # [B, HEADS, T, ·]
        # Written out: the fused kernels have non-deterministic gradients on GPUs, and T is small.
        mixed = (q @ k.mT * HEAD_WIDTH**-0.5).softmax(dim=-1) @ v
        change: Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + change


class MLP(nn.Module):
    """Two linear layers on each normalised token, plus its input: [B, T, WIDTH] -> the same."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, MLP_WIDTH)
        self.gelu = nn.GELU()
        self.dropout1 = nn.Dropout(dropout)
        self.outer = nn.Linear(MLP_WIDTH, WIDTH)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        z = self.dropout1(self.gelu(self.inner(self.norm(x))))
        change: Tensor = self.dropout2(self.outer(z))
        return x + change


class ClassToken(nn.Module):
    """[B, T, WIDTH] -> its first token, [B, WIDTH]."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]
