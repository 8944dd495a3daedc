"""Random data sets with a pattern to learn."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.sources.base import PREPROCESSING, Source


@dataclass(frozen=True)
class Synthetic(Source):
    """Gaussian clouds around one random prototype a class; images for a shape of three numbers, else features."""

    samples: int = 2000
    """Training rows."""
    test_samples: int = 500
    """Test rows."""
    shape: tuple[int, ...] = (1, 8, 8)
    """Shape of a sample: (C, H, W) for images, (F,) for features."""
    classes: int = 10
    """Number of classes."""
    noise: float = 1.0
    """Standard deviation around prototypes, whose entries have standard deviation 1."""
    seed: int = 0
    """Seed of all samples."""

    def load(self, root: Path | None) -> Dataset:
        if len(self.shape) not in (1, 3) or min(self.shape) < 1 or self.samples < self.classes or self.classes < 1:
            raise DataError(
                f"synthetic: shape {self.shape}, {self.samples} samples, {self.classes} classes; the shape must be "
                "(C, H, W) or (F,), and every class needs a sample"
            )
        rng = np.random.default_rng(self.seed)
        prototypes = rng.standard_normal((self.classes, *self.shape), np.float32)
        rows = np.concatenate([np.arange(self.samples), np.arange(self.test_samples)])
        y = rows.astype(np.int64) % self.classes  # both splits are class-balanced
        x = prototypes[y] + np.float32(self.noise) * rng.standard_normal((len(y), *self.shape), np.float32)
        classes = tuple(str(c) for c in range(self.classes))
        if len(self.shape) == 1:
            return Dataset("synthetic", x, y, self.samples, classes)
        grey = np.rint(127.5 + 32 * x).clip(0, 255).astype(np.uint8)  # four standard deviations reach black and white
        return Dataset("synthetic", grey, y, self.samples, classes, **PREPROCESSING["half"])
