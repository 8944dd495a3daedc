"""Numbers of 16 bits (Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.core.failures import ClientFailure
from raysim.core.message import Compressor, Part, Sender
from raysim.lazy import torch


@dataclass(frozen=True)
class BF16(Compressor):
    """Every element as a bfloat16: 2 bytes, with 8 bits of precision and the range of float32.

    Wrong choice for whole models that move little: an element whose update is below 1/512 of it is often sent unchanged.
    """

    encodes_models: ClassVar[bool] = True

    def encode(self, part: Part, sender: Sender) -> None:
        part.values, part.bits = part.values.bfloat16().float(), 16


@dataclass(frozen=True)
class FP16(Compressor):
    """Every element as a float16: 2 bytes, with 11 bits of precision, up to 65504.

    Wrong choice for whole models with larger numbers: a client that has one is left out, see `rounds.on_client_failure`.
    """

    encodes_models: ClassVar[bool] = True

    def encode(self, part: Part, sender: Sender) -> None:
        values = part.values.half().float()
        if not torch.isfinite(values).all():
            raise ClientFailure(f"{part.name} has an element beyond 65504, the greatest of fp16. Use bf16")
        part.values, part.bits = values, 16
