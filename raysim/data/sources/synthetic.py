"""Random data sets with a pattern to learn."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raysim.core.bounds import Count, CountOrZero, NonNegative, NonNegativeInt, OpenFraction
from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.sources.base import PREPROCESSING, Source


@dataclass(frozen=True)
class Synthetic(Source):
    """Gaussian clouds around one random prototype a class; images for a shape of three numbers, else features."""

    samples: Count = 2000
    """Training rows."""
    test_samples: CountOrZero = 500
    """Test rows."""
    shape: tuple[Count, ...] = (1, 8, 8)
    """Shape of a sample: (C, H, W) for images, (F,) for features."""
    classes: Count = 10
    """Number of classes."""
    noise: NonNegative = 1.0
    """Standard deviation around prototypes, whose entries have standard deviation 1."""
    seed: NonNegativeInt = 0
    """Seed of all samples."""

    def load(self, root: Path | None) -> Dataset:
        if len(self.shape) not in (1, 3) or self.samples < self.classes:
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


@dataclass(frozen=True)
class Multilabel(Source):
    """Sums of random prototypes, one of each label that a sample has, with Gaussian noise; labels come independently."""

    samples: Count = 2000
    """Training rows."""
    test_samples: CountOrZero = 500
    """Test rows."""
    features: Count = 32
    """Numbers of a sample."""
    labels: Count = 8
    """Number of labels."""
    share: OpenFraction = 0.3
    """Probability that a sample has a label."""
    noise: NonNegative = 1.0
    """Standard deviation around sums of prototypes, whose entries have standard deviation 1."""
    seed: NonNegativeInt = 0
    """Seed of all samples."""

    def load(self, root: Path | None) -> Dataset:
        rng = np.random.default_rng(self.seed)
        prototypes = rng.standard_normal((self.labels, self.features), np.float32)
        n = self.samples + self.test_samples
        y = (rng.random((n, self.labels)) < self.share).astype(np.float32)
        noise = np.float32(self.noise) * rng.standard_normal((n, self.features), np.float32)
        # One label after another: the bits of a matrix product depend on the machine.
        x = sum((y[:, [i]] * prototypes[i] for i in range(self.labels)), start=noise)
        names = tuple(str(i) for i in range(self.labels))
        return Dataset("multilabel", x, y, self.samples, names, task="multilabel")
