"""What a measure may ask of a run that lies on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from raysim.core.layers import LayerMap
from raysim.core.samples import Samples
from raysim.core.task import Task
from raysim.lazy import Tensor, nn

Part = Literal["test", "train"]
Score = Callable[[Tensor], tuple[float, float]]  # a model [S] -> its mean loss and the headline of the task


class RunView(Protocol):
    """A saved run with its models and the samples that it was trained on. One network serves all its models."""

    @property
    def folder(self) -> Path:
        """Where the run lies."""
        ...

    @property
    def rounds_done(self) -> int:
        """Rounds that it has run."""
        ...

    @property
    def layers(self) -> LayerMap:
        """The run's grouping."""
        ...

    @property
    def network(self) -> nn.Module:
        """The network into which `load` puts a model."""
        ...

    @property
    def task(self) -> Task:
        """What the models learned."""
        ...

    @property
    def batch_size(self) -> int:
        """Samples of one evaluation pass."""
        ...

    @property
    def is_text(self) -> bool:
        """Whether samples are tokens."""
        ...

    @property
    def sizes(self) -> np.ndarray:
        """[N] training samples of each client."""
        ...

    @property
    def label_counts(self) -> np.ndarray:
        """[N, C] training samples of each client and class."""
        ...

    def train_rows(self, client: int) -> np.ndarray:
        """The rows of a client's training samples."""
        ...

    def test_rows(self, client: int) -> np.ndarray:
        """The rows of a client's own test samples."""
        ...

    def cohort(self, t: int) -> list[int]:
        """Clients of a traced round whose models were written, sorted."""
        ...

    def of_rounds(self, rounds: tuple[int, ...]) -> tuple[int, ...]:
        """`rounds`, or all traced ones where none are named. Raises `MeasureError` where there are none."""
        ...

    def models(self, rounds: tuple[int, ...]) -> list[tuple[int, Tensor]]:
        """Rounds and the global models [S] after them; of no rounds, the last round and the final model."""
        ...

    def read(self, t: int, name: str) -> Tensor:
        """[S] a model of a traced round: before, after, client-0007 as it was sent, client-0007.init as it started."""
        ...

    def rows(self, part: Part, samples: int) -> np.ndarray:
        """At most `samples` rows of the server's test samples or of all clients' training samples, always the same."""
        ...

    def draw(self, rows: np.ndarray, samples: int) -> np.ndarray:
        """At most `samples` of the rows, sorted and always the same."""
        ...

    def samples(self, rows: np.ndarray, client: int | None = None) -> Samples:
        """Model inputs and labels, on the device; labels as `client` sees them."""
        ...

    def score(self, rows: np.ndarray, client: int | None = None) -> Score:
        """Scores models in eval mode on these rows, which are read once."""
        ...

    def load(self, value: Tensor) -> None:
        """Put `value` [S] into the network, in eval mode."""
        ...
