"""The plan of an aggregation, as data: who sent which tensor, and with what coefficient it enters the global model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from raysim.core.layers import LayerMap
from raysim.lazy import Tensor, torch


@dataclass(frozen=True)
class Mixture:
    """θ⁺_l = anchor_l · θ_l + Σ_k weights_kl · θ_kl for every tensor l; all float64.

    `lam` are the clients' scalar weights. Over the clients that sent a tensor they are renormalised, which gives convex
    `base` weights: BatchNorm statistics are averaged with those, because signed or scaled weights can make a variance
    negative. Parameters are averaged with `weights` = base · factor. What no client sent stays as the server has it.
    """

    layers: LayerMap
    lam: Tensor  # [K] non-negative, at least one positive
    kept: Tensor  # [K] bool: False where a robust rule has dropped the client
    sent: Tensor  # [K, T + Tb] bool: the byte ledger and `support` read this, never the weights
    factor: Tensor  # [K, T + Tb] multipliers (L-DAWA, FedNova, FedLAW); ones otherwise
    anchor: Tensor  # [T] coefficient of the server's own tensor

    @classmethod
    def of(cls, lam: Tensor, layers: LayerMap) -> Mixture:
        """Every client sends everything and counts `lam` [K]."""
        sent = torch.ones(len(lam), len(layers.tensors), dtype=torch.bool)
        return cls(
            layers,
            lam.double(),
            torch.ones(len(lam), dtype=torch.bool),
            sent,
            sent.double(),
            torch.zeros(layers.T, dtype=torch.float64),
        )

    def reweighted(self, lam: Tensor) -> Mixture:
        """Other client weights [K]: finite, none negative, at least one positive. A method whose rule may give others keeps
        the prior then, and records that it `fell_back`."""
        return replace(self, lam=lam.double())

    def keep(self, mask: Tensor) -> Mixture:
        """Drop the clients where `mask` [K] is false. They have sent, but neither the mean nor a server step counts them."""
        return replace(self, lam=self.lam * mask, kept=self.kept & mask)

    def fault(self) -> str | None:
        """Why there is no average by these weights, as a clause; None where there is one."""
        lam = self.lam.numpy()
        if not all(np.isfinite(part.numpy()).all() for part in (self.lam, self.factor, self.anchor)):
            return "that are not finite (NaN or Inf)"
        if (total := lam.sum()) <= 0:
            return f"whose sum is {total:g}"
        return f"of which one is {lam.min():g}" if lam.min() < 0 else None

    def select(self, mask: Tensor) -> Mixture:
        """Send only where `mask` [K, T + Tb] (or [K]) is true as well."""
        return replace(self, sent=self.sent & (mask if mask.dim() == 2 else mask[:, None]))

    def best(self, score: Tensor, n: int) -> Tensor:
        """The `n` clients with the greatest `score` [K, L] of each layer among those that may send it, bool [K, L].

        Of clients with equal scores the one with the lower id comes first.
        """
        offered = self.layers.collect(self.sent)
        order = score.masked_fill(~offered, -torch.inf).argsort(dim=0, descending=True, stable=True)
        return offered & (order.argsort(dim=0) < n)

    def scaled(self, factor: Tensor, anchor: Tensor | None = None) -> Mixture:
        """Multiply weights by `factor`, which broadcasts to the parameters' tensors [K, T] or has a column for each
        tensor [K, T + Tb]. Set the server's coefficient [T]."""
        product = self.factor.numpy().copy()
        every = factor.dim() > 0 and factor.shape[-1] == product.shape[1]
        product[:, : None if every else self.layers.T] *= factor.numpy()
        scaled = replace(self, factor=torch.from_numpy(product), anchor=self.anchor if anchor is None else anchor)
        scaled.__dict__["base"] = self.base  # which depends on neither
        return scaled

    def without_buffers(self) -> Mixture:
        """No client sends buffers: they stay as they are."""
        sent = self.sent.clone()
        sent[:, self.layers.T :] = False
        return replace(self, sent=sent)

    def with_first_buffers(self) -> Mixture:
        """Each buffer is sent only by the first client of those that would and that count."""
        sent = self.sent.clone()
        buffers = sent[:, self.layers.T :]
        buffers &= (self.lam > 0)[:, None]
        buffers &= buffers.cumsum(0) == 1
        return replace(self, sent=sent)

    def support(self) -> Mixture:
        """Equal weights over the clients that sent each tensor and were not dropped; always the same object."""
        return self._support

    @cached_property
    def _support(self) -> Mixture:
        return Mixture.of(self.kept, self.layers).select(self.sent)

    @cached_property
    def shares(self) -> Tensor:
        """What each client counts among those that sent something, [K]; their sum is one."""
        counted = self.lam * self.sent.any(1)
        total = counted.sum()
        return counted / total if total > 0 else counted

    @cached_property
    def base(self) -> Tensor:
        """Convex weights over the uploaders of every tensor [K, T + Tb]; an all-zero column where there are none."""
        weights = self.lam.numpy()[:, None] * self.sent.numpy()
        total = weights.sum(0)
        return torch.from_numpy(weights / np.where(total > 0, total, 1.0))

    @cached_property
    def coefficients(self) -> Tensor:
        """Of all tensors of the clients [K, T + Tb]."""
        return self.base * self.factor

    @property
    def weights(self) -> Tensor:
        """Coefficients of the clients' parameters [K, T]."""
        return self.coefficients[:, : self.layers.T]

    @property
    def buffers(self) -> Tensor:
        """Coefficients of the clients' buffers [K, Tb]."""
        return self.coefficients[:, self.layers.T :]

    @property
    def own(self) -> Tensor:
        """Coefficient of the server's tensor [T]: `anchor`, or 1 where no client sent the tensor."""
        return torch.where(self.base[:, : self.layers.T].sum(0) > 0, self.anchor, 1.0)

    @cached_property
    def server_coefficient(self) -> Tensor:
        """Coefficient of the server's tensor [T + Tb] where clients enter with updates: θ⁺ = c · θ + Σ_k w_k Δ_k."""
        own = np.zeros(self.base.shape[1])
        own[: self.layers.T] = self.anchor
        own[self.base.numpy().sum(0) <= 0] = 1.0
        return torch.from_numpy(own + self.coefficients.numpy().sum(0))

    def per_client(self) -> Tensor:
        """The one weight of each client [K]. Raises `ValueError` if its tensors have different weights."""
        weights = self.weights
        if not torch.allclose(weights, weights[:, :1].expand_as(weights), rtol=1e-12, atol=1e-15):
            raise ValueError("a client's weight differs between layers here; this method needs one weight a client")
        return weights[:, 0]
