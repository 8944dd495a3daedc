"""Sources: what they read, and what they say when the data are wrong on purpose."""

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import tiny
from PIL import Image

from raysim.config import ConfigError
from raysim.data import SOURCES, DataError, Dataset
from raysim.data.given import as_dataset
from raysim.data.pickles import read_arrays
from raysim.data.sources import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    MNIST,
    Digits,
    FashionMNIST,
    HuggingFace,
    Images,
    Npz,
    Parquet,
    Synthetic,
    Torchvision,
)
from raysim.data.text import build_vocabulary, encode, tokenize

RNG = np.random.default_rng(0)


def pixels(n: int, channels: int = 1, side: int = 6) -> np.ndarray:
    return RNG.integers(0, 256, (n, channels, side, side), dtype=np.uint8)


def png(image: np.ndarray) -> bytes:
    """[C, H, W] to an encoded file, which keeps every bit."""
    buffer = io.BytesIO()
    Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(buffer, "png")
    return buffer.getvalue()


def write_parquet(file: Path, images: list[bytes] | None = None, metadata=None, **columns) -> None:
    if images is not None:
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        columns = {"image": pa.array([{"bytes": b, "path": None} for b in images], kind), **columns}
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), file, row_group_size=3)


def real(folder: str) -> Path:
    root = os.environ.get("RAYSIM_DATA")
    if not root or not (Path(root) / folder).is_dir():
        pytest.skip(f"needs the data set {folder} in the folder that RAYSIM_DATA names")
    return Path(root)


# ---- the data set itself


def test_transform_has_the_bits_of_torchvision():
    from torchvision.transforms.functional import normalize, to_tensor

    x = pixels(3, channels=3)
    data = Dataset("d", x, np.zeros(3, np.int64), 3, ("a",), None, 255.0, (0.5, 0.4, 0.3), (0.5, 0.2, 0.1))
    for raw, out in zip(x, data.transform(torch.from_numpy(x)), strict=True):
        assert torch.equal(out, normalize(to_tensor(raw.transpose(1, 2, 0).copy()), data.mean, data.std))
    assert data.sample_shape == (3, 6, 6)
    assert data.num_classes == 1
    assert not data.is_text
    tokens = Dataset("t", np.ones((2, 5), np.int32), np.zeros(2, np.int64), 2, ("a",), vocab=9)
    assert tokens.is_text
    assert tokens.transform(torch.from_numpy(tokens.x)).dtype == torch.int64
    features = Dataset("f", np.ones((2, 5), np.float32), np.zeros(2, np.int64), 2, ("a",))
    assert torch.equal(features.transform(torch.from_numpy(features.x)), torch.ones(2, 5))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": np.zeros((4, 2)).T}, "not C-contiguous"),
        ({"y": np.zeros(3, np.int64)}, "2 samples need 2 labels"),
        ({"y": np.array([0, 2])}, r"row 1 has label 2, outside 0\.\.1"),
        ({"client": np.zeros(3, np.int64)}, "as many clients"),
        ({"train_rows": 0}, "at least one row must be for training"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, sentence):
    good = {"x": np.zeros((2, 4)), "y": np.zeros(2, np.int64), "train_rows": 1, "classes": ("a", "b")}
    Dataset("d", **good)
    with pytest.raises(DataError, match=sentence):
        Dataset("d", **(good | change))


def test_importing_loads_no_reader():
    heavy = ["torchvision", "PIL", "sklearn", "pyarrow", "ray"]
    code = f"import sys, raysim.data; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"


def test_every_source_can_be_listed():
    assert set(SOURCES) == {
        *("diabetes", "multilabel", "characters", "huggingface", "torchvision", "csv", "given"),
        *("mnist", "fashion_mnist", "cifar10", "cifar100", "emnist", "parquet", "images", "npz", "digits", "synthetic"),
    }
    assert all(cls.__doc__ and "\n" not in cls.__doc__ for cls in SOURCES.values())


# ---- Parquet


