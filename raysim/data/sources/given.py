"""Data sets that were given as objects."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.sources.base import Source

if TYPE_CHECKING:
    from raysim.core.task import Task


@dataclass(frozen=True)
class Given(Source):
    """A data set that was given as an object, `raysim.run(..., data=...)`, to this process."""

    digest: str
    """Of all that the data set is."""

    known: ClassVar[dict[str, Dataset]] = {}
    """By digest, what this process was given."""

    @classmethod
    def of(cls, data: Dataset) -> Self:
        """The entry of `data`, which can be loaded from now on."""
        about = (data.sha256(), data.name, data.classes, data.scale, data.mean, data.std, data.vocab, _about(data.task))
        digest = hashlib.sha256(repr(about).encode())
        if data.client is not None:
            digest.update(np.ascontiguousarray(data.client).data)
        entry = cls(digest.hexdigest()[:32])
        cls.known[entry.digest] = data
        return entry

    def check(self, root: Path | None) -> str | None:
        if self.digest in self.known:
            return None
        return "given: the run's samples were an object in Python; give it again: raysim.resume(FOLDER, data=...)."

    def load(self, root: Path | None) -> Dataset:
        if problem := self.check(root):
            raise DataError(problem)
        return self.known[self.digest]


def _about(task: str | Task) -> object:
    """What a task is, the same in every process: functions are shown with their address."""
    if isinstance(task, str):
        return task
    others = [(field.name, getattr(task, field.name)) for field in fields(task) if field.name != "metrics"]
    return type(task).__qualname__, others, [metric.name for metric in task.metrics]
