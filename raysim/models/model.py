"""What a model is. This file imports PyTorch, so others import it when they make a model."""

from __future__ import annotations

from raysim.lazy import Tensor, nn


class Model(nn.Sequential):
    """Ordered, named stages. The last one is `head`, a Linear [D] -> [C]; all before it are the features.

    `model(x)` is `model.head(model.features(x))`. Parameters are registered stage by stage, so the last p stages are a
    contiguous tail of the parameter vector; every stage has parameters. A slice, as `model[:-1]`, shares its modules.
    """

    head: nn.Linear

    def features(self, x: Tensor) -> Tensor:
        """[B, ...] -> latent z [B, D]."""
        *stages, _ = self
        for stage in stages:
            x = stage(x)
        return x
