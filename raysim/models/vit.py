"""The vision transformer of Dosovitskiy et al. 2021, in the small form of FedLWS's code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.core.bounds import Probability
from raysim.lazy import nn
from raysim.models.staged import Inputs, ModelError, classifier, stage

if TYPE_CHECKING:
    from raysim.models.model import Model


def vit(inputs: Inputs, dropout: Probability = 0.1) -> Model:
    """FedLWS's ViT: patch 4, width 512, depth 6, 8 heads, pre-norm; 9 523 722 parameters on CIFAR-10."""
    from raysim.models.transformer import DEPTH, MLP, PATCH, WIDTH, Attention, ClassToken, Embed

    channels, height, width = inputs.image()
    if height % PATCH or width % PATCH:
        raise ModelError(f"cuts images into {PATCH}x{PATCH} patches, but they are {height}x{width}")
    stages: dict[str, nn.Module] = {"embed": Embed(channels, height, width, dropout)}
    for i in range(DEPTH):
        stages[f"block{i}"] = stage(attention=Attention(dropout), mlp=MLP(dropout))
    last = stages[f"block{DEPTH - 1}"]
    last.add_module("token", ClassToken())
    last.add_module("norm", nn.LayerNorm(WIDTH))
    return classifier(inputs, stages)
