"""Data in object stores, in folders of the Hugging Face library, and in torchvision's data sets."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from conftest import tiny
from PIL import Image
from pyarrow import fs

import raysim
from raysim.data import DataError, load
from raysim.data.sources import HuggingFace, Images, Npz, Parquet, Torchvision, vision
from raysim.data.sources.tables import Folder

EACH = 10


def table(client: int) -> pa.Table:
    """Images of a client, as (bytes, path)."""
    pixels = np.random.default_rng(client).integers(0, 256, (EACH, 5, 4), np.uint8)
    images = []
    for image in pixels:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "PNG")
        images.append({"bytes": stream.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.table({"image": pa.array(images, kind), "label": np.arange(EACH) % 2, "client": np.full(EACH, client)})


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "tables").mkdir()
    for client in range(3):
        pq.write_table(table(client), tmp_path / "tables" / f"train-{client}.parquet")
    return tmp_path / "tables"


@pytest.fixture
def store(folder, monkeypatch) -> Iterator[str]:
    """The URI of the folder in an object store."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    server.start()
    host, port = server.get_host_and_port()
    uri = f"s3://bucket/tables?scheme=http&region=us-east-1&allow_bucket_creation=true&endpoint_override={host}:{port}"
    system, path = fs.FileSystem.from_uri(uri)
    system.create_dir(path)
    fs.copy_files(str(folder), path, destination_filesystem=system)
    yield uri
    server.stop()


def test_an_object_store_is_read_like_a_folder(folder, store, tmp_path):
    here, there = Parquet(str(folder)).load(None), load(Parquet(store), None, "stream", 1 << 20)
    assert there.name == "tables"
    rows = np.array([20, 3, 29])
    assert np.array_equal(pickle.loads(pickle.dumps(there.x))[rows], here.x[rows])
    assert np.array_equal(load(Parquet(store), None, cache=tmp_path / "cache").x[:], here.x)
    with pytest.raises(DataError, match="the folder bucket/nothing is missing"):
        Parquet(store.replace("tables", "nothing")).load(None)


def test_a_uri_is_read_like_a_folder(folder):
    assert np.array_equal(Parquet(folder.as_uri()).load(None).x, Parquet(str(folder)).load(None).x)
    with pytest.raises(DataError, match="s9://bucket: not a folder that pyarrow can read"):
        Parquet("s9://bucket").load(None)


def test_folders_of_the_hugging_face_library(tmp_path):
    """As its save_to_disk writes them: streams of record batches, a folder for each split."""
    for name, clients in {"train": (0, 1, 2), "validation": (9,)}.items():
        (tmp_path / name).mkdir()
        tables = [table(client) for client in clients]
        with pa.ipc.new_stream(str(tmp_path / name / "data-00000-of-00001.arrow"), tables[0].schema) as stream:
            for one in tables:
                stream.write_table(one)
    whole = HuggingFace(str(tmp_path)).load(None)
    assert whole.train_rows == 3 * EACH
    assert whole.client.tolist() == np.repeat([0, 1, 2, 9], EACH).tolist()
    pixels = Image.open(io.BytesIO(table(1)["image"][0].as_py()["bytes"]))
    assert np.array_equal(whole.x[EACH, 0], np.asarray(pixels))
    data = load(HuggingFace(str(tmp_path)), None, "stream")
    rows = np.array([31, 5, 22, 21])
    assert np.array_equal(data.x[rows], whole.x[rows])
    (tmp_path / "train" / "data-00000-of-00001.arrow").write_bytes(b"damaged")
    with pytest.raises(DataError, match="not a readable Arrow file"):
        HuggingFace(str(tmp_path)).load(None)
    (tmp_path / "train" / "data-00000-of-00001.arrow").unlink()
    assert "write it with save_to_disk" in HuggingFace(str(tmp_path)).check(None)


LAYOUTS = {  # how the split `name` is written, in each kind of source, and the source
    "parquet": (lambda at, name: pq.write_table(table(0), at / f"{name}-00000-of-00001.parquet"), Parquet),
    "huggingface": (lambda at, name: write_arrow(at / name), HuggingFace),
    "images": (lambda at, name: write_images(at / name), Images),
    "npz": (lambda at, name: write_arrays(at / "all.npz", name), lambda at: Npz(str(Path(at) / "all.npz"))),
}


