"""Which client holds which samples: the partitions of the papers, and the server's proxy set.

A scheme draws from `numpy.random.RandomState`, in the order of the code that it stands for, so that its seed gives the
split of the paper. What raysim adds, per-client hold-outs and the proxy set, has streams of its own.
"""

from raysim.data.partition.base import MergingScheme, Scheme
from raysim.data.partition.dirichlet import (
    DirichletCapped,
    DirichletCounts,
    DirichletHybrid,
    DirichletLongtail,
    ExtendedDirichlet,
)
from raysim.data.partition.iid import IIDEqual, LabelSwap, QuantitySkew
from raysim.data.partition.make import make_partition
from raysim.data.partition.natural import Natural
from raysim.data.partition.pathological import ClassGroups, Pathological
from raysim.data.partition.proxy import Proxy
from raysim.data.partition.table import Partition
from raysim.registry import REGISTRY, Table

__all__ = [
    "PARTITIONS", "ClassGroups", "DirichletCapped", "DirichletCounts", "DirichletHybrid", "DirichletLongtail",
    "ExtendedDirichlet", "IIDEqual", "LabelSwap", "MergingScheme", "Natural", "Partition", "Pathological", "Proxy",
    "QuantitySkew", "Scheme", "make_partition",
]  # fmt: skip

PARTITIONS: Table[type[Scheme]] = REGISTRY.table("partition").fill(
    {
        "dirichlet_counts": DirichletCounts,
        "dirichlet_hybrid": DirichletHybrid,
        "dirichlet_longtail": DirichletLongtail,
        "dirichlet_capped": DirichletCapped,
        "pathological": Pathological,
        "extended_dirichlet": ExtendedDirichlet,
        "iid_equal": IIDEqual,
        "class_groups": ClassGroups,
        "label_swap": LabelSwap,
        "natural": Natural,
        "quantity_skew": QuantitySkew,
    }
)