def test_parquet_images_clients_and_class_names(tmp_path):
    """Two training files in the folder data/, a test file without clients, names from the Hugging Face metadata."""
    x = pixels(9, channels=3)
    metadata = class_metadata("cat", "dog", "owl")
    encoded = [png(image) for image in x]
    at = tmp_path / "set" / "data"
    write_parquet(at / "train-00000-of-00002.parquet", encoded[:4], metadata, label=[0, 1, 0, 1], client=[7, 7, 0, 3])
    write_parquet(at / "train-00001-of-00002.parquet", encoded[4:6], metadata, label=[0, 1], client=[3, 0])
    write_parquet(at / "test-00000-of-00001.parquet", encoded[6:], metadata, label=[2, 1, 0])
    assert Parquet("set").check(tmp_path) is None
    data = Parquet("set").load(tmp_path)
    assert np.array_equal(data.x, x)
    assert data.x.flags.c_contiguous
    assert data.y.tolist() == [0, 1, 0, 1, 0, 1, 2, 1, 0]
    assert data.y.dtype == np.int64
    assert data.classes == ("cat", "dog", "owl")
    assert data.train_rows == 6
    assert data.name == "set"
    assert data.client.tolist() == [7, 7, 0, 3, 3, 0, -1, -1, -1]
    assert (data.scale, data.mean, data.std) == (255.0, (0.5,), (0.5,))
    unit = Parquet("set", normalise="unit").load(tmp_path)
    assert (unit.scale, unit.mean, unit.std) == (255.0, (0.0,), (1.0,))
    grey = Parquet("set", mode="L").load(tmp_path)
    assert grey.sample_shape == (1, 6, 6)


