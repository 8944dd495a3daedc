"""Samples, labels and clients in memory to a `Dataset`. Whatever they come from, here they are checked."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.data.dataset import Dataset, first_wrong
from raysim.data.decode import ImageDecoder, Mode, Size
from raysim.data.errors import DataError
from raysim.data.sources.base import PREPROCESSING, Normalise, class_names, renumbered
from raysim.data.text import build_vocabulary, encode, facts_of

if TYPE_CHECKING:
    from raysim.core.task import Task

CHANNELS = (1, 3, 4)  # of images: grey, colour, and with an alpha channel
COLUMNS = ("multilabel", "regression")  # tasks whose labels have a column for each output


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a user's data become a `Dataset`."""

    test: float | None = None
    """Share of the samples that is drawn for the test, where the data are not split. 0: none. None: they must be."""
    label: str | Sequence[str] = "label"
    """Of a table: the column of the labels, or the columns of the targets."""
    features: Sequence[str] | None = None
    """Of a table: the columns of the samples. None: `image`, `img` or `text` where there is one, else all that are left."""
    client: Any = None
    """The natural client of every sample, a number from 0 on or a word: a column of a table; a function of a sample (of a
    table's row, as a dict); or an array [n], and a tuple of them where the data are split. None: the column `client` of a
    table that has one."""
    task: str | Task | None = None
    """What is learned. None: classification where labels are whole numbers or words, regression where they are others."""
    classes: int | None = None
    """Number of classes; needed where the data name none and a class has no training sample."""
    vocab: int | None = None
    """Number of token ids, where samples are tokens."""
    normalise: Normalise = "half"
    """Range of uint8 pixels as the model sees them: half is [-1, 1], unit is [0, 1]."""
    mode: Mode | None = None
    """Pillow mode that every encoded image is converted to."""
    resize: Size | None = None
    """Height and width in pixels that every encoded image is scaled to."""
    length: int = 200
    """Tokens of a text in words; longer texts are cut, shorter ones padded."""
    max_vocab: int | None = 32_000
    """Largest number of tokens of texts in words, with the 3 special ones."""


@dataclass(frozen=True, eq=False)
class Split:
    """A part of the data as it came: `train` or `test`; empty, where it is all, and not divided yet."""

    name: str
    x: np.ndarray
    """[n, ...]; texts or encoded images are objects [n]."""
    y: np.ndarray
    """[n, ...]; words are objects [n]."""
    client: np.ndarray | None = None
    """[n] numbers or words."""
    classes: Sequence[str] | None = None
    """Their names, where the data say."""
    columns: Sequence[str] | None = None
    """Of a table: those of the samples."""

    def at(self, place: str, part: str) -> str:
        """How an error names a part, `x`, `y` or `client`."""
        return f"{place}: {part}_{self.name}" if self.name else f"{place}: {part}"


def assemble(place: str, name: str, splits: Sequence[Split], reading: Reading) -> Dataset:
    """The data set `name` of the splits, training first. `place` begins every error. Raises DataError naming the row."""
    for split in splits:
        if split.x.size == 0:
            raise DataError(f"{split.at(place, 'x')} is empty; save it again with its samples")
    splits = [_in_order(place, split, splits[0]) for split in splits]
    y, classes, task = _labels(place, splits, reading)
    client = _clients(place, splits)
    train_rows, order = len(splits[0].x), None
    if not splits[0].name and reading.test:
        if not 0 < reading.test < 1:
            raise DataError(f"{place}: the share of the test is {reading.test}; it must lie between 0 and 1")
        is_test = np.zeros(train_rows, bool)
        chosen = np.random.default_rng(0).choice(train_rows, round(reading.test * train_rows), replace=False)
        is_test[chosen] = True
        order, train_rows = np.argsort(is_test, kind="stable"), int((~is_test).sum())
        y, client = y[order], None if client is None else client[order]
    x, more = _samples(place, splits, reading, train_rows, order)
    return Dataset(name, x, y, train_rows, classes, client, task=task, **more)


