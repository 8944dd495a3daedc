"""What an instrument sees of a finished round."""

from __future__ import annotations

from typing import Protocol

from raysim.core.cohort import Cohort
from raysim.core.mixture import Mixture
from raysim.lazy import Tensor


class RoundView(Protocol):
    """A finished round, as an instrument sees it."""

    @property
    def t(self) -> int:
        """The round, from 0."""
        ...

    @property
    def drawn(self) -> tuple[int, ...]:
        """The clients that were drawn, sorted; among them those without training samples."""
        ...

    @property
    def cohort(self) -> Cohort:
        """The clients that came back."""
        ...

    @property
    def mixture(self) -> Mixture | None:
        """The plan of the aggregation; None where no client came back."""
        ...

    @property
    def before(self) -> Tensor:
        """[S] the global model that was sent."""
        ...

    @property
    def target(self) -> Tensor:
        """[S] the aggregate, before the server's steps."""
        ...

    @property
    def after(self) -> Tensor:
        """[S] the new global model."""
        ...
