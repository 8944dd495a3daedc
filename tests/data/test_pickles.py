"""No source of data runs a pickle: sentinels lie wherever one could be read."""

from __future__ import annotations

import ast
import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from torchvision import datasets
from typer.testing import CliRunner

from raysim.cli.app import app
from raysim.data import DataError
from raysim.data.pickles import read_arrays
from raysim.data.sources import Npz, vision


class Sentinel:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.folder,)


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def plant(path: Path, ran: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(Sentinel(ran)))
    return path


def test_a_sentinel_runs_where_a_pickle_is_read(tmp_path: Path, ran: Path) -> None:
    pickle.loads(plant(tmp_path / "pickle", ran).read_bytes())
    assert ran.is_dir()


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("LSUN", "is none of the data sets"),
        ("CIFAR10", "write data.name: cifar10"),
        ("CIFAR100", "data.name: cifar100"),
    ],
)
def test_torchvisions_readers_of_pickles_are_refused(
    name: str, way_out: str, tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LSUN's takes its index from the working directory, CIFAR's their batches from the root."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "bedroom_train_lmdb").mkdir(parents=True)
    for kind in (getattr(datasets, name), datasets.LSUN):
        for file, _ in getattr(kind, "train_list", []):
            plant(tmp_path / "data" / kind.base_folder / file, ran)
    folder = "".join(c for c in str(tmp_path / "data" / "bedroom_train_lmdb") if c.isalnum())
    plant(tmp_path / f"_cache_{folder}", ran)
    options = {"classes": ["bedroom_train"]} if name == "LSUN" else {}
    source = {"torchvision": {"name": name, "options": options, "download": False}}
    data = {"name": source, "root": "data", "partition": {"iid_equal": {"clients": 2}}}
    config = {
        "name": "x",
        "data": data,
        "model": {"name": "mlp"},
        "rounds": {"total": 1},
        "local": {"lr": 0.1, "batch_size": 4},
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    for more in (["--dry-run"], []):
        done = CliRunner().invoke(app, ["run", "x.yaml", *more])
        assert (done.exit_code, way_out in done.stderr) == (2, True), done.output
    assert not ran.exists()


def test_readers_that_are_taken_from_torchvision_run_no_pickle(subtests: pytest.Subtests) -> None:
    """In the installed version, and in all that they inherit from."""
    for name in vision.KNOWN:
        with subtests.test(name):
            for kind in getattr(datasets, name).__mro__[:-1]:
                if not kind.__module__.startswith("torchvision."):
                    continue  # `typing.Generic`
                for call in (
                    node
                    for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(kind))))
                    if isinstance(node, ast.Call)
                ):
                    match ast.unparse(call.func):
                        case "torch.load":
                            assert "weights_only=True" in ast.unparse(call)
                        case "np.load":
                            assert "allow_pickle" not in ast.unparse(call)
                        case function:
                            assert "pickle" not in function


def test_the_root_is_no_option(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"set data\.root"):
        vision.Torchvision("SVHN", {"root": str(tmp_path)}).load(tmp_path)


def test_arrays_of_objects_and_foreign_pickles(tmp_path: Path, ran: Path) -> None:
    objects = np.array([Sentinel(ran)], object)
    np.savez(tmp_path / "set.npz", x_train=objects, y_train=[0], x_test=objects, y_test=[0])
    with pytest.raises(DataError):
        Npz(str(tmp_path / "set.npz")).load(None)
    with pytest.raises(DataError):
        read_arrays(plant(tmp_path / "batch", ran))
    assert not ran.exists()
