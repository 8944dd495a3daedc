"""Data sets, and who holds which sample. Knows nothing of methods or engines."""

from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.load import OF_FILES, Storage, load
from raysim.data.partition import PARTITIONS, Partition, Proxy, Scheme, make_partition
from raysim.data.sources import SOURCES, Source

__all__ = [
    "OF_FILES", "PARTITIONS", "SOURCES", "DataError", "Dataset", "Partition", "Proxy", "Scheme", "Source", "Storage",
    "load", "make_partition",
]  # fmt: skip