def write_arrow(folder: Path) -> None:
    folder.mkdir()
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table(0).schema) as stream:
        stream.write_table(table(0))


def write_images(folder: Path) -> None:
    for name in ("ant", "bee"):
        (folder / name).mkdir(parents=True)
        Image.fromarray(np.zeros((5, 4), np.uint8)).save(folder / name / "0.png")


def write_arrays(file: Path, name: str) -> None:
    before = dict(np.load(file)) if file.exists() else {}
    np.savez(file, **before, **{f"x_{name}": np.zeros((2, 3)), f"y_{name}": np.arange(2)})


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_split_that_is_not_used_is_warned_of(kind, tmp_path, recwarn):
    """Validation samples beside a test, also where the data come from a cache; not where there is nothing to leave out."""
    write, source = LAYOUTS[kind]
    for name in ("train", "test"):
        write(tmp_path, name)
    data = load(source(str(tmp_path)), None)
    assert not recwarn.list
    write(tmp_path, "valid")
    for _ in range(1 if kind == "npz" else 2):  # an archive that is cached is not looked into again
        with pytest.warns(
            UserWarning, match=r"valid is left out: raysim trains on train and tests on test\. data\.client_val"
        ):
            again = load(source(str(tmp_path)), None, cache=tmp_path / "cache")
        assert again.sha256() == data.sha256()


@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_a_folder_is_listed_once(kind, tmp_path, monkeypatch):
    """Each listing is a request to an object store."""
    write, source = LAYOUTS[kind]
    for name in ("train", "test"):
        write(tmp_path, name)
    asked, ask = [], Folder._asked
    monkeypatch.setattr(Folder, "_asked", lambda self, what: asked.append(what) or ask(self, what))
    source(str(tmp_path)).files(None)
    listed = [selector.base_dir for selector in asked if isinstance(selector, fs.FileSelector)]
    assert str(tmp_path) in listed
    assert len(listed) == len({*listed})


def test_what_the_hugging_face_library_keeps_beside_a_saved_set_is_not_read(tmp_path):
    """Its map and filter write cache-*.arrow and tmp* there. state.json names the files of the set."""

    def write(name: str, client: int) -> None:
        with pa.ipc.new_stream(str(tmp_path / name), table(client).schema) as stream:
            stream.write_table(table(client))

    def clients() -> list[int]:
        return HuggingFace(str(tmp_path)).load(None).client[::EACH].tolist()

    named = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for client, name in enumerate([*named, "cache-5f0c.arrow", "tmp7.arrow"]):
        write(name, client)
    assert clients() == [0, 1]
    write("other.arrow", 4)
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": name} for name in named], "_split": "train"}))
    assert clients() == [0, 1]
    (tmp_path / named[0]).unlink()
    with pytest.raises(DataError, match=r"data-00000-of-00002\.arrow is missing, and state\.json names it"):
        clients()
    for damaged in ("{", "[]", '{"_data_files": [1]}', "[" * 100_000):
        state.write_text(damaged)
        with pytest.raises(DataError, match=r"state\.json: does not name the files of the set .*save_to_disk"):
            clients()


@pytest.fixture
def own_sets(monkeypatch) -> None:
    """Data sets of our own among torchvision's, which takes seconds to import."""
    from torchvision import datasets

    class Labelled(datasets.VisionDataset):
        """Splits by `train`, and labels as a list, as MNIST has them."""

        base_folder = "own"

        def __init__(self, root, train=True):
            super().__init__(root)
            self.first, self.targets = 0 if train else 100, [0, 1, 0]

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return Image.fromarray(np.full((4, 5), self.first + i, np.uint8)), i % 2

    class Unlabelled(Labelled):
        """Splits by name, of which one is called otherwise, and labels that only the samples tell."""

        def __init__(self, root, split="train"):
            if split not in ("train", "val"):
                raise ValueError(f"there is no split {split}")
            super().__init__(root, split == "train")
            del self.targets

    for own in (Labelled, Unlabelled):
        monkeypatch.setattr(datasets, own.__name__, own, raising=False)
    monkeypatch.setattr(vision, "KNOWN", {"Labelled", "Unlabelled", "KMNIST"})


