"""Uniform quantisation (Suresh et al., Distributed Mean Estimation with Limited Communication, ICML 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from raysim.core.bounds import Bits
from raysim.core.message import FLOAT, Compressor, Part, Sender
from raysim.lazy import torch


@dataclass(frozen=True)
class Uniform(Compressor):
    """2ᵇ equidistant levels between a tensor's least and greatest element (Suresh et al., 2017, section 2.2).

    b bits an element, and 8 bytes a tensor. Wrong choice where a few elements are far from the others: most levels are empty.
    """

    bits: Bits = 8
    """b, of each element."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """To the nearest level, or to one of its neighbours at random so that the mean is exact."""

    encodes_models: ClassVar[bool] = True

    def encode(self, part: Part, sender: Sender) -> None:
        low, high = part.values.aminmax()
        step = (high - low) / (2**self.bits - 1)
        place = (part.values - low) * torch.where(step > 0, 1 / step, 0.0)
        up = self.draws(part, sender) if self.rounding == "stochastic" else 0.5
        part.values = (place + up).floor_().clamp_(max=2**self.bits - 1).mul_(step).add_(low)
        part.bits, part.scales = self.bits, part.scales + 2 * FLOAT
