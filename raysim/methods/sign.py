"""Signs (Bernstein et al., signSGD, ICML 2018; scaled as by Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.core.message import FLOAT, Compressor, Part, Sender
from raysim.lazy import torch


@dataclass(frozen=True)
class Sign(Compressor):
    """Of each tensor the signs and their mean magnitude ‖v‖₁/n (Karimireddy et al., 2019, section 5).

    1 bit an element and 4 bytes a tensor; zero counts as positive. After `top_k` it is sparse ternary compression (Sattler et
    al., 2020). Wrong choice without `error_feedback`: small elements are sent as large ones.
    """

    def encode(self, part: Part, sender: Sender) -> None:
        scale = part.values.abs().mean()
        part.values = torch.where(part.values >= 0, scale, -scale)
        part.bits, part.scales = 1, part.scales + FLOAT
