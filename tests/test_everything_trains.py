"""A model, a partition or a source of data counts when a configuration with it trains a round through Ray."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import tiny
from data.test_datasets import png, write_cifar, write_idx, write_parquet
from models.test_model_behaviour import INPUTS

from raysim.config import ConfigError
from raysim.data import PARTITIONS, SOURCES
from raysim.data.given import as_dataset
from raysim.data.sources import Given
from raysim.federation import Federation, MakeEngine
from raysim.models import MODELS, ModelError
from raysim.store import tables

RNG = np.random.default_rng(0)
ONE_ROUND = {
    "rounds": {"total": 1, "participation": 1.0, "evaluate_every": 1},
    "engine": {"ray": {"clients_per_actor": 100}},
}


def check_trains(changes: dict[str, Any], folder: Path, warm_ray: MakeEngine) -> Federation:
    """One round, after which the model has moved, is finite, and was tested."""
    federation = Federation(tiny(**ONE_ROUND, **changes), folder, make_engine=warm_ray)
    before = federation.server.value.clone()
    federation.step()
    federation.finish()
    federation.close()
    after = federation.server.value
    assert set(tables.read(folder, "clients")["status"].to_pylist()) == {"ok"}
    assert after.isfinite().all()
    moved = federation.server.layers.norms((after - before)[: federation.server.layers.P])
    assert (moved > 0).all(), [n for n, m in zip(federation.server.layers.names, moved, strict=True) if not m]
    headline = federation.spec.task.headline.name
    score = tables.read(folder, "rounds")["accuracy" if headline == "accuracy" else f"metric.{headline}"][0].as_py()
    assert 0 <= score <= (np.inf if headline == "rmse" else 1)
    return federation


# ---- models


SIDE = {"simple_cnn": 24, "bn_cnn": 16, "alexnet": 16, "fedavg_cnn": 16}  # of images; the others take any


def standin_for(model: str, folder: Path) -> dict[str, Any]:
    """Two clients with a batch of samples each, as small as the model can take."""
    inputs = INPUTS.get(model)
    if model == "char_gru":
        return {"data": {"name": "characters", "partition": {"iid_equal": {"clients": 2}}}}
    if inputs is None or inputs.vocab is None:
        side = SIDE.get(model, 8)
        shape = list(inputs.shape) if model == "amazon_mlp" else [3, side, side]
        source = {"synthetic": {"samples": 8, "test_samples": 4, "shape": shape, "classes": 4}}
    else:
        texts = [" ".join(RNG.choice(list("abcdefgh"), 9)) for _ in range(16)]
        for split, rows in (("train", slice(12)), ("test", slice(12, 16))):
            write_parquet(folder / f"{split}.parquet", text=texts[rows], label=([0, 1, 2, 3] * 4)[rows])
        source = {"parquet": {"path": str(folder), "length": inputs.shape[0]}}
    return {"data": {"name": source, "partition": {"iid_equal": {"clients": 2}}}}


@pytest.mark.parametrize("name", [*MODELS, "torchvision.shufflenet_v2_x0_5"])
def test_model(name, tmp_path, warm_ray):
    check_trains({"model": {"name": name}, **standin_for(name, tmp_path / "data")}, tmp_path / "run", warm_ray)


# ---- partitions


CLIENTS = {
    "dirichlet_counts": {"alpha": 1.0, "clients": 6, "min_size": 2},
    "dirichlet_hybrid": {"alpha2": 1.0, "clients": 4},
    "dirichlet_longtail": {"alpha": 5.0, "clients": 4},
    "dirichlet_capped": {"alpha": 1.0, "clients": 6, "least": 5},
    "pathological": {"clients": 6, "least": 5},
    "extended_dirichlet": {"alpha": 1.0, "clients": 6, "least": 5},
    "iid_equal": {"clients": 6},
    "class_groups": {"clients": 6},
    "label_swap": {"fraction": 0.5, "clients": 6},
    "natural": {},
    "quantity_skew": {"clients": 6},
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_partition(name, tmp_path, warm_ray):
    source: dict[str, Any] = {"synthetic": {"samples": 120, "test_samples": 40, "shape": [1, 8, 8], "classes": 4}}
    if name == "natural":
        np.savez(tmp_path / "set.npz", **images(1, 8), client_train=np.arange(12) % 3)
        source = {"npz": {"path": str(tmp_path / "set.npz")}}
    data = {"name": source, "partition": {name: CLIENTS[name]}}
    federation = check_trains({"data": data}, tmp_path / "run", warm_ray)
    assert federation.cohort_size == federation.partition.clients == CLIENTS[name].get("clients", 3)


# ---- sources


def images(channels: int, side: int) -> dict[str, np.ndarray]:
    """Twelve for training, four for testing, of three classes."""
    x = RNG.integers(0, 256, (16, channels, side, side), dtype=np.uint8)
    y = np.arange(16) % 3
    return {"x_train": x[:12], "y_train": y[:12], "x_test": x[12:], "y_test": y[12:]}


def mnist_like(folder: str, train: str = "train", test: str = "t10k", first: int = 0) -> Callable[..., dict[str, Any]]:
    def write(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        found = images(1, 28)
        for prefix, split in ((train, "train"), (test, "test")):
            write_idx(root / folder / "raw" / f"{prefix}-images-idx3-ubyte", found[f"x_{split}"][:, 0])
            write_idx(root / folder / "raw" / f"{prefix}-labels-idx1-ubyte", found[f"y_{split}"] + first)
        return {}

    return write


def parquet(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = images(3, 8)
    for split in ("train", "test"):
        encoded = [png(image) for image in found[f"x_{split}"]]
        write_parquet(root / "set" / f"{split}.parquet", encoded, label=found[f"y_{split}"].tolist())
    return {"path": "set"}


def huggingface(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    parquet(root / "as_parquet", monkeypatch)
    for split in ("train", "test"):
        table, folder = pq.read_table(root / f"as_parquet/set/{split}.parquet"), root / "set" / split
        folder.mkdir(parents=True)
        with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
            stream.write_table(table)
    return {"path": "set"}


def from_torchvision(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    mnist_like("MNIST")(root, monkeypatch)
    return {"name": "MNIST"}


def folders(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = images(3, 8)
    for split in ("train", "test"):
        for i, (image, label) in enumerate(zip(found[f"x_{split}"], found[f"y_{split}"], strict=True)):
            file = root / "set" / split / "cdo"[label] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png(image))
    return {"path": "set"}


def npz(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    np.savez(root / "set.npz", **images(3, 8))
    return {"path": "set.npz"}


def csv(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    rows = [f"{number},{-number},{'ab'[int(number > 0)]}" for number in RNG.normal(size=16)]
    (root / "set.csv").write_text("\n".join(["x,y,label", *rows]))
    return {"path": "set.csv", "test_frac": 0.25}


def given(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return asdict(Given.of(as_dataset(images(3, 8))))


def cifar(reader: str) -> Callable[..., dict[str, Any]]:
    return lambda root, monkeypatch: write_cifar(root, reader, monkeypatch) is None or {}


STANDINS: dict[str, Callable[..., dict[str, Any]]] = {
    "mnist": mnist_like("MNIST"),
    "fashion_mnist": mnist_like("FashionMNIST"),
    "emnist": mnist_like("EMNIST", "emnist-letters-train", "emnist-letters-test", first=1),
    "cifar10": cifar("CIFAR10"),
    "cifar100": cifar("CIFAR100"),
    "parquet": parquet,
    "huggingface": huggingface,
    "torchvision": from_torchvision,
    "images": folders,
    "npz": npz,
    "csv": csv,
    "given": given,
    "digits": lambda root, monkeypatch: {},
    "diabetes": lambda root, monkeypatch: {},
    "multilabel": lambda root, monkeypatch: {"samples": 40, "test_samples": 8},
    "characters": lambda root, monkeypatch: {},
    "synthetic": lambda root, monkeypatch: {"samples": 40, "test_samples": 8},
}


@pytest.mark.parametrize("name", SOURCES)
def test_source(name, tmp_path, warm_ray, monkeypatch):
    """From files in the source's own format; through the `data.root` of the configuration."""
    fields = STANDINS[name](tmp_path, monkeypatch) | ({"split": "letters"} if name == "emnist" else {})
    clients = 100 if name == "digits" else 2
    data = {"name": {name: fields}, "root": str(tmp_path), "partition": {"iid_equal": {"clients": clients}}}
    models = {
        "csv": "mlp",
        "diabetes": "mlp",
        "multilabel": "mlp",
        "characters": "char_gru",
    }  # for what is not an image
    model = {"model": {"name": models[name]}} if name in models else {}
    check_trains({"data": data, **model}, tmp_path / "run", warm_ray)


def test_a_model_that_the_data_do_not_fit_is_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match=r"resnet20.*needs images"):
        Federation(tiny(model={"name": "resnet20"}, data={"name": {"synthetic": {"shape": [5]}}}), tmp_path)
    with pytest.raises(ConfigError, match=r"no model 'resnet21'\. Did you mean 'resnet20'"):
        tiny(model={"name": "resnet21"})
