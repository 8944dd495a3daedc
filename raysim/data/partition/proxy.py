"""The server's proxy set."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.partition.base import long_tail, require

PROXY_STREAM = 3  # second word of the stream's seed; the hold-outs have 1 and 2


@dataclass(frozen=True)
class Proxy:
    """The server's labelled set, class-balanced up to one sample or long-tailed, out of one split."""

    samples: int
    """Number of samples, of all classes together."""
    from_: Literal["test", "train"] = "test"
    """Split that the samples are drawn from."""
    long_tail: float | None = None
    """Ratio of the first class's size to the last's, 10 in FedLAW's table 6. The first class has its share of `samples`, the
    others less, so that the set is smaller."""
    balanced_sampling: bool = False
    """Whether the server's batches have all classes equally often, as in FedLAW's table 6."""
    oracle: bool = False
    """Whether tests use these samples too: what is learned on them is then a bound and no result of a method."""

    def __post_init__(self) -> None:
        require(self.samples >= 0, f"proxy: samples is {self.samples}; it cannot be negative")
        require(
            not self.oracle or self.from_ == "test",
            "proxy: an oracle learns on what it is tested on; its samples are from the test split",
        )
        require(
            self.long_tail is None or self.long_tail >= 1,
            f"proxy: long_tail is {self.long_tail}; it is the ratio of the largest class to the smallest, at least 1",
        )

    def draw(self, data: Dataset, seed: int) -> np.ndarray:
        """Rows in shuffled order. Where samples have no classes the set is random.

        Raises DataError if the split has too few rows, of a class or altogether.
        """
        split = slice(data.train_rows, None) if self.from_ == "test" else slice(data.train_rows)
        rows = np.random.default_rng([seed, PROXY_STREAM]).permutation(np.arange(len(data.y))[split])
        labels = data.labels
        share, extra = divmod(self.samples, data.num_classes)
        if self.long_tail is None:
            quota = share + (np.arange(data.num_classes) < extra)
        else:
            quota = long_tail(np.full(data.num_classes, self.samples / data.num_classes), self.long_tail)
        kept = np.zeros(len(rows), bool)
        for c, wanted in enumerate(quota):
            at = np.flatnonzero(labels[rows] == c)
            if len(at) < wanted:
                raise DataError(
                    f"proxy: the {self.from_} split of {data.name} has {len(at)} rows of class {data.label_names[c]}, but "
                    f"{wanted} are needed; lower proxy.samples or draw from the other split"
                )
            kept[at[:wanted]] = True
        return rows[kept]