def test_data_sets_of_torchvision_by_name(tmp_path, own_sets, subtests):
    for name in ("Labelled", "Unlabelled"):
        with subtests.test(name):
            data = Torchvision(name).load(tmp_path)
            assert data.x[:, 0, 0, 0].tolist() == [0, 1, 2, 100, 101, 102]
            assert data.y.tolist() == [0, 1, 0, 0, 1, 0]
            assert (data.train_rows, data.num_classes) == (3, 2)
            some = load(Torchvision(name), tmp_path, "stream")
            assert some.x[np.array([4, 1])][:, 0, 0, 0].tolist() == [101, 1]
            with pytest.raises(DataError, match=rf"{name} cannot be made with .* Correct the options"):
                Torchvision(name, {"year": 2020}).load(tmp_path)
    assert "'Nothing' is none of the data sets" in Torchvision("Nothing").check(tmp_path)


def test_torchvisions_names_of_splits(tmp_path):
    """OxfordIIITPet has no split `train`, and CLEVR's test has no labels."""

    def image(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)

    pets, clevr = tmp_path / "oxford-iiit-pet", tmp_path / "clevr/CLEVR_v1.0"
    for name in ("Beagle_1", "Beagle_2", "Pug_1"):
        image(pets / f"images/{name}.jpg")
    (pets / "annotations").mkdir()
    (pets / "annotations/trainval.txt").write_text("Beagle_1 1 2 1\nPug_1 2 2 1\n")
    (pets / "annotations/test.txt").write_text("Beagle_2 1 2 1\n")
    (clevr / "scenes").mkdir(parents=True)
    for split, objects in (("train", [3, 5]), ("val", [4]), ("test", [0])):
        names = [f"{i}.png" for i in range(len(objects))]
        for name in names:
            image(clevr / "images" / split / name)
        scenes = [{"image_filename": name, "objects": [{}] * n} for name, n in zip(names, objects, strict=True)]
        (clevr / f"scenes/CLEVR_{split}_scenes.json").write_text(json.dumps({"scenes": scenes}))
    for name, labels in (("OxfordIIITPet", [0, 1, 0]), ("CLEVRClassification", [3, 5, 4])):
        data = Torchvision(name, download=False).load(tmp_path)
        assert (data.y.tolist(), data.train_rows) == (labels, 2)


def test_a_cache_looks_at_the_files_of_one_set_alone(tmp_path, own_sets):
    def made() -> Path:
        return load(Torchvision("Labelled"), tmp_path, cache=tmp_path / "cache").x.file

    for file in (tmp_path / "own" / "pixels", tmp_path / "KMNIST" / "raw" / "train"):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"1")
    first = made()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "rounds.csv").touch()
    assert made() == first
    (tmp_path / "own" / "pixels").write_bytes(b"22")
    assert made() != first
    assert [name for name, _, _ in Torchvision("KMNIST").files(tmp_path)] == ["raw/train"]


@pytest.mark.parametrize("way", [{"cache": "data/cache"}, {"storage": "stream"}])
def test_where_all_below_the_root_are_data_nothing_is_written_there(way, tmp_path, monkeypatch):
    """SVHN's files lie in the root itself, and its class does not name them."""
    monkeypatch.chdir(tmp_path)

    def faults(record: str, name: str = "SVHN", **more: str) -> str:
        data = {"name": {"torchvision": name}, "root": "data", "partition": "iid_equal"} | more
        try:
            tiny(data=data, record={"dir": record})
        except raysim.ConfigError as error:
            return str(error)
        return ""

    sentence = "lies in data, where every file counts as data of SVHN. Set data.root to a folder that holds only data."
    assert f"record.dir: data/runs {sentence}" in faults("data/runs", **way)
    assert (f"data.cache: data/cache {sentence}" in faults("runs", **way)) == ("cache" in way)
    assert sentence not in faults("data/runs", "CIFAR10", **way) + faults("runs", storage="stream") + faults(
        "data/runs"
    )