def _in_order(place: str, split: Split, first: Split) -> Split:
    """`split` with its columns in the order of those of `first`. Raises DataError where they have other names."""
    now, then = split.columns, first.columns
    if not now or not then or now == then:
        return split
    if sorted(now) != sorted(then):
        raise DataError(
            f"{split.at(place, 'x')} has the columns {', '.join(now)}, and x_{first.name} has {', '.join(then)}; rename them, or "
            "name those of the samples in features"
        )
    return replace(split, x=split.x[:, [now.index(column) for column in then]], columns=then)


def _samples(
    place: str, splits: Sequence[Split], reading: Reading, train_rows: int, order: np.ndarray | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """All samples, training rows first, and what else a data set of them has."""
    first = splits[0].x[0]
    if splits[0].x.dtype == object and isinstance(first, str | bytes):
        encoded = np.concatenate([split.x for split in splits])
        if isinstance(first, bytes):
            places = [f"{split.at(place, 'x')} row {row}" for split in splits for row in range(len(split.x))]
            decode = ImageDecoder.like(places[0], first, reading.mode, reading.resize)
            x = decode([*zip(places, encoded, strict=True)])
            return x if order is None else x[order], PREPROCESSING[reading.normalise]
        encoded = encoded if order is None else encoded[order]
        vocabulary = build_vocabulary(encoded[:train_rows], reading.max_vocab)
        return encode(encoded.tolist(), vocabulary, reading.length), facts_of(vocabulary)
    parts = [as_samples(split.at(place, "x"), split.x, reading.vocab) for split in splits]
    if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
        raise DataError(
            f"{place}: x_test {parts[1].shape} {parts[1].dtype} is unlike x_train {parts[0].shape} {parts[0].dtype}"
        )
    x = np.concatenate(parts)
    scaling = PREPROCESSING[reading.normalise] if x.dtype == np.uint8 else {}
    return x if order is None else x[order], scaling | ({"vocab": reading.vocab} if reading.vocab else {})


def as_samples(place: str, x: np.ndarray, vocab: int | None = None) -> np.ndarray:
    """Samples as a `Dataset` has them, in a C-contiguous array: uint8 images [n, C, H, W], int32 tokens or float32 features.
    Raises DataError that begins with `place` and names the row."""
    if vocab is not None and x.dtype.kind in "iu" and x.ndim >= 2:
        if wrong := first_wrong(x, vocab):  # before the cast, which could lose it
            raise DataError(f"{place} row {wrong[0]} {wrong[1]}")
        return np.ascontiguousarray(x, np.int32)
    if vocab is None and x.dtype == np.uint8 and x.ndim in (3, 4):
        if x.ndim == 3:
            return np.ascontiguousarray(x[:, None])
        channels_last = x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS  # as Keras saves images
        return np.ascontiguousarray(np.moveaxis(x, 3, 1) if channels_last else x)
    if vocab is None and np.issubdtype(x.dtype, np.floating) and x.ndim >= 2:
        with np.errstate(over="ignore"):
            x = np.ascontiguousarray(x, np.float32)
        if wrong := first_wrong(x):
            raise DataError(f"{place} row {wrong[0]} {wrong[1]}")
        if x.ndim == 4 and x.shape[3] in CHANNELS[1:] and x.shape[1] not in CHANNELS:
            warnings.warn(
                f"{place} is {x.shape}, which is taken for {x.shape[1]} channels. Images [n, H, W, C] of floats are passed as "
                "x.transpose(0, 3, 1, 2).",
                stacklevel=2,
            )
        return x
    way = "; tokens are integers" if vocab else "; for tokens set vocab" if x.dtype.kind in "iu" else ""
    way += "; scale pixels of 16 bits to floating point" if x.dtype == np.uint16 else ""
    raise DataError(
        f"{place} is {x.dtype} {x.shape}; it must be uint8 images [n, H, W], [n, C, H, W] or [n, H, W, C], "
        f"or floating-point features [n, F]{way}"
    )


def _labels(
    place: str, splits: Sequence[Split], reading: Reading
) -> tuple[np.ndarray, tuple[str, ...], str | Task]:  # fmt: skip
    """All labels, the names of a model's outputs, and the task."""
    task, first = reading.task, splits[0].y
    name = _built_in(task)
    if task is None and first.dtype.kind == "f":
        if np.array_equal(first, np.rint(first)):
            raise DataError(
                f"{splits[0].at(place, 'y')} holds whole numbers as {first.dtype}; make them integers where they are "
                "classes, or set task to regression"
            )
        name = task = "regression"
    if name in COLUMNS or (name != "classification" and first.dtype.kind == "f"):
        if reading.classes is not None:
            raise DataError(f"{place}: {name} has as many outputs as y has columns; leave `classes` out")
        y = [_columns(place, split, str(name), first.shape[1:]) for split in splits]
        return np.concatenate(y), tuple(str(column) for column in range(y[0].shape[1])), task or "regression"
    if reading.vocab is not None and name == "next_token":
        y = [as_samples(split.at(place, "y"), split.y, reading.vocab).astype(np.int64) for split in splits]
        return np.concatenate(y), tuple(map(str, range(reading.vocab))), task or name
    names = splits[0].classes
    if first.dtype.kind in "OUT":
        words = np.unique(first.astype(str))
        for split in splits:
            unknown = ~np.isin(split.y.astype(str), words)
            if unknown.any():
                row = int(np.argmax(unknown))
                raise DataError(f"{split.at(place, 'y')} row {row} is {split.y[row]!r}, which no training row has")
        splits = [replace(split, y=np.searchsorted(words, split.y.astype(str)), classes=None) for split in splits]
        names = words.tolist()
    other = "; for labels or targets set `task`"
    y = [_integers(split.at(place, "y"), split.y, len(split.x), other) for split in splits]
    y = [renumbered(split.at(place, "y"), part, split.classes, names) for split, part in zip(splits, y, strict=True)]
    named = [(split.at(place, "y"), part) for split, part in zip(splits, y, strict=True)]
    return np.concatenate(y), class_names(named[:1], named[1:], names, reading.classes), task or "classification"


def _built_in(task: str | Task | None) -> str | None:
    """The name of raysim's own task that `task` is or derives from; its own one, where it derives from none."""
    from raysim.core import task as tasks

    if task is None or (isinstance(task, str) and task not in tasks.TASKS):  # which is named where the run is checked
        return task
    of = tasks.task_of(task)
    kinds = (tasks.MultiLabel, tasks.Regression, tasks.NextToken, tasks.Classification)
    return next((kind.name for kind in kinds if isinstance(of, kind)), of.name)


def _columns(place: str, split: Split, task: str, shape: tuple[int, ...]) -> np.ndarray:
    """Labels or targets [n, columns] float32; `shape` is that of the first split's."""
    y, n = split.y, len(split.x)
    if task == "multilabel":
        fits, words = y.ndim == 2 and y.dtype.kind in "bui" and bool(np.isin(y, (0, 1)).all()), "0 and 1 [n, L]"
    else:
        fits, words = y.ndim in (1, 2) and y.dtype.kind in "fui", "numbers [n] or [n, F]"
    if not (fits and y.size and len(y) == n and y.shape[1:] == shape):
        raise DataError(
            f"{split.at(place, 'y')} is {y.dtype} {y.shape}; {task} needs {words}, n = {n}, in the columns of y_train"
        )
    with np.errstate(over="ignore"):
        y = y.reshape(n, -1).astype(np.float32)
    if wrong := first_wrong(y):
        raise DataError(f"{split.at(place, 'y')} row {wrong[0]} {wrong[1]}")
    return y


def _integers(place: str, numbers: np.ndarray, n: int, other: str = "") -> np.ndarray:
    """Classes or clients [n] int64; `other` ends an error."""
    if numbers.shape != (n,) or numbers.dtype.kind not in "iub":
        raise DataError(f"{place} is {numbers.dtype} {numbers.shape}; it must be {n} integers, one a row{other}")
    return numbers.astype(np.int64)


def _clients(place: str, splits: Sequence[Split]) -> np.ndarray | None:
    """[n] int64, -1 where a row has none; those with words are numbered in the order of the words."""
    given = [split.client for split in splits if split.client is not None]
    if splits[0].client is None:
        return None
    if given[0].dtype.kind in "OUT":
        words = np.unique(np.concatenate([part.astype(str) for part in given]))
        splits = [
            split if split.client is None else replace(split, client=np.searchsorted(words, split.client.astype(str)))
            for split in splits
        ]
    return np.concatenate(
        [
            np.full(len(split.x), -1)
            if split.client is None
            else _integers(split.at(place, "client"), split.client, len(split.x))
            for split in splits
        ]
    )