def class_metadata(*names: str) -> dict[str, str]:
    """As the Hugging Face library stores them in a file."""
    return {"huggingface": json.dumps({"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}})}


def test_classes_of_tables_are_known_by_their_names(tmp_path):
    """Each file numbers its own classes: the training files' names are united, the test's are looked up in them."""

    def write(file: str, label: list[int], *names: str) -> None:
        metadata = class_metadata(*names) if names else None
        write_parquet(tmp_path / file, metadata=metadata, text=["a"] * len(label), label=label)

    def load() -> Dataset:
        return Parquet(str(tmp_path)).load(None)

    write("train-a.parquet", [0, 1, 0], "emu", "cat")
    write("train-b.parquet", [0, 1], "cat", "dog")
    write("test.parquet", [0, 1], "dog", "emu")
    data = load()
    assert data.classes == ("emu", "cat", "dog")
    assert data.y.tolist() == [0, 1, 0, 1, 2, 2, 0]
    write("test.parquet", [0, 1], "dog", "owl")
    with pytest.raises(DataError, match=r"test\.parquet row 1 is 'owl', which is no class of the training samples"):
        load()
    write("test.parquet", [0, 2], "dog", "emu")
    with pytest.raises(DataError, match=r"test\.parquet: row 1 has label 2, but there are 2 classes"):
        load()
    write("test.parquet", [0, 1])
    with pytest.raises(DataError, match=r"test\.parquet: does not name its classes, and .* differ"):
        load()
    write("train-b.parquet", [0, 1])
    assert load().classes == ("emu", "cat")  # whose numbers all files have, as far as is known


def test_parquet_clients_with_names_and_other_columns(tmp_path):
    write_parquet(tmp_path / "train.parquet", text=["a", "b", "c"], fine=[0, 1, 2], writer=["f9", "f1", "f9"])
    write_parquet(tmp_path / "valid.parquet", text=["a"], fine=[1], writer=["f1"])
    data = Parquet(str(tmp_path), label="fine", client="writer", length=4).load(None)
    assert data.client.tolist() == [1, 0, 1, 0]
    assert data.train_rows == 3
    assert data.is_text


def test_images_in_tables_are_upright(tmp_path):
    """Each EXIF orientation, with its mirroring and turning; a folder of images ignores it, as torchvision's does."""
    (stored,) = pixels(1, channels=3)
    stored = np.ascontiguousarray(stored[:, :4])  # [3, 4, 6]
    flat = [stored, stored[..., ::-1], stored[:, ::-1, ::-1], stored[:, ::-1]]
    turned = [np.swapaxes(image, 1, 2) for image in (stored, stored[:, ::-1], stored[:, ::-1, ::-1], stored[..., ::-1])]
    encoded = []
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x112] = orientation
        stream = io.BytesIO()
        Image.fromarray(stored.transpose(1, 2, 0)).save(stream, "PNG", exif=exif)
        encoded.append(stream.getvalue())
    for group, upright in ((encoded[:4], flat), (encoded[4:], turned)):
        write_parquet(tmp_path / "train.parquet", group, label=[0, 1, 0, 1])
        assert np.array_equal(Parquet(str(tmp_path)).load(None).x, upright)
        assert np.array_equal(as_dataset(pq.read_table(tmp_path / "train.parquet"), test=0).x, upright)
    wide = Parquet(str(tmp_path), mode="L", resize=(6, 4)).load(None).x[1]
    assert np.array_equal(wide[0], Image.fromarray(turned[1].transpose(1, 2, 0)).convert("L"))
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "6.png").write_bytes(encoded[5])
    assert np.array_equal(Images(str(tmp_path)).load(None).x, [stored])


def corrupted(image: bytes) -> bytes:
    return image[: len(image) // 2]


GOOD = [png(image) for image in pixels(5)]
LABELS = [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"images": [*GOOD[:3], corrupted(GOOD[3]), GOOD[4]]}, r"train\.parquet row 3: not a readable image"),
        ({"images": [*GOOD[:4], b"no image"]}, r"train\.parquet row 4: not a readable image"),
        ({"images": [*GOOD[:3], None, GOOD[4]]}, r"train\.parquet: row 3 holds a path but no bytes"),
        ({"images": [*GOOD[:4], png(pixels(1, side=7)[0])]}, r"row 4: the image is 7×7 grey, but .*row 0 is 6×6 grey"),
        ({"images": [*GOOD[:2], png(pixels(1, channels=3)[0]), *GOOD[3:]]}, "row 2: the image is 6×6 RGB, .* set mode"),
        ({"images": [*GOOD[:4], png(np.zeros((4, 6, 6), np.uint8))]}, "row 4: the image has mode RGBA; convert it"),
        ({"image": [1, 2, 3, 4, 5]}, r"column 'image' holds int64; it must hold struct<bytes, path>"),
        ({"picture": [1, 2, 3, 4, 5]}, r"has the columns picture, label; samples must be in a column 'image' or 'img'"),
        ({"images": GOOD, "label": None, "class": LABELS}, r"no column 'label' \(it has image, class\)"),
        (
            {"images": GOOD, "label": [0, 1, -1, 1, 0]},
            r"train\.parquet: row 2 has label -1; classes are numbered from 0",
        ),
        (
            {"images": GOOD, "label": [0, 1, 0, 5, 0]},
            "row 3 has label 5, and no training row has lab",
        ),
        ({"images": GOOD, "label": [1, 2, 1, 2, 1]}, "row 0 has label 1, and no training row has"),
        ({"images": GOOD, "label": [0, None, 1, 0, 1]}, r"train\.parquet: row 1 has nothing in column 'label'"),
        ({"images": GOOD, "label": ["a"] * 5}, r"column 'label' holds string; it must hold class numbers"),
        ({"images": GOOD, "client": [0, 1, 2, -3, 4]}, r"train\.parquet: row 3 has client -3"),
        ({"images": GOOD, "client": [0.5] * 5}, "column 'client' holds double; it must hold numbers or words"),
        ({"text": ["a", None, "b", "c", "d"]}, r"train\.parquet: row 1 has nothing in column 'text'"),
    ],
)
def test_parquet_faults_name_file_and_row(tmp_path, columns, sentence):
    columns = {name: values for name, values in ({"label": LABELS} | columns).items() if values is not None}
    columns = dict(sorted(columns.items(), key=lambda item: item[0] == "label"))
    write_parquet(tmp_path / "train.parquet", **columns)
    with pytest.raises(DataError, match=sentence):
        Parquet(str(tmp_path)).load(None)


def test_texts_that_are_not_utf_8(tmp_path):
    """In a file, and in a table that is given."""
    offsets, letters = pa.py_buffer(np.arange(9, dtype=np.int32)), pa.py_buffer(b"abc\xff" * 2)
    words = pa.Array.from_buffers(pa.string(), 8, [None, offsets, letters])
    table = pa.table({"text": ["a"] * 8, "label": [0, 1] * 4, "client": words})
    for split in ("train", "test"):
        pq.write_table(table, tmp_path / f"{split}.parquet")
    sentence = r"column 'client' is damaged \(.*UTF8.*\); write it again"
    with pytest.raises(DataError, match=sentence):
        Parquet(str(tmp_path)).load(None)
    with pytest.raises(DataError, match=sentence):
        as_dataset((table, table))


