"""The data that somebody has: what becomes of it, and what is wrong with it, the same wherever it comes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from conftest import tiny
from PIL import Image
from torch.utils.data import DataLoader, Subset, TensorDataset

import raysim
from raysim.core.task import NextToken
from raysim.data import DataError, Dataset
from raysim.data.sources import Csv, Given, Images, Npz
from raysim.federation import prepare

X, Y, HOSPITAL = np.arange(12, dtype=np.float32).reshape(6, 2), np.array([0, 1, 0, 1, 0, 1]), list("babacc")
OWNERS = [1, 0, 1, 0, 2, 2]  # numbers of the words, in their order
TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
FRAME = pd.DataFrame(
    {"age": X[:, 0], "weight": X[:, 1].astype(int), "label": Y, "hospital": HOSPITAL}, index=range(5, 11)
)
ARROW = pa.table({"age": X[:, 0], "weight": X[:, 1], "label": Y, "hospital": pa.array(HOSPITAL).dictionary_encode()})


def csv(folder: Path, frame: pd.DataFrame = FRAME, **how: Any) -> Dataset:
    frame.to_csv(folder / "people.csv", index=False)
    return Csv("people.csv", **how).load(folder)


def test_one_set_in_many_forms(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """Four samples for training, two for the test, each with its client."""
    first, last = slice(4), slice(4, 6)
    clients = (np.array(HOSPITAL)[first], np.array(HOSPITAL)[last])
    by_number = {"client": lambda sample: HOSPITAL[int(sample[0][0]) // 2]}
    column = {"client": "hospital"}
    splits = [("train", first), ("test", last)]
    forms: dict[str, tuple[Any, dict[str, Any]]] = {
        "subsets": ((Subset(TENSORS, range(4)), Subset(TENSORS, range(4, 6))), {"client": clients}),
        "pairs": (([*zip(X, Y, strict=True)][first], [*zip(X, Y, strict=True)][last]), by_number),
        "arrays": (((X[first], Y[first]), (X[last], Y[last])), by_number),
        "tensors": (
            ((torch.tensor(X[:4]), torch.tensor(Y[:4])), (torch.tensor(X[4:]), torch.tensor(Y[4:]))),
            by_number,
        ),
        "a table and a column": (
            ((FRAME[["age", "weight"]][:4], FRAME.label[:4]), (X[4:], Y[4:])),
            {"client": clients},
        ),
        "bfloat16": (((torch.tensor(X[:4]).bfloat16(), Y[:4]), (torch.tensor(X[4:]).bfloat16(), Y[4:])), by_number),
        "named arrays": ({f"{k}_{s}": v[r] for s, r in splits for k, v in (("x", X), ("y", Y))}, {"client": clients}),
        "frames": ((FRAME[first], FRAME[last]), column),
        "tables": (
            {"train": ARROW[first], "test": ARROW[last]},
            {"client": lambda row: row["hospital"], "features": ["age", "weight"]},
        ),
        "tables and a column": ((ARROW[first], ARROW[last]), column),
        "columns in another order": ((FRAME[first], FRAME[last][FRAME.columns[::-1]]), column),
        "words": ((FRAME.assign(label=["no", "yes"] * 3)[first], FRAME[last].assign(label=["no", "yes"])), column),
    }
    found = {form: raysim.as_dataset(data, **how) for form, (data, how) in forms.items()}
    FRAME[last][FRAME.columns[::-1]].to_csv(tmp_path / "later.csv", index=False)
    found["csv"] = csv(tmp_path, FRAME[first], test="later.csv", client="hospital")
    for form, data in found.items():
        with subtests.test(form):
            assert np.array_equal(data.x, X)
            assert data.y.tolist() == Y.tolist()
            assert (data.train_rows, data.task) == (4, "classification")
            assert data.classes == (("no", "yes") if form == "words" else ("0", "1"))
            assert data.client is not None
            assert data.client.tolist() == OWNERS


def test_a_share_is_drawn_for_the_test(tmp_path: Path) -> None:
    """Every sample is there once, with its own label and client, the same share in every form."""
    drawn = raysim.as_dataset(TENSORS, test=1 / 3, client=HOSPITAL)
    assert drawn.train_rows == 4
    rows = (drawn.x[:, 0] / 2).astype(int)
    assert sorted(rows) == [*range(6)]
    assert drawn.y.tolist() == Y[rows].tolist()
    assert drawn.client is not None
    assert drawn.client.tolist() == [OWNERS[row] for row in rows]
    assert csv(tmp_path, client="hospital", test_frac=1 / 3).sha256() == drawn.sha256()
    assert raysim.as_dataset((X, Y), test=0).train_rows == 6
    parts, owners = (FRAME[:2], FRAME[2:4], FRAME[4:]), (HOSPITAL[:2], HOSPITAL[2:4], HOSPITAL[4:])
    with pytest.warns(UserWarning, match="validation is left out"):
        three = raysim.as_dataset(parts, features=["age"], client=owners)
    assert three.x.tolist() == [[0], [2], [8], [10]]
    assert three.client is not None
    assert three.client.tolist() == [1, 0, 2, 2]  # b, a, c and c


class Weighed(NextToken):
    """A task with a loss of its own."""


def test_targets_labels_tokens_images_and_texts() -> None:
    """Numbers are targets and words classes; nothing is cut off, and pixels are scaled."""
    targets = raysim.as_dataset([(x, x[0] / 4) for x in X], test=0)
    assert (targets.task, targets.y[:, 0].tolist()) == ("regression", [0, 0.5, 1, 1.5, 2, 2.5])
    two = raysim.as_dataset(FRAME, label=["age", "weight"], features=["label"], task="regression", test=0)
    assert two.y.tolist() == X.tolist()
    many = raysim.as_dataset((X, np.eye(6, dtype=int)), task="multilabel", test=0)
    assert (many.outputs, many.y.dtype) == (6, np.float32)
    tokens = np.arange(12).reshape(6, 2)
    text = raysim.as_dataset((torch.tensor(tokens), torch.tensor(tokens)), vocab=12, task="next_token", test=0)
    assert (text.x.dtype, text.outputs, text.y.tolist()) == (np.int32, 12, tokens.tolist())
    assert raysim.as_dataset((tokens, tokens), vocab=12, task=Weighed(), test=0).task == Weighed()
    grey = np.arange(16, dtype=np.uint8).reshape(2, 8)
    images = raysim.as_dataset([(torch.from_numpy(grey), 0), (torch.from_numpy(grey), 1)], test=0)
    assert images.transform(torch.from_numpy(images.x))[0, 0, 1, 7] == pytest.approx((15 / 255 - 0.5) / 0.5)
    alpha = raysim.as_dataset((np.zeros((2, 5, 8, 4), np.uint8), Y[:2]), test=0)
    assert alpha.x.shape == (2, 4, 5, 8)
    with pytest.warns(UserWarning, match=r"x is \(2, 5, 8, 3\), which is taken for 5 channels.*x\.transpose"):
        assert raysim.as_dataset((np.zeros((2, 5, 8, 3), np.float32), Y[:2]), test=0).x.shape == (2, 5, 8, 3)
    pillow = raysim.as_dataset([(Image.fromarray(grey), 0), (Image.fromarray(grey), 1)], test=0)
    assert np.array_equal(pillow.x, images.x)
    words = raysim.as_dataset(pa.table({"text": ["a b", "b c"], "label": [0, 1]}), length=3, test=0.5)
    assert words.vocab == 5  # two words of the one training text, and three special tokens


class Photos(list[Any]):
    """Samples of classes that have names."""

    def __init__(self, labels: list[int], classes: list[str]):
        super().__init__((X[i], label) for i, label in enumerate(labels))
        self.classes = classes


def test_classes_are_known_by_their_names() -> None:
    """The numbers of the test's are other ones: as where a folder of images has no sample of a class."""
    train = Photos([0, 1, 2], ["ant", "bee", "cat"])
    data = raysim.as_dataset((train, Photos([0, 1, 1], ["ant", "cat"])))
    assert (data.classes, data.y.tolist()) == (("ant", "bee", "cat"), [0, 1, 2, 0, 2, 2])
    with pytest.raises(DataError, match="y_test row 1 is 'dog', which is no class of the training samples"):
        raysim.as_dataset((train, Photos([0, 1], ["ant", "dog"])))
    with pytest.raises(DataError, match="y_test: row 1 has label 2, but there are 2 classes"):
        raysim.as_dataset((train, Photos([0, 2], ["ant", "cat"])))


