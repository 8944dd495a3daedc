"""What a model is built for, and how one is put together from stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysim.errors import Explained
from raysim.lazy import nn, torch

if TYPE_CHECKING:
    from raysim.models.model import Model


class ModelError(Explained, ValueError):
    """A model cannot be built as asked; the message names what does not fit."""


@dataclass(frozen=True)
class Inputs:
    """What a model is built for: `shape` of one sample, (C, H, W), (T,) tokens or (F,) features, and the number of
    outputs: classes, labels, targets or tokens."""

    shape: tuple[int, ...]
    classes: int
    vocab: int | None = None  # size of the token vocabulary; None where a sample is not tokens

    def image(self) -> tuple[int, int, int]:
        """(C, H, W); ModelError where the samples are not images."""
        if self.vocab is not None or len(self.shape) != 3:
            raise ModelError(f"needs images of shape (C, H, W), not {self}")
        return self.shape

    def tokens(self) -> int:
        """Size of the vocabulary; ModelError where the samples are not token sequences."""
        if self.vocab is None or len(self.shape) != 1:
            raise ModelError(f"needs tokens of shape (T,) and a vocabulary, not {self}")
        return self.vocab

    def __str__(self) -> str:
        return f"{self.shape} with {'no vocabulary' if self.vocab is None else f'a vocabulary of {self.vocab}'}"


def stage(**modules: nn.Module) -> nn.Sequential:
    """Named modules, applied in the order given."""
    return nn.Sequential(OrderedDict(modules))


def width(inputs: Inputs, stages: Mapping[str, nn.Module]) -> int:
    """D of the [B, D], or [B, T, D], that newly built stages make of a batch; ModelError, naming the stage, where it does not fit.

    Found by passing one sample of zeros, in evaluation mode, which draws no random number and moves no buffer. (The
    meta device would compute nothing at all, but its first use imports a compiler: seconds and memory in every actor.)
    """
    x = torch.zeros(1, *inputs.shape, dtype=None if inputs.vocab is None else torch.long)
    for name, module in stages.items():
        try:
            with torch.no_grad():
                x = module.eval()(x)
        except (RuntimeError, AssertionError, ValueError) as error:  # torchvision asserts on its image sizes
            raise ModelError(f"samples of shape {inputs.shape} do not fit its stage '{name}': {error}") from error
        module.train()
    return x.shape[-1]


def classifier(inputs: Inputs, stages: Mapping[str, nn.Module]) -> Model:
    """The stages, and a linear head of the width that they leave."""
    from raysim.models.model import Model

    head = nn.Linear(width(inputs, stages), inputs.classes)
    return Model(OrderedDict(stages, head=head))