def test_names_that_are_not_utf_8(tmp_path):
    """Beside an image any name may stand; a column's name must be text."""
    images = [{"bytes": image, "path": "x"} for image in GOOD]
    table = pa.table({"image": images, "label": LABELS, "other": LABELS})
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "train").mkdir()
    file = tmp_path / "train" / "data.arrow"
    file.write_bytes(stream.getvalue().replace(b"path", b"\xff" * 4))
    assert HuggingFace(str(tmp_path)).load(None).x.shape == (5, 1, 6, 6)
    file.write_bytes(stream.getvalue().replace(b"other", b"\xff" * 5))
    with pytest.raises(DataError, match=r"data\.arrow: not a readable Arrow file \('utf-8' codec"):
        HuggingFace(str(tmp_path)).load(None)


def test_parquet_faults_of_whole_files(tmp_path):
    with pytest.raises(DataError, match="the folder nowhere is missing; put"):
        Parquet("nowhere").load(tmp_path)
    assert "holds no train*.parquet" in Parquet(str(tmp_path)).check(None)
    (tmp_path / "train.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"train\.parquet: not a readable Parquet file"):
        Parquet(str(tmp_path)).load(None)
    write_parquet(tmp_path / "train.parquet", images=[], label=pa.array([], pa.int64()))
    with pytest.raises(DataError, match=r"train\.parquet: holds no rows"):
        Parquet(str(tmp_path)).load(None)
    write_parquet(tmp_path / "train.parquet", images=GOOD, label=LABELS)
    write_parquet(tmp_path / "test.parquet", images=GOOD, label=[0, 1, 2, 0, 1])
    with pytest.raises(DataError, match=r"test\.parquet: row 2 has label 2, and no training row has label 2"):
        Parquet(str(tmp_path)).load(None)
    assert Parquet(str(tmp_path), classes=3).load(None).num_classes == 3  # class 2 is tested, but has no training row
    whole = (tmp_path / "test.parquet").read_bytes()
    (tmp_path / "test.parquet").write_bytes(whole[:60] + bytes(60) + whole[120:])
    with pytest.raises(DataError, match=r"test\.parquet"):
        Parquet(str(tmp_path), classes=3).load(None)
    with pytest.raises(ConfigError, match=r"parquet\.max_vocab: must be a whole number >= 4"):
        tiny(data={"name": {"parquet": {"path": "x", "max_vocab": 3}}})


def test_real_data():
    root = real("mnist_dir0.1")
    data = Parquet("mnist_dir0.1").load(root)
    assert data.x.shape == (70_000, 1, 28, 28)
    assert data.train_rows == 52_492
    assert data.num_classes == 10
    assert np.unique(data.client).tolist() == list(range(20))
    assert abs(data.x.mean() / 255 - 0.1307) < 0.002  # the mean of MNIST that everybody normalises with
    real("ag_news_subset")
    news = Parquet("ag_news_subset").load(root)
    assert news.x.shape == (7600, 200)
    assert news.train_rows == 6080
    assert news.num_classes == 4
    assert (news.x[:, 0] == 2).all()
    assert news.x.max() == news.vocab - 1


# ---- text


def test_tokenizer_rule():
    text = 'The "U.S." isn\'t (yet) done;<br />Why: THIS, that?  No!\n'
    assert " ".join(tokenize(text)) == "the u . s . isn ' t ( yet ) done why this , that ? no !"


def test_vocabulary_by_frequency_then_alphabet():
    vocabulary = build_vocabulary(["b c b", "a c d"])
    assert vocabulary == {"b": 3, "c": 4, "a": 5, "d": 6}
    assert build_vocabulary(["b c b", "a c d"], max_vocab=5) == {"b": 3, "c": 4}
    tokens = encode(["c new b", "", "a b c d a b c d"], vocabulary, 5)
    assert tokens.tolist() == [[2, 4, 1, 3, 0], [2, 0, 0, 0, 0], [2, 5, 3, 4, 6]]
    assert tokens.dtype == np.int32


def test_text_vocabulary_comes_from_the_training_split(tmp_path):
    write_parquet(tmp_path / "train.parquet", text=["good film", "bad film"], label=[1, 0])
    write_parquet(tmp_path / "test.parquet", text=["good book"], label=[1])
    data = Parquet(str(tmp_path), length=4).load(None)
    assert data.vocab == 6
    assert data.x.tolist() == [[2, 5, 3, 0], [2, 4, 3, 0], [2, 5, 1, 0]]
    assert Parquet(str(tmp_path), length=2, max_vocab=4).load(None).x.tolist() == [[2, 1], [2, 1], [2, 1]]


# ---- folders of images


def save(file: Path, image: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(png(image))


@pytest.mark.parametrize("split", ["test", "val", "valid"])
def test_image_folders_with_class_folders(tmp_path, split):
    x = pixels(5, channels=3)
    for i, name in enumerate(["train/b/1", "train/a/x", "train/a/deeper/y", f"{split}/b/0", f"{split}/a/0"]):
        save(tmp_path / f"{name}.png", x[i])
    data = Images(str(tmp_path)).load(None)
    assert data.classes == ("a", "b")
    assert data.train_rows == 3
    assert data.y.tolist() == [0, 0, 1, 0, 1]
    assert np.array_equal(data.x, x[[2, 1, 0, 4, 3]])  # sorted paths


def test_tiny_imagenet_layout_with_grey_images(tmp_path):
    x = pixels(2, channels=3)
    grey = pixels(2)
    save(tmp_path / "train/n01/images/n01_0.png", x[0])
    save(tmp_path / "train/n02/images/n02_0.png", grey[0])
    save(tmp_path / "val/images/val_0.png", x[1])
    save(tmp_path / "val/images/val_1.png", grey[1])
    save(tmp_path / "test/images/test_0.png", x[1])  # unlabelled: not a test split
    notes = tmp_path / "val" / "val_annotations.txt"
    notes.write_text("val_0.png\tn02\t0\t0\t5\t5\nval_1.png\tn01\t0\t0\t5\t5\n")
    data = Images(str(tmp_path)).load(None)
    assert data.train_rows == 2
    assert data.y.tolist() == [0, 1, 1, 0]
    assert np.array_equal(data.x[2], x[1])
    assert np.array_equal(data.x[3], np.repeat(grey[1], 3, 0))

    notes.write_text("val_0.png\tn02\nval_1.png\tn03\n")
    with pytest.raises(DataError, match=r"val_annotations\.txt: row 1 .* names no training class"):
        Images(str(tmp_path)).load(None)
    notes.write_text("val_9.png\tn02\n")
    with pytest.raises(DataError, match=r"val_annotations\.txt: row 0 names val_9\.png, which is not in"):
        Images(str(tmp_path)).load(None)


def test_image_folder_faults(tmp_path):
    assert "train is missing" in Images(str(tmp_path)).check(None)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="train: holds no class folders"):
        Images(str(tmp_path)).load(None)
    save(tmp_path / "train/a/0.png", pixels(1)[0])
    (tmp_path / "train/b").mkdir()
    with pytest.raises(DataError, match="b: holds no images"):
        Images(str(tmp_path)).load(None)
    (tmp_path / "train/b/0.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(DataError, match=r"b/0\.png: not a readable image"):
        Images(str(tmp_path)).load(None)
    save(tmp_path / "train/b/0.png", pixels(1)[0])
    save(tmp_path / "test/a/0.png", pixels(1)[0])
    save(tmp_path / "test/c/0.png", pixels(1)[0])
    with pytest.raises(DataError, match="c: not one of the training classes"):
        Images(str(tmp_path)).load(None)


# ---- NumPy archives, digits, synthetic


def test_npz_layouts(tmp_path):
    file = tmp_path / "toy.npz"
    images = pixels(6, channels=3)
    y = np.array([0, 1, 2, 0, 1, 2], np.int32)
    np.savez(
        file,
        x_train=images[:4].transpose(0, 2, 3, 1),
        y_train=y[:4],
        x_test=images[4:].transpose(0, 2, 3, 1),
        y_test=y[4:],
    )
    data = Npz("toy.npz").load(tmp_path)
    assert np.array_equal(data.x, images)
    assert data.x.flags.c_contiguous
    assert data.train_rows == 4
    assert data.scale == 255
    np.savez(file, x=images[:, 0], y=y, client=[4, 4, 4, 9, 9, 9])
    data = Npz(str(file)).load(None)
    assert np.array_equal(data.x, images[:, :1])
    assert data.client.tolist() == [4, 4, 4, 9, 9, 9]
    assert data.train_rows == 6
    np.savez(file, x=images.reshape(6, -1) / 7, y=y)
    data = Npz(str(file)).load(None)
    assert data.x.dtype == np.float32
    assert data.sample_shape == (108,)
    assert data.scale == 1


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"a": np.zeros(3)}, r"toy\.npz: holds a; it needs x_train and y_train, or x and y"),
        ({"x": np.zeros((3, 2))}, "holds x_train; it needs"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4, int)}, r"y_train is int64 \(4,\); it must be 3 integers"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3)}, "y_train is float64"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, -1, 0])}, r"toy\.npz: y_train: row 1 has label -1"),
        (
            {"x": np.zeros((3, 2)), "y": np.array([0, 9, 0])},
            r"toy\.npz: y_train: row 1 has label 9, and no training row has label 1",
        ),
        (
            {"x": np.array([[0.0], [np.nan]]), "y": np.zeros(2, int)},
            "x_train row 1 holds NaN, infinity or a number beyond",
        ),
        (
            {"x": np.array([[0.0], [1e300]]), "y": np.zeros(2, int)},
            "row 1 holds NaN, infinity or a number beyond float32",
        ),
        ({"x": np.zeros((3, 2), int), "y": np.zeros(3, int)}, "x_train is int64 .* it must be uint8 images"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "x_train is empty"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3, int), "x_test": np.zeros((3, 2))}, "holds no y_test"),
        (
            {"x": np.zeros((3, 2)), "y": np.zeros(3, int), "x_test": np.zeros((1, 5)), "y_test": np.zeros(1, int)},
            r"x_test \(1, 5\) float32 is unlike x_train",
        ),
        ({"x": np.array([{}, {}]), "y": np.zeros(2, int)}, r"toy\.npz: not a readable \.npz archive of plain arrays"),
    ],
)
def test_npz_faults(tmp_path, arrays, sentence):
    np.savez(tmp_path / "toy.npz", **arrays)
    with pytest.raises(DataError, match=sentence):
        Npz("toy.npz").load(tmp_path)


