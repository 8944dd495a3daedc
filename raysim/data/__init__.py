"""Data sets, and who holds which sample. Knows nothing of methods or engines."""

from raysim.data import datasets, partition
from raysim.data.datasets import Dataset
from raysim.data.errors import DataError
from raysim.data.partition import Partition, Proxy, Scheme, make_partition
from raysim.registry import REGISTRY, Table

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

SOURCES: Table[type] = REGISTRY.table("dataset").fill(datasets.SOURCES)
PARTITIONS: Table[type[Scheme]] = REGISTRY.table("partition").fill(partition.PARTITIONS)
