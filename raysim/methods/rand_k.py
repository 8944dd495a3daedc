"""Random sparsification (Konečný et al., Federated Learning: Strategies for Improving Communication Efficiency, 2016)."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.core.bounds import Share
from raysim.core.facts import RunFacts
from raysim.core.message import Compressor, Part, Sender
from raysim.core.rng import stream_of
from raysim.lazy import torch
from raysim.methods.top_k import count


@dataclass(frozen=True)
class RandK(Compressor):
    """Of each tensor k = max(1, ⌈ρn⌉) random elements (Konečný et al., 2016, section 3).

    They are drawn from a stream that both sides know, so no positions are sent. Wrong choice where `top_k` may be used: for
    the same bytes its error is smaller.
    """

    fraction: Share = 0.1
    """The share ρ of the elements."""
    unbiased: bool = False
    """Whether they are multiplied by n/k, so that their mean over all draws is the tensor."""

    def check(self, facts: RunFacts) -> str | None:
        if self.unbiased and any(transform.corrects for transform in facts.upload):
            return "unbiased multiplies by n/k, which error_feedback would amplify from round to round. Leave one of them out."
        return None

    def encode(self, part: Part, sender: Sender) -> None:
        n = len(part.values)
        k = count(self.fraction, n)
        index = torch.randperm(n, generator=sender.generator(f"message {stream_of(self)}"))[:k].sort().values
        known = part.index is None or part.index_is_known
        part.keep(index.to(part.values.device))
        part.index_is_known = known
        if self.unbiased:
            part.values = part.values * (n / k)
