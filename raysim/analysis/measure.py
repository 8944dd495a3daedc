"""What a measure is: something computed from a saved run's models and data, and written beside its tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from raysim.errors import Explained
from raysim.lazy import Tensor, torch
from raysim.store import tables

if TYPE_CHECKING:
    from raysim.federation.saved import SavedRun

Part = Literal["test", "train"]
Score = Callable[[Tensor], tuple[float, float]]  # a model [S] -> its mean loss and the headline of the task


class MeasureError(Explained, Exception):
    """A measure cannot be taken of this run: what it needs was not recorded, or its options do not fit."""


class MissingExtra(Explained, ImportError):
    """A package of the extra `raysim[analysis]` is not installed."""


@dataclass(frozen=True)
class Taken:
    """What a measure found: rows of a table, a sentence, and facts that belong to no row."""

    columns: Mapping[str, np.ndarray | list[Any]]
    sentence: str
    facts: Mapping[str, Any] = field(default_factory=dict)  # as JSON has them


@dataclass(frozen=True)
class Measure:
    """Something that a saved run can be asked for; its fields are its options."""

    packages: ClassVar[tuple[str, ...]] = ()  # modules of the extra that it needs

    def take(self, run: SavedRun) -> Taken:
        """Raises `MeasureError`."""
        raise NotImplementedError


def need(measure: Measure) -> None:
    """Raise `MissingExtra` where a package that the measure needs is not installed."""
    missing = [package for package in measure.packages if find_spec(package) is None]
    if missing:
        name = type(measure).__name__.lower()
        raise MissingExtra(f"the measure {name} needs {missing[0]}: pip install 'raysim[analysis]'")


def need_classes(run: SavedRun) -> None:
    """Raise `MeasureError` where samples of the run do not have one class each."""
    if not run.data.has_classes:
        raise MeasureError(f"{run.folder}: its task is {run.task.name}; the measure compares data class by class.")


def write(name: str, measure: Measure, run: SavedRun) -> Taken:
    """Take the measure and write the table `measures/NAME` of the run, with options and facts in its metadata; and, unless
    the options name rounds, with how many the run has done, because the measure is of a shorter run once it goes on."""
    taken = measure.take(run)
    options = dataclasses.asdict(measure)
    about = {"options": options, **taken.facts}
    if all(options.get(name) in (None, ()) for name in ("round", "rounds")):
        about["rounds_done"] = run.rounds_done
    rows = pa.table({column: _plain(values) for column, values in taken.columns.items()})
    rows = rows.replace_schema_metadata({"raysim.measure": json.dumps(about)})
    tables.write_table(run.folder, f"measures/{name}", rows)
    return taken


def _plain(values: Any) -> Any:
    return values.numpy() if isinstance(values, torch.Tensor) else values
