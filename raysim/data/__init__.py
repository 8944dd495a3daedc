"""Data sets, and who holds which sample. Knows nothing of methods or engines."""

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
    "make_partition",
]
