"""Where samples are: in memory, in a cache that is mapped, or streamed from files. The bits are the same."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import threading
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import simulate
from PIL import Image

import raysim
from raysim.config import from_dict
from raysim.data import DataError, Dataset, load, make_partition
from raysim.data.cache import Mapped
from raysim.data.encoded import Encoded
from raysim.data.partition import Natural
from raysim.data.sources import Images, Npz, Parquet
from raysim.data.sources.tables import ParquetReader
from raysim.federation import prepare
from raysim.host.samples import SampleSource

CLIENTS, EACH = 6, 20
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def png(image: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


def table(client: int, seed: int = 0) -> pa.Table:
    """Images of a client, brighter with the class."""
    draw = np.random.default_rng([seed, client])
    y = draw.integers(0, 3, EACH)
    y[:3] = range(3)
    x = (draw.integers(0, 80, (EACH, 8, 8)) + 80 * y[:, None, None]).astype(np.uint8)
    images = [{"bytes": png(image), "path": None} for image in x]
    return pa.table({"image": pa.array(images, IMAGE), "label": y, "client": np.full(EACH, client)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A file for two clients, with a row group for each."""
    at = tmp_path_factory.mktemp("tables")
    for first in range(0, CLIENTS, 2):
        both = pa.concat_tables([table(first), table(first + 1)])
        pq.write_table(both, at / f"train-{first}.parquet", row_group_size=EACH)
    pq.write_table(table(99), at / "test.parquet")
    return at


def configuration(folder: Path, out: Path, **data) -> dict:
    return {
        "data": {"name": {"parquet": str(folder)}, "partition": "natural"} | data,
        "model": {"name": "mlp", "options": {"hidden": [8]}},
        "rounds": {"total": 3, "participation": 0.5},
        "local": {"batch_size": 8, "lr": 0.1},
        "engine": "local",
        "record": {"dir": str(out)},
    }


def test_a_run_has_the_same_bits_from_memory_from_a_cache_and_streamed(folder, tmp_path):
    ways = {"memory": {}, "stream": {"storage": "stream"}, "cache": {"cache": str(tmp_path / "cache")}}
    runs = {name: raysim.run(configuration(folder, tmp_path, **way), name=name) for name, way in ways.items()}
    assert len({run.result["sha256"] for run in runs.values()}) == 1
    again = raysim.resume(runs["stream"].folder, data__storage="memory", rounds__total=4)
    assert again.result["rounds"] == 4  # the hash of the samples is none of the files, and so proves nothing


def test_on_ray_other_processes_map_and_read_the_same(folder, tmp_path, warm_ray):
    """A cache is removed once it was made: the processes make it again."""
    whole = simulate(from_dict(configuration(folder, tmp_path)), tmp_path / "memory")
    on_ray = {"engine": {"ray": {"clients_per_actor": 2}}}
    for name, way in {"stream": {"storage": "stream"}, "cache": {"cache": str(tmp_path / "cache")}}.items():
        config = from_dict(configuration(folder, tmp_path, **way) | on_ray)
        partitioned = prepare(config)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        run = simulate(config, tmp_path / name, make_engine=warm_ray, partitioned=partitioned)
        assert run.sha256() == whole.sha256()


