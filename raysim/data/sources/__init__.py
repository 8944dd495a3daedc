"""Where data sets come from, by the name that a configuration gives: one file a kind of source."""

from raysim.data.sources.base import Source
from raysim.data.sources.characters import Characters
from raysim.data.sources.csv import Csv
from raysim.data.sources.diabetes import Diabetes
from raysim.data.sources.digits import Digits
from raysim.data.sources.given import Given
from raysim.data.sources.images import Images
from raysim.data.sources.npz import Npz
from raysim.data.sources.parquet import HuggingFace, Parquet
from raysim.data.sources.synthetic import Multilabel, Synthetic
from raysim.data.sources.torchvision import CIFAR10, CIFAR100, EMNIST, MNIST, FashionMNIST
from raysim.data.sources.vision import Torchvision
from raysim.registry import REGISTRY, Table

__all__ = [
    "CIFAR10", "CIFAR100", "EMNIST", "MNIST", "SOURCES", "Characters", "Csv", "Diabetes", "Digits",
    "FashionMNIST", "Given", "HuggingFace", "Images", "Multilabel", "Npz", "Parquet", "Source", "Synthetic", "Torchvision",
]  # fmt: skip

SOURCES: Table[type[Source]] = REGISTRY.table("dataset").fill(
    {
        "mnist": MNIST,
        "fashion_mnist": FashionMNIST,
        "cifar10": CIFAR10,
        "cifar100": CIFAR100,
        "emnist": EMNIST,
        "torchvision": Torchvision,
        "parquet": Parquet,
        "huggingface": HuggingFace,
        "images": Images,
        "npz": Npz,
        "csv": Csv,
        "given": Given,
        "digits": Digits,
        "synthetic": Synthetic,
        "diabetes": Diabetes,
        "multilabel": Multilabel,
        "characters": Characters,
    }
)
