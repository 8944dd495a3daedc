"""Data sets, who holds which sample, and mini-batches. Knows nothing of methods or engines."""

from raysim.data.batches import batch_slices
from raysim.data.datasets import SOURCES, Dataset
from raysim.data.errors import DataError
from raysim.data.partition import PARTITIONS, Partition, Proxy, Scheme, make_partition

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "DataError",
    "Dataset",
    "Partition",
    "Proxy",
    "Scheme",
    "batch_slices",
    "make_partition",
]