def test_a_cache_is_read_until_files_or_settings_change(folder, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(Parquet, "open", lambda self, root, open=Parquet.open: opened.append(self) or open(self, root))
    plain = Parquet(str(folder)).load(None)
    opened.clear()

    def read(**settings) -> Dataset:
        return load(Parquet(str(folder), **settings), None, cache=tmp_path)

    first, second = read(), read()
    assert len(opened) == 1
    assert isinstance(second.x, Mapped)
    assert np.array_equal(second.x[:], plain.x)
    assert second.x.dtype == plain.x.dtype
    assert first.sha256() == second.sha256() == plain.sha256()
    same = [*Dataset.__dataclass_fields__.keys() - {"x", "y", "client", "digest", "files"}]
    assert [getattr(second, name) for name in same] == [getattr(plain, name) for name in same]
    assert np.array_equal(second.y, plain.y)
    assert np.array_equal(second.client, plain.client)
    assert len(pickle.dumps(second.x)) < 2000  # to another process goes a name, and no sample
    assert np.array_equal(pickle.loads(pickle.dumps(second.x))[np.array([5, 2])], plain.x[[5, 2]])

    read(mode="RGB")
    assert len(opened) == 2
    os.utime(folder / "test.parquet", ns=(1, 1))
    read()
    assert len(opened) == 3
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == sorted(
        p.name for p in tmp_path.iterdir() if p.is_dir()
    )


def test_files_of_two_places_are_cached_apart(tmp_path):
    """An .npz has one size for all numbers, and an unpacked archive gives all its files one time."""
    for site, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / site).mkdir()
        x, y = np.full((4, 3), value, np.float32), np.arange(4) % 2
        np.savez(tmp_path / site / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        os.utime(tmp_path / site / "d.npz", ns=(1, 1))
        assert (load(Npz("d.npz"), tmp_path / site, cache=tmp_path / "cache").x[:] == value).all()


def test_a_cache_appears_whole_or_not_at_all(folder, tmp_path, monkeypatch):
    """An error while it is written, as of a full disk; and, on another machine, a cache that is not there."""
    from raysim.data import cache

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(cache, "write_json", full)
        with pytest.raises(DataError, match=r"data.cache: .* No space left"):
            load(Parquet(str(folder)), None, cache=tmp_path)
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]

    data = load(Parquet(str(folder)), None, cache=tmp_path)
    elsewhere = pickle.loads(pickle.dumps(data))
    expected = data.x[:]
    for file in data.x.file.parent.iterdir():
        file.unlink()
    data.x.file.parent.rmdir()
    assert np.array_equal(elsewhere.x[:], expected)
    assert data.x.file.is_file()


def test_a_machine_with_a_copy_of_the_data_fills_a_cache_of_its_own(folder, tmp_path):
    """A copy has other times, and so another folder in the cache. Its samples must be the same."""
    copy = tmp_path / "tables"
    shutil.copytree(folder, copy, copy_function=shutil.copy)
    data = load(Parquet(str(copy)), None, cache=tmp_path / "cache")
    expected, elsewhere = data.x[:], pickle.dumps(data.x)
    shutil.rmtree(tmp_path / "cache")
    os.utime(copy / "test.parquet", ns=(1, 1))
    assert np.array_equal(pickle.loads(elsewhere)[np.array([5, 2])], expected[[5, 2]])
    pq.write_table(table(98), copy / "test.parquet")
    other = pickle.loads(elsewhere)
    for _ in range(2):  # nor is it taken when it is there
        with pytest.raises(DataError, match="made here from other data than the run began with"):
            other[:]


def test_what_lies_in_a_cache_is_not_believed(folder, tmp_path, subtests):
    """Any file of it may be another, in any form: a process that reads it says so, and what to do."""
    data = load(Parquet(str(folder)), None, cache=tmp_path)
    made, elsewhere = data.x.file.parent, pickle.dumps(data.x)
    about = json.loads((made / "data.json").read_text())

    def zeroed(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))

    def truncated(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-7])

    def piped(path: Path) -> None:
        path.unlink()
        os.mkfifo(path)

    ways = [(zeroed, "x.npy"), (truncated, "x.npy"), (piped, "x.npy"), (zeroed, "y.npy"), (truncated, "client.npy")]
    ways += [(Path.unlink, "x.npy"), (Path.unlink, "y.npy"), (truncated, "data.json"), (piped, "data.json")]
    ways += [(lambda path: np.save(path, np.load(path)[::-1]), name) for name in ("y.npy", "client.npy")]
    ways += [
        (lambda path, change=change: path.write_text(json.dumps(about | change)), "data.json")
        for change in (
            {"scale": 128.0},
            {"train_rows": 1},
            {"shape": [-1]},
            {"dtype": "O"},
            {"mean": None},
            {"files": {}},
        )
    ]
    whole = {path: path.read_bytes() for path in made.iterdir()}
    for n, (harm, name) in enumerate(ways):
        with subtests.test(n=n, name=name):
            harm(made / name)
            with pytest.raises(DataError, match=rf"data.cache: .*{name}.*; delete it, or leave data.cache out"):
                load(Parquet(str(folder)), None, cache=tmp_path)
            if name == "x.npy" and harm is not Path.unlink:  # which is made again
                with pytest.raises(OSError, match="delete it"):  # the machine's fault, not that of a client's code
                    pickle.loads(elsewhere)[:]
            (made / name).unlink(missing_ok=True)
            (made / name).write_bytes(whole[made / name])
    assert load(Parquet(str(folder)), None, cache=tmp_path).sha256() == data.sha256()