def test_npz_missing_or_empty(tmp_path):
    assert "is missing" in Npz("toy.npz").check(tmp_path)
    (tmp_path / "toy.npz").write_bytes(b"")
    with pytest.raises(DataError, match="not a readable"):
        Npz("toy.npz").load(tmp_path)


def test_digits_are_stratified():
    data = Digits().load(None)
    assert data.x.shape == (1797, 1, 8, 8)
    assert data.x.dtype == np.uint8
    assert data.x.max() == 16 == data.scale
    train = np.bincount(data.y[: data.train_rows])
    total = np.bincount(data.y)
    assert np.array_equal(train, total - total // 5)
    assert np.array_equal(Digits().load(None).x, data.x)


def test_synthetic_images_and_features():
    image = Synthetic(100, 20, (3, 4, 5), 10, noise=0.0).load(None)
    assert image.x.shape == (120, 3, 4, 5)
    assert image.x.dtype == np.uint8
    assert image.train_rows == 100
    assert np.bincount(image.y[:100]).tolist() == [10] * 10
    assert np.bincount(image.y[100:]).tolist() == [2] * 10
    assert all(len(np.unique(image.x[image.y == c], axis=0)) == 1 for c in range(10))  # no noise: the prototype itself
    features = Synthetic(4000, 0, (50,), 2, noise=0.5, seed=1).load(None)
    assert features.x.dtype == np.float32
    assert abs(features.x[features.y == 0].std(0).mean() - 0.5) < 0.01
    assert np.array_equal(features.x, Synthetic(4000, 0, (50,), 2, noise=0.5, seed=1).load(None).x)
    assert not np.array_equal(features.x, Synthetic(4000, 0, (50,), 2, noise=0.5, seed=2).load(None).x)
    with pytest.raises(DataError, match="every class needs a sample"):
        Synthetic(5, classes=10).load(None)


# ---- torchvision, with small files of the same formats


def write_idx(file: Path, array: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    code, kind = (12, ">i4") if array.dtype == np.int32 else (8, np.uint8)
    header = bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    file.write_bytes(header + array.astype(kind).tobytes())


@pytest.mark.parametrize(
    ("source", "folder", "prefixes", "normalised"),
    [
        (MNIST(), "MNIST", ("train", "t10k"), True),
        (FashionMNIST(), "FashionMNIST", ("train", "t10k"), False),
        (EMNIST("letters"), "EMNIST", ("emnist-letters-train", "emnist-letters-test"), True),
    ],
)
def test_idx_files(tmp_path, source, folder, prefixes, normalised):
    x, y = pixels(7, side=28), np.array([1, 2, 3, 9, 5, 1, 2])
    for prefix, rows in zip(prefixes, (slice(5), slice(5, 7)), strict=True):
        write_idx(tmp_path / folder / "raw" / f"{prefix}-images-idx3-ubyte", x[rows, 0])
        write_idx(tmp_path / folder / "raw" / f"{prefix}-labels-idx1-ubyte", y[rows])
    assert source.check(tmp_path) is None
    data = source.load(tmp_path)  # complete files: nothing is downloaded
    letters = folder == "EMNIST"
    assert np.array_equal(data.x, x)
    assert data.train_rows == 5
    assert np.array_equal(data.y, y - letters)
    assert data.num_classes == (26 if letters else 10)
    assert data.mean == ((0.5,) if normalised else (0.0,))
    labels = tmp_path / folder / "raw" / f"{prefixes[0]}-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-2])
    with pytest.raises(DataError, match=f"torchvision cannot download or read .*{folder}"):
        source.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "prefix", "labels", "classes"),
    [
        (Torchvision("EMNIST", {"split": "balanced"}), "emnist-balanced", "labels-idx1-ubyte", 47),
        (Torchvision("QMNIST"), "qmnist", "labels-idx2-int", 10),
    ],
)
def test_sets_that_pass_train_and_download_on(tmp_path, source, prefix, labels, classes, monkeypatch):
    """EMNIST and QMNIST hand these arguments to MNIST, and do not name all of them. QMNIST keeps 8 numbers of a sample."""
    x, y = pixels(7, side=28), np.array([1, 2, 3, 9, 5, 1, 0])
    kept = y if source.name == "EMNIST" else np.stack([y, *[y + 10] * 7], 1).astype(np.int32)
    folder = tmp_path / source.name / "raw"
    for split, rows in {"train": slice(5), "test": slice(5, 7)}.items():
        write_idx(folder / f"{prefix}-{split}-images-idx3-ubyte", x[rows, 0])
        write_idx(folder / f"{prefix}-{split}-{labels}", kept[rows])
    data = source.load(tmp_path)
    assert np.array_equal(data.x, x)
    assert data.y.tolist() == y.tolist()
    assert (data.train_rows, data.num_classes) == (5, classes)

    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", offline)
    with pytest.raises(DataError, match="no network"):
        source.load(tmp_path / "elsewhere")