class Noisy(torch.utils.data.Dataset[Any]):
    """Pixels that are drawn whenever they are read."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.rand(4), 0


def test_sets_of_the_hugging_face_library() -> None:
    """Its classes have names; rows that were taken out or shuffled are out, or elsewhere."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["bad", "good"]),
            "client": datasets.Value("string"),
        }
    )
    texts = [f"word{i}" for i in range(6)]
    whole = datasets.Dataset.from_dict({"text": texts, "label": Y.tolist(), "client": HOSPITAL}, features=features)
    some = datasets.DatasetDict(train=whole.select([3, 2, 1]), validation=whole.select([0]))
    data = raysim.as_dataset(some, length=2)
    assert (data.classes, data.train_rows, data.y.tolist()) == (("bad", "good"), 3, [1, 0, 1, 0])
    assert data.client is not None
    assert data.client.tolist() == [0, 1, 0, 1]
    assert data.x[:, 1].tolist() == [
        5,
        4,
        3,
        1,
    ]  # the words of the training texts by alphabet, and one that is none of them
    grey = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    pictures = [Image.fromarray(np.full((2, 3), 40 * i, np.uint8)) for i in range(2)]
    images = raysim.as_dataset(datasets.Dataset.from_dict({"image": pictures, "label": [0, 1]}, features=grey), test=0)
    assert (images.x.shape, images.x[1, 0, 0, 0], images.scale) == ((2, 1, 2, 3), 40, 255)
    with pytest.raises(DataError, match="load it without streaming"):
        raysim.as_dataset(whole.to_iterable_dataset(), test=0)
    with pytest.raises(DataError, match=r"with_transform and set_transform do not change the table.*; use map"):
        raysim.as_dataset(whole.with_transform(lambda rows: rows), test=0)