def test_processes_that_start_together_decode_once(folder, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(Parquet, "open", lambda self, root, open=Parquet.open: opened.append(1) or open(self, root))
    threads = [
        threading.Thread(target=load, args=(Parquet(str(folder)), None), kwargs={"cache": tmp_path}) for _ in "123"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 1


def streamed(folder: Path, held: int = 0) -> Dataset:
    return load(Parquet(str(folder)), None, "stream", held)


def test_a_client_is_read_from_its_row_group_alone(folder, monkeypatch):
    """In any order of rows; labels and clients were read before, samples were not."""
    whole, data = Parquet(str(folder)).load(None), streamed(folder)
    assert data.x.shape == whole.x.shape
    read = []
    monkeypatch.setattr(
        ParquetReader, "read", lambda self, *what, read_=ParquetReader.read: read.append(what) or read_(self, *what)
    )
    rows = np.flatnonzero(data.client == 3)
    assert np.array_equal(data.x[rows[::-1]], whole.x[rows[::-1]])
    assert read == [("image", 1)]
    mixed = np.random.default_rng(0).permutation(len(whole.x))
    assert np.array_equal(data.x[mixed], whole.x[mixed])
    assert len(read) == 1 + CLIENTS + 1  # each group once, the test's among them
    assert np.array_equal(data.y, whole.y)
    assert np.array_equal(data.client, whole.client)
    assert data.sha256().startswith("files ")


def test_what_was_read_last_is_held_up_to_a_bound(folder):
    data = streamed(folder)
    files = data.x.files
    sizes = [data.x.files._group(g).nbytes for g in range(3)]
    assert list(files._held) == [2]
    files.held_bytes = sizes[0] + sizes[1]
    for g in (0, 1, 0, 2):  # 1 was used the longest ago
        files._group(g)
    assert list(files._held) == [0, 2] or sizes[2] > sizes[1]


def test_a_thousand_files_are_not_open_at_once(tmp_path):
    """Each of them a client, by the names of the files."""
    import resource

    small = table(0).drop_columns("client").slice(0, 3)
    for i in range(300):
        pq.write_table(small, tmp_path / f"train-user_{i:03d}.parquet")
    pq.write_table(small, tmp_path / "test-user_007.parquet")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, before[1]))
    try:
        data = load(Parquet(str(tmp_path), client_files=True), None, "stream")
        assert data.x[:].shape == (903, 1, 8, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert data.client.tolist() == [*np.repeat(range(300), 3).tolist(), 7, 7, 7]


def test_a_file_of_a_client_says_whose_it_is(tmp_path):
    """Every training file is a client; names that do not part them are refused before anything is read."""
    source = Parquet(str(tmp_path), client_files=True)
    small = table(0).drop_columns("client")
    names = [
        "train-alice",
        "training_bob",
        "train.carol",
        "train7",
        "trainIngrid",
        "test-bob",
        "testing-alice",
        "test7",
    ]
    for rows, name in enumerate(names, 1):
        pq.write_table(small.slice(0, rows), tmp_path / f"{name}.parquet")
    assert source.check(None) is None
    data = source.load(None)
    train, test = data.client[: data.train_rows].tolist(), data.client[data.train_rows :].tolist()
    rows = {client: train.count(client) for client in sorted({*train})}
    assert rows == {0: 4, 1: 5, 2: 1, 3: 2, 4: 3}  # 7, Ingrid, alice, bob and carol
    assert {client: test.count(client) for client in {*test}} == {3: 6, 2: 7, 0: 8}
    for wrong, sentence in {
        "trainalice": r"trainalice\.parquet does not say whose it is; name it train-NAME\.parquet",
        "testbob": r"testbob\.parquet does not say whose it is",
        "train_alice": r"train-alice\.parquet and .*/train_alice\.parquet are of one client by their names",
        "data/train-alice": r"/train-alice\.parquet and .*data/train-alice\.parquet are of one client",
    }.items():
        file = tmp_path / f"{wrong}.parquet"
        file.parent.mkdir(exist_ok=True)
        pq.write_table(small, file)
        assert re.search(sentence, source.check(None))
        with pytest.raises(DataError, match=sentence):
            source.load(None)
        assert Parquet(str(tmp_path)).check(None) is None  # without client_files, they are shards
        file.unlink()


def test_of_the_rows_of_a_client_that_are_scattered_a_run_warns(folder, tmp_path):
    scattered = configuration(folder, tmp_path, storage="stream", partition={"iid_equal": {"clients": 60}})
    with pytest.warns(UserWarning, match=r"stream reads \d+ times the samples that a client has.* data.cache"):
        prepare(from_dict(scattered))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(from_dict(configuration(folder, tmp_path, storage="stream")))


def test_what_is_read_later_is_checked_then():
    """Samples of somebody's own, of which row 3 cannot be used: its client is refused, and no other."""

    class Mine:
        shape, dtype = (4, 2), np.dtype(np.float32)

        def __len__(self):
            return 4

        def __getitem__(self, rows):
            return np.where(np.arange(4)[rows, None] == 3, np.nan, np.ones((1, 2))).astype(np.float32)

    data = Dataset("mine", Mine(), np.zeros(4, np.int64), 4, ("a",), np.array([0, 0, 1, 1]))
    source = SampleSource(data, make_partition(data, Natural(), seed=0), torch.device("cpu"), channels_last=False)
    assert source.client(0).train.x.shape == (2, 2)
    with pytest.raises(DataError, match="mine: training row 3 holds NaN"):
        _ = source.client(1).train


def test_the_next_client_is_read_while_one_trains(folder):
    """A thread reads the rows of client 4 when client 1 has been asked for; what it read is taken, once."""
    data = streamed(folder)
    partition = make_partition(data, Natural(), seed=0)
    source = SampleSource(data, partition, torch.device("cpu"), channels_last=False)
    seen: list[tuple[bool, int]] = []
    batches, main = type(data.x.files).batches, threading.current_thread()

    def watched(self, rows):
        seen.append((threading.current_thread() is main, data.client[rows][0]))
        return batches(self, rows)

    whole = Parquet(str(folder)).load(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(data.x.files), "batches", watched)
        source.expect([1, 4, 2])
        for client in (1, 4, 2):
            x = source.client(client).train.x
            assert torch.equal(x, whole.transform(torch.from_numpy(whole.x[partition.train[client]])))
    assert seen == [(True, 1), (False, 4), (False, 2)]


def test_sources_that_cannot_be_streamed_or_cached_say_so(tmp_path):
    with pytest.raises(DataError, match="Digits cannot be read in parts; leave it at memory"):
        load(raysim.data.sources.Digits(), None, "stream")
    with pytest.raises(raysim.ConfigError, match=r"data.cache: decodes all samples.* Leave one of them out"):
        raysim.run(configuration(tmp_path, tmp_path, storage="stream", cache="c"))


@pytest.mark.parametrize("kind", ["images", "parquet"])
def test_images_of_unequal_size_need_a_size(tmp_path, kind):
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, (side, side + 2, 3), np.uint8) for side in (8, 12)]
    for i, image in enumerate(images):
        (tmp_path / "train" / "a").mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / "a" / f"{i}.png").write_bytes(png(image))
    encoded = [{"bytes": png(image), "path": None} for image in images]
    pq.write_table(pa.table({"image": pa.array(encoded, IMAGE), "label": [0, 0]}), tmp_path / "train.parquet")
    source = {"images": Images, "parquet": Parquet}[kind]
    with pytest.raises(DataError, match=r"14×12 RGB, but .* is 10×8 RGB; .* set resize: \[HEIGHT, WIDTH\]"):
        source(str(tmp_path)).load(None)
    data = source(str(tmp_path), resize=(6, 5)).load(None)
    expected = Image.fromarray(images[1]).resize((5, 6), Image.Resampling.BILINEAR)
    assert np.array_equal(data.x[1], np.asarray(expected).transpose(2, 0, 1))


