"""Data sets, and who holds which sample. Knows nothing of methods or engines."""

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.partition import PARTITIONS, Partition, Proxy, Scheme, make_partition
from raysim.data.sources import SOURCES, Source

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "DataError",
    "Dataset",
    "Partition",
    "Proxy",
    "Scheme",
    "Source",
    "make_partition",
]
