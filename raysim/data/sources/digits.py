"""Small handwritten digits that come with raysim: the test set of UCI's Optical Recognition of Handwritten Digits, in the
order in which scikit-learn has it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.sources.base import Source


@dataclass(frozen=True)
class Digits(Source):
    """Handwritten digits, 1×8×8, 10 classes, 1,797 rows split 80/20 (Alpaydin and Kaynak, 1998, CC BY 4.0)."""

    def load(self, root: Path | None) -> Dataset:
        with np.load(Path(__file__).with_suffix(".npz")) as file:
            x, y = file["x"], file["y"]
        nth = np.empty(len(y), np.int64)  # position of each row among those of its class
        for c in range(10):
            nth[y == c] = np.arange((y == c).sum())
        is_test = nth % 5 == 4  # every fifth of each class: stratified, and the same everywhere
        order = np.argsort(is_test, kind="stable")
        images = x[order].reshape(-1, 1, 8, 8)  # grey levels 0..16
        classes = tuple(str(c) for c in range(10))
        return Dataset("digits", images, y[order].astype(np.int64), int((~is_test).sum()), classes, scale=16.0)
