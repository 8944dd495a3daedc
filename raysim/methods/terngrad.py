"""TernGrad (Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, NeurIPS 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.core.message import FLOAT, Compressor, Part, Sender
from raysim.lazy import torch


@dataclass(frozen=True)
class TernGrad(Compressor):
    """Each element is 0 or ± the tensor's greatest magnitude, at random so that the mean is exact (Wen et al., 2017, equation 1).

    2 bits an element and 4 bytes a tensor. Wrong choice where few elements are large: the others are mostly zero.
    """

    def encode(self, part: Part, sender: Sender) -> None:
        scale = part.values.abs().amax()
        kept = self.draws(part, sender) * scale < part.values.abs()
        part.values = torch.where(kept, part.values.sign() * scale, 0.0)
        part.bits, part.scales = 2, part.scales + FLOAT