def images_of(side: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (12, side, side, 3), np.uint8)


def write_images(folder: Path, seed: int) -> None:
    """Bitmaps of two classes: whatever they show, all have the same size."""
    for i, image in enumerate(images_of(8, seed)):
        for split in ("train", "test"):
            (folder / split / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / split / "ab"[i % 2] / f"{i}.bmp")


def write_tables(folder: Path, seed: int) -> None:
    """Tables of uncompressed images, which have the same size whatever they show."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        encoded = []
        for image in images_of(8, seed):
            stream = io.BytesIO()
            Image.fromarray(image).save(stream, "BMP")
            encoded.append({"bytes": stream.getvalue(), "path": None})
        rows = pa.table({"image": pa.array(encoded, IMAGE), "label": [0, 1] * 6})
        pq.write_table(
            rows, folder / f"{split}.parquet", compression="none", use_dictionary=False, write_statistics=False
        )


def write_arrow(folder: Path, seed: int) -> None:
    """As the Hugging Face library saves them."""
    write_tables(folder, seed)
    for split in ("train", "test"):
        rows = pq.read_table(folder / f"{split}.parquet")
        (folder / f"{split}.parquet").unlink()
        (folder / split).mkdir(exist_ok=True)
        with pa.OSFile(str(folder / split / "data-0.arrow"), "wb") as file, pa.ipc.new_stream(file, rows.schema) as out:
            out.write_table(rows)


@pytest.mark.parametrize(
    ("source", "write"), [("images", write_images), ("parquet", write_tables), ("huggingface", write_arrow)]
)
def test_a_run_that_streams_goes_on_with_the_files_that_it_began_with(source, write, tmp_path, monkeypatch):
    """Other files of the same names and sizes are refused, however the run began and goes on; a copy is accepted in another
    folder and, where it can be compared, with other times."""
    write(tmp_path / "data" / "set", 0)
    few = {"partition": {"iid_equal": {"clients": 3}}}
    base = configuration(tmp_path, tmp_path / "runs") | {
        "data": {"name": {source: "set"}, "root": str(tmp_path / "data"), **few}
    }
    began = {way: raysim.run(base, name=way, data__storage=way).folder for way in ("memory", "stream")}
    expected = raysim.run(base, name="long", rounds__total=7).result["sha256"]
    parts = []
    monkeypatch.setattr(Encoded, "parts", lambda self, real=Encoded.parts: parts.append(1) or real(self))

    def resumed(start: str, way: str, total: int, root: str = "data") -> str:
        settings = {"data__storage": way, "data__root": str(tmp_path / root), "rounds__total": total}
        return raysim.resume(began[start], **settings).result["sha256"]

    shutil.copytree(tmp_path / "data", tmp_path / "moved", copy_function=shutil.copy2)  # with the times
    resumed("memory", "stream", 4, "moved")
    resumed("stream", "stream", 4, "moved")
    assert not parts  # nothing was read to find that out
    resumed("stream", "memory", 5, "moved")

    shutil.copytree(tmp_path / "data", tmp_path / "copied", copy_function=shutil.copyfile)  # without
    for file in (tmp_path / "copied").rglob("*.*"):
        os.utime(file, ns=(1, 1))
    parts.clear()
    resumed("memory", "stream", 5, "copied")
    assert parts  # the samples were hashed in memory mode, and are again
    parts.clear()
    for way in ("stream", "memory"):
        with pytest.raises(raysim.ConfigError, match=r"^data: .* but other times.*cp -p.*remove files_sha256 from"):
            resumed("stream", way, 6, "copied")
    about = json.loads((began["stream"] / "manifest.json").read_text())
    (began["stream"] / "manifest.json").write_text(json.dumps(about | {"files_sha256": None}))
    resumed("stream", "stream", 6, "copied")
    (began["stream"] / "manifest.json").write_text(json.dumps(about))
    about = json.loads((began["memory"] / "manifest.json").read_text())
    del about["files_sha256"]  # an older raysim wrote none
    (began["memory"] / "manifest.json").write_text(json.dumps(about))
    parts.clear()
    resumed("memory", "stream", 6)
    assert parts

    sizes = [file.stat().st_size for file in sorted((tmp_path / "data").rglob("*.*"))]
    write(tmp_path / "data" / "set", 1)
    assert sizes == [file.stat().st_size for file in sorted((tmp_path / "data").rglob("*.*"))]
    for start, way in (("memory", "memory"), ("memory", "stream"), ("stream", "memory"), ("stream", "stream")):
        with pytest.raises(raysim.ConfigError, match=r"^data: (not what the run|the files have .* but other times)"):
            resumed(start, way, 7)
    assert resumed("memory", "stream", 7, "moved") == resumed("stream", "stream", 7, "moved") == expected


def test_a_run_that_streams_refuses_files_that_came_or_went(tmp_path):
    write_images(tmp_path / "set", 0)
    base = configuration(tmp_path, tmp_path / "runs") | {
        "data": {"name": {"images": "set"}, "root": str(tmp_path), "partition": {"iid_equal": {"clients": 3}}}
    }
    began = raysim.run(base, data__storage="stream").folder
    (tmp_path / "set/test/a/0.bmp").rename(tmp_path / "set/test/a/1.bmp")
    for way in ("memory", "stream"):
        with pytest.raises(raysim.ConfigError, match=r"^data: not what the run"):
            raysim.resume(began, data__storage=way, rounds__total=4)