def test_missing_torchvision_folder_is_reported_before_loading(tmp_path):
    for source in (MNIST(download=False), EMNIST(download=False), CIFAR10(download=False)):
        assert "is missing; set download: true" in source.check(tmp_path)
        with pytest.raises(DataError, match="set download: true"):
            source.load(tmp_path)
    assert CIFAR10().check(tmp_path) is None


def python2(content) -> bytes:
    """The archives were pickled with NumPy's old module names."""
    return pickle.dumps(content, protocol=2).replace(b"numpy._core", b"numpy.core")


def write_cifar(root: Path, reader: str, monkeypatch, **replaced: bytes) -> np.ndarray:
    """Stand-in archive of 4 rows a file, its checksums in the place of the published ones."""
    import torchvision

    archive = getattr(torchvision.datasets, reader)
    folder = root / archive.base_folder
    folder.mkdir(parents=True, exist_ok=True)
    key = "labels" if reader == "CIFAR10" else "fine_labels"
    names = [file for file, _ in (*archive.train_list, *archive.test_list)]
    x = pixels(4 * len(names), channels=3, side=32)
    files = {
        name: python2({"data": x[4 * i : 4 * i + 4].reshape(4, -1), key: [i % 3, 1, 2, 0]})
        for i, name in enumerate(names)
    }
    files[archive.meta["filename"]] = python2({archive.meta["key"]: ["cat", "dog", "owl"]})
    files |= replaced
    for name, content in files.items():
        (folder / name).write_bytes(content)
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    for attribute in ("train_list", "test_list"):
        monkeypatch.setattr(archive, attribute, [[name, md5[name]] for name, _ in getattr(archive, attribute)])
    monkeypatch.setattr(archive, "meta", archive.meta | {"md5": md5[archive.meta["filename"]]})
    return x