def with_row(x: Any, row: int, value: Any) -> Any:
    changed = x.copy()
    changed[row] = value
    return changed


def faults() -> dict[str, tuple[Any, dict[str, Any], str]]:
    nan = with_row(X, 3, np.nan)
    pairs = [*zip(X, Y, strict=True)]
    holes = FRAME.assign(age=nan[:, 0])
    return {
        "no split": (TENSORS, {}, r"which samples are for the test\? Give a split: pass \(train, test\)"),
        "split twice": ((FRAME, FRAME), {"test": 0.2}, "is split already"),
        "four parts": ((X, Y, X, Y), {}, "tuple of 4"),
        "no train": ({"a": FRAME}, {}, "has a; it needs train"),
        "a loader": (DataLoader(TENSORS), {"test": 0}, "a DataLoader cannot be read; pass its .dataset"),
        "a stream": (iter(pairs), {"test": 0}, "it needs a length"),
        "NaN": (([*zip(nan, Y, strict=True)],), {}, "x_train row 3 holds NaN"),
        "NaN in the test": (((X, Y), (nan, Y)), {}, "x_test row 3 holds NaN"),
        "a hole": (holes, {"test": 0}, "row 3 has nothing in column 'age'"),
        "beyond float32": (((with_row(X.astype(float), 2, 1e300), Y),), {}, "x_train row 2 holds NaN, infinity or a number"),
        "labels from 1": (((X, Y + 1),), {}, "no training row has label 0: number the classes from 0"),
        "negative": (((X, Y - 1),), {}, "row 0 has label -1"),
        "floats as classes": (((X, Y.astype(float)),), {}, "whole numbers as float64; make them integers"),
        "floats for classes": (((X, Y / 2),), {"task": "classification"}, "y_train is float64"),
        "a new word": ((FRAME[:4], FRAME[4:]), {"label": "hospital", "features": ["age"]}, "y_test row 0 is 'c', which no"),
        "complex": ([(torch.ones(2, dtype=torch.complex64), 0)], {"test": 0}, "sample 0 holds complex64, a Tensor"),
        "16 bits": (((X.astype(np.uint16)[:, None], Y),), {}, "x_train is uint16 .* scale pixels of 16 bits"),
        "tokens without vocab": (((X.astype(int), Y),), {}, "for tokens set vocab"),
        "a token too many": (((X.astype(int), Y),), {"vocab": 11}, r"row 5 holds token 11, outside 0\.\.10"),
        "sizes": ([(X[0], 0), (X[0, :1], 1)], {"test": 0}, r"sample 1 is float32 \(1,\), but the first one is float32 \(2,\)"),
        "no pair": ([X[0]], {"test": 0}, "sample 0 is a ndarray; it must be a pair"),
        "none": (((X[:0], Y[:0]),), {}, "x_train is empty"),
        "too few labels": (((X, Y[:5]),), {}, "it must be 6 integers"),
        "clients": (((X, Y),), {"client": ([0, 1],)}, "client_train is int64 .* it must be 6 integers"),
        "clients of three parts": (((X, Y), (X, Y)), {"client": (Y, Y, Y)}, "client is a tuple of 3; .* train and that of test"),
        "other columns": ((FRAME, FRAME.rename(columns={"age": "years"})), {"client": "hospital"},
                          "x_test has the columns years, weight, and x_train has age, weight; rename them"),
        "no column": (FRAME, {"test": 0, "client": "clinic"}, "has no column 'clinic' .it has age"),
        "a column of an array": ((X, Y), {"test": 0, "client": "clinic"}, "it is no table"),
        "words for numbers": (FRAME, {"test": 0}, "column 'hospital' holds no numbers"),
        "a random transform": (Noisy(), {"test": 0}, "sample 0 differs when it is read again.*data.augment"),
    }  # fmt: skip


