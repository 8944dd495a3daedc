"""A small regression that comes with raysim, in the order in which scikit-learn has it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.sources.base import Source


@dataclass(frozen=True)
class Diabetes(Source):
    """Progression of diabetes in a year from 10 findings, 442 patients split 80/20 (Efron et al., 2004)."""

    def load(self, root: Path | None) -> Dataset:
        with np.load(Path(__file__).with_suffix(".npz")) as file:
            x, y = file["x"], file["y"]
        is_test = np.arange(len(y)) % 5 == 4
        order = np.argsort(is_test, kind="stable")
        train_rows = int((~is_test).sum())
        # Findings and progression in standard deviations around the mean, both of the training rows.
        columns = np.column_stack([x, y])[order]
        columns = (columns - columns[:train_rows].mean(0)) / columns[:train_rows].std(0)
        features, target = (np.ascontiguousarray(part, np.float32) for part in (columns[:, :-1], columns[:, -1:]))
        return Dataset("diabetes", features, target, train_rows, ("progression",), task="regression")