@pytest.mark.parametrize(("source", "reader", "train_files"), [(CIFAR10(), "CIFAR10", 5), (CIFAR100(), "CIFAR100", 1)])
def test_cifar_archives(tmp_path, monkeypatch, source, reader, train_files):
    x = write_cifar(tmp_path, reader, monkeypatch)
    data = source.load(tmp_path)
    assert np.array_equal(data.x, x)
    assert data.x.flags.c_contiguous
    assert data.classes == ("cat", "dog", "owl")
    assert data.train_rows == 4 * train_files
    assert data.y[:4].tolist() == [0, 1, 2, 0]
    assert data.scale == 255


@pytest.mark.parametrize("source", [MNIST(), Torchvision("MNIST")])
def test_one_process_at_a_time_downloads(source, tmp_path, monkeypatch):
    """What the first has begun has its last name, and half of it would be read."""
    begun, whole = Event(), tmp_path / "whole"

    class Slow:
        def __init__(self, *args, **kwargs):
            if not begun.is_set():
                begun.set()
                time.sleep(0.3)
                whole.touch()
            assert whole.exists()
            raise RuntimeError("as far as this test goes")

    monkeypatch.setattr("torchvision.datasets.MNIST", Slow)

    def load(_):
        with pytest.raises(DataError, match="as far as this test goes"):
            source.load(tmp_path)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load, 1)
        begun.wait()
        pool.submit(load, 2).result()
        first.result()