def test_what_is_wrong_is_named(subtests: pytest.Subtests) -> None:
    for name, (data, how, sentence) in faults().items():
        with subtests.test(name), pytest.raises(DataError, match=sentence):
            raysim.as_dataset(data, **how)


def test_what_is_wrong_with_a_data_set_is_named(subtests: pytest.Subtests) -> None:
    good: dict[str, Any] = {"x": X, "y": Y, "train_rows": 4, "classes": ("a", "b")}
    assert Dataset("d", **good | {"x": X.astype(float), "y": Y.astype(np.uint8)}).y.dtype == np.int64
    pixels = np.full((6, 1, 2, 2), 255, np.uint8)
    tokens = X.astype(np.int32)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"x": with_row(X, 5, np.inf)}, "d: test row 1 holds NaN, infinity"),
        ({"x": with_row(X, 0, np.nan)}, "d: training row 0 holds NaN"),
        ({"x": X.astype(np.complex64)}, "x is complex64"),
        ({"x": tokens}, "x is int32; it must be .* tokens with a vocab"),
        ({"x": tokens, "vocab": 11}, r"test row 1 holds token 11, outside 0\.\.10"),
        ({"x": X, "vocab": 12}, "x is float32; it must be integers"),
        ({"x": pixels}, "x is uint8 up to 255, and scale is 1"),
        ({"y": Y.astype(complex)}, "y is complex128"),
        ({"client": Y.astype(float)}, "client is float64"),
    ]
    for change, sentence in wrong:
        with subtests.test(sentence), pytest.raises(DataError, match=sentence):
            Dataset("d", **good | change)


def test_a_task_that_nothing_has_registered() -> None:
    """As where a cache was written by a process that knew the user's tasks."""
    data = Dataset("d", X, Y, 4, ("a", "b"), task="ranking")
    with pytest.raises(DataError, match=r"d: there is no task 'ranking'\. There are classification, .*@raysim\.task"):
        prepare(tiny(data={"name": Given.of(data), "partition": {"iid_equal": {"clients": 2}}}))


def test_files_of_tables(subtests: pytest.Subtests, tmp_path: Path) -> None:
    holes = FRAME.assign(age=with_row(X, 2, np.nan)[:, 0])
    wrong: list[tuple[pd.DataFrame, dict[str, Any], str]] = [
        (holes, {"client": "hospital"}, r"people\.csv: row 2 has nothing in column 'age'"),
        (FRAME.assign(label=Y + 1), {"client": "hospital"}, "no training row has label 0"),
        (FRAME, {"label": "y"}, "has no column 'y'"),
        (FRAME, {}, "column 'hospital' holds no numbers"),
    ]
    for frame, how, sentence in wrong:
        with subtests.test(sentence), pytest.raises(DataError, match=sentence):
            csv(tmp_path, frame, **how)
    (tmp_path / "people.csv").write_text("a,b\n1,2,3\n")
    with pytest.raises(DataError, match="not a readable CSV file"):
        Csv("people.csv").load(tmp_path)
    assert "is missing" in (Csv("people.csv", test="other.csv").check(tmp_path) or "")
    with pytest.raises(DataError, match=r"test_frac is 0\.2"):
        Csv("a.csv", test="b.csv", test_frac=0.2)


def test_images_of_16_bits_are_refused(tmp_path: Path) -> None:
    """Pillow's `convert` would make 255 of every pixel above it."""
    (tmp_path / "train/a").mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 4000, np.uint16)).save(tmp_path / "train/a/0.png")
    with pytest.raises(DataError, match=r"0\.png: not a readable image \(its mode is I.*more than 8 bits"):
        Images(str(tmp_path)).load(None)


def test_the_same_words_of_npz(tmp_path: Path) -> None:
    """A file of arrays and the arrays are one data set."""
    np.savez(tmp_path / "a.npz", x=X, y=Y, client=OWNERS)
    data = raysim.as_dataset((X, Y), test=0, client=HOSPITAL)
    assert Npz("a.npz").load(tmp_path).sha256() == data.sha256()
