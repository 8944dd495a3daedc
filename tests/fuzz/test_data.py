"""Data that are damaged: each reader ends in a data set or in a `DataError`, and in bounded memory."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import resource
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from fuzz.mutate import CASES, altered, chance_of, damaged, in_memory
from PIL import Image

from raysim.data import DataError
from raysim.data.pickles import read_arrays
from raysim.data.sources import HuggingFace, Images, Npz, Parquet
from raysim.data.sources.base import Source

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of pickletools, on damaged texts
ROOM = 1 << 30  # bytes of memory beside what the process has, for files of a few kilobytes


@pytest.fixture
def folder() -> Iterator[Path]:
    with in_memory() as path:
        yield path


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Who asks for more has none."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def read(source: Source, folder: Path) -> bool:
    """Whether the data could be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of odd metadata
            source.load(folder)
    except DataError as error:
        return not str(error)
    return True


@functools.cache
def png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def test_npz(folder: Path) -> None:
    """Archives: damaged bytes, or a damaged member in a sound archive."""
    chance = chance_of(0)
    members = {}
    for name, array in {
        "x_train": np.arange(48, dtype=np.float64).reshape(6, 8), "y_train": np.arange(6) % 2,
        "client_train": np.arange(6),
    }.items():  # fmt: skip
        stream = io.BytesIO()
        np.save(stream, array)
        members[f"{name}.npy"] = stream.getvalue()
    good = 0
    for _ in range(CASES):
        stream = io.BytesIO()
        victim = chance.choice([*members, None])
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members.items():
                archive.writestr(name, damaged(content, chance) if name == victim else content)
        whole = stream.getvalue()
        (folder / "toy.npz").write_bytes(damaged(whole, chance) if victim is None else whole)
        good += read(Npz("toy.npz"), folder)
    assert 0 < good < CASES


def test_parquet_with_a_flipped_bit(folder: Path) -> None:
    """Every byte's, one after another: of 32 in one of the footer's bytes, a column had no values in four rows."""
    table = pa.table({"text": ["one two", "two", "", "three"], "label": [0, 1, 0, 1], "client": ["a", "b", "a", "c"]})
    stream = io.BytesIO()
    pq.write_table(table, stream)
    whole, good = stream.getvalue(), 0
    for position in range(len(whole)):
        content = bytearray(whole)
        content[position] ^= 32
        (folder / "train.parquet").write_bytes(content)
        good += read(Parquet("."), folder)
    assert 0 < good < len(whole)


def test_parquet(folder: Path) -> None:
    """Files of images and of texts: damaged bytes, or damaged metadata of the Hugging Face library."""
    chance = chance_of(1)
    about = {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}
    columns = {
        "image": {"image": [{"bytes": png(i), "path": "x"} for i in range(4)], "label": [0, 1, 0, 1]},
        "text": {"text": ["one two", "two", "", "three"], "label": [0, 1, 0, 1], "client": ["a", "b", "a", "c"]},
    }
    good = 0
    for number in range(CASES):
        kind = chance.choice([*columns])
        metadata = json.dumps(altered(about, chance) if number % 2 else about)
        if number % 5 == 0:
            metadata = damaged(metadata.encode(), chance).decode(errors="replace")
        table = pa.table(columns[kind]).replace_schema_metadata({"huggingface": metadata})
        stream = io.BytesIO()
        pq.write_table(table, stream)
        content = stream.getvalue() if number % 2 else damaged(stream.getvalue(), chance)
        (folder / "train.parquet").write_bytes(content)
        good += read(Parquet("."), folder)
    assert 0 < good < CASES


def test_arrow(folder: Path) -> None:
    """Streams and files as the Hugging Face library saves them: damaged bytes."""
    chance = chance_of(4)
    (folder / "train").mkdir()
    table = pa.table(
        {
            "image": [{"bytes": png(i), "path": "x"} for i in range(4)],
            "label": [0, 1, 0, 1],
            "client": ["a", "b", "a", "c"],
        }
    )
    good = 0
    for number in range(CASES):
        stream = io.BytesIO()
        with (pa.ipc.new_stream if number % 2 else pa.ipc.new_file)(stream, table.schema) as writer:
            writer.write_table(table, 2)
        content = stream.getvalue() if number % 9 == 0 else damaged(stream.getvalue(), chance)
        (folder / "train" / "data.arrow").write_bytes(content)
        good += read(HuggingFace("."), folder)
    assert 0 < good < CASES


def test_images(folder: Path) -> None:
    """Folders: a damaged image, a damaged annotation."""
    chance = chance_of(2)
    for name in ("a", "b"):
        (folder / "train" / name).mkdir(parents=True)
        (folder / "train" / name / "0.png").write_bytes(png(9))
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "val" / "images" / "1.png").write_bytes(png(7))
    image, notes = folder / "train" / "a" / "0.png", folder / "val" / "val_annotations.txt"
    good = 0
    for _ in range(CASES):
        image.write_bytes(damaged(png(9), chance) if chance.random() < 0.6 else png(9))
        notes.write_bytes(damaged(b"1.png\tb\t0\n1.png\ta\n", chance) if chance.random() < 0.6 else b"1.png\tb\n")
        good += read(Images("."), folder)
    assert 0 < good < CASES


def test_pickles(folder: Path) -> None:
    """Archives of CIFAR's kind, by all protocols; what can be read holds arrays, lists, texts and numbers."""
    chance = chance_of(3)
    batch = {"data": np.arange(96, dtype=np.uint8).reshape(2, 48), "labels": [3, 1], "filenames": ["a", "b"], b"n": 1.5}
    file, good = folder / "batch", 0
    for _ in range(CASES):
        file.write_bytes(damaged(pickle.dumps(batch, chance.randrange(1, 5)), chance))
        try:
            found = read_arrays(file)
        except DataError:
            continue
        good += 1
        plain = (np.ndarray, list, tuple, dict, str, bytes, int, float, type(None))
        assert all(isinstance(value, plain) for value in found.values())
    assert 0 < good < CASES
    for attack in (
        b"\x80\x02}r\xff\xff\xff\x7f.",
        b"\x80\x02" + b")" + b"\x85" * 100_000 + b".",
        b"\x80\x04\x95" + b"\xff" * 8,
    ):
        file.write_bytes(attack)
        with pytest.raises(DataError):
            read_arrays(file)
    assert os.listdir(folder) == ["batch"]