def test_cifar_is_downloaded_when_a_checksum_is_wrong(tmp_path, monkeypatch):
    import torchvision

    write_cifar(tmp_path, "CIFAR10", monkeypatch)
    broken = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-1] + b"x")
    with pytest.raises(
        DataError, match=r"data_batch_3: missing, or its checksum is wrong; delete .* set download: true"
    ):
        CIFAR10(download=False).load(tmp_path)

    def fetch(url, root, filename, md5):
        assert (url, root, md5) == (
            torchvision.datasets.CIFAR10.url,
            str(tmp_path),
            torchvision.datasets.CIFAR10.tgz_md5,
        )
        broken.write_bytes(whole)

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", fetch)
    assert CIFAR10().load(tmp_path).train_rows == 20

    def offline(*args, **kwargs):
        raise OSError("no network")

    broken.unlink()
    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", offline)
    with pytest.raises(DataError, match=r"cannot download .* \(no network\); unpack the archive"):
        CIFAR10().load(tmp_path)


@pytest.mark.parametrize(("source", "reads"), [(CIFAR10(), "load"), (Torchvision("CIFAR10"), "open")])
def test_only_what_is_absent_is_fetched(source, reads, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(type(source), reads, lambda self, root: asked.append(root))
    source.fetch(tmp_path)
    assert asked == [tmp_path]
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"there")
    source.fetch(tmp_path)
    assert asked == [tmp_path]


class Harmful:
    def __init__(self, call, *arguments):
        self.reduced = call, arguments

    def __reduce__(self):
        return self.reduced


def test_a_pickle_runs_nothing(tmp_path, monkeypatch):
    """Even under a checksum that fits; and an allowed function cannot be turned into another codec."""
    trace = tmp_path / "trace"
    attacks = [
        Harmful(os.system, f"touch {trace}"),
        Harmful(open, str(trace), "w"),
        Harmful(eval, f"open({str(trace)!r}, 'w')"),
        Harmful(np.load, str(trace)),
        Harmful(getattr, "text", "upper"),
    ]
    for attack in attacks:
        write_cifar(tmp_path, "CIFAR10", monkeypatch, data_batch_2=pickle.dumps({"data": attack}, 2))
        with pytest.raises(DataError, match=r"data_batch_2: refused to unpickle .* only NumPy arrays are allowed"):
            CIFAR10().load(tmp_path)
    assert not trace.exists()
    import _codecs

    for content, sentence in [
        (pickle.dumps({"data": Harmful(_codecs.encode, "x", "zip")}, 2), "codec 'zip' is not allowed"),
        (pickle.dumps([1, 2]), "holds a list, not a dictionary"),
        (b"\x80\x02}", "refused to unpickle"),
    ]:
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DataError, match=sentence):
            read_arrays(tmp_path / "file")
