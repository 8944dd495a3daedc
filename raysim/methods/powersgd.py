"""PowerSGD (Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS 2019)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raysim.core.bounds import PositiveInt
from raysim.core.facts import RunFacts
from raysim.core.layers import LayerMap
from raysim.core.message import FLOAT, Compressor, Part, Sender
from raysim.core.rng import SERVER, stream_seed
from raysim.lazy import Tensor, torch


@dataclass
class Factors:
    """The right factors of the last message, from which the next power iteration starts."""

    of: dict[str, Tensor] = field(default_factory=dict)  # by part, [m, r]


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Each matrix M [n, m] as a product of rank r: P = orth(MQ), Q = MᵀP, received as PQᵀ (Vogels et al., 2019, algorithm 1).

    A tensor is the matrix of its first dimension and all others. One of one dimension, or with r(n + m) ≥ nm, is sent whole.
    The paper averages P over workers before it makes Q; here each client does both, so that one message is enough.

    Wrong choice for networks of small tensors: most of them are sent whole.
    """

    rank: PositiveInt = 2
    """r."""

    def check(self, facts: RunFacts) -> str | None:
        for stack in (facts.upload, facts.download):
            if self in stack and stack[-1] is not self:
                return "sends factors and no elements, which nothing after it can encode. List it last."
        return None

    def new_state(self, layers: LayerMap) -> Factors:
        return Factors()

    def encode(self, part: Part, sender: Sender) -> None:
        spec, rank = replace(part.spec, start=0, stop=part.spec.size), self.rank
        n, m = spec.shape[0] if spec.shape else 1, spec.size // (spec.shape[0] if spec.shape else 1)
        if len(part.values) != spec.size or rank * (n + m) >= n * m:
            return
        matrix = spec.view(part.values).reshape(n, m)
        factors = sender.state(self).of
        if part.name not in factors:
            stream = torch.Generator().manual_seed(stream_seed(0, 0, SERVER, f"powersgd {part.name}"))
            factors[part.name] = torch.randn(m, rank, generator=stream).to(matrix.device)
        left = orthonormal(matrix @ factors[part.name])
        right = matrix.T @ left
        factors[part.name] = right
        part.values = spec.flat((left @ right.T).reshape(spec.shape))
        part.entries, part.bits, part.scales = rank * (n + m), FLOAT * 8, 0  # the factors, whatever the elements were


def orthonormal(columns: Tensor) -> Tensor:
    """[n, r] an orthonormal basis of the columns, by Gram and Schmidt; one that depends on those before it becomes zero."""
    basis = torch.zeros_like(columns)
    for i in range(columns.shape[1]):
        column = columns[:, i] - basis @ (basis.T @ columns[:, i])
        column = column - basis @ (basis.T @ column)
        norm = column.norm()
        basis[:, i] = torch.where(norm > 1e-6 * columns[:, i].norm(), column / norm, 0.0)
    return basis
