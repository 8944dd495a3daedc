"""The handwritten digits that come with scikit-learn."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.sources.base import Source


@dataclass(frozen=True)
class Digits(Source):
    """Handwritten digits, 1×8×8, 10 classes, 1,797 rows split 80/20 (Alpaydin and Kaynak, 1998; scikit-learn)."""

    def check(self, root: Path | None) -> str | None:
        return None if find_spec("sklearn") else "digits comes with the package scikit-learn; install it."

    def load(self, root: Path | None) -> Dataset:
        if problem := self.check(root):
            raise DataError(problem)
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        nth = np.empty(len(y), np.int64)  # position of each row among those of its class
        for c in range(10):
            nth[y == c] = np.arange((y == c).sum())
        is_test = nth % 5 == 4  # every fifth of each class: stratified, and the same everywhere
        order = np.argsort(is_test, kind="stable")
        images = x[order].astype(np.uint8).reshape(-1, 1, 8, 8)  # grey levels 0..16
        classes = tuple(str(c) for c in range(10))
        return Dataset("digits", images, y[order].astype(np.int64), int((~is_test).sum()), classes, scale=16.0)
