"""A user's data as a `Dataset`: torch data sets, tables, arrays, sets of the Hugging Face library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.data.arrays import Reading, Split, assemble
from raysim.data.dataset import Dataset
from raysim.data.decode import decoded
from raysim.data.errors import DataError
from raysim.data.sources.base import warn_of_left_out

if TYPE_CHECKING:
    import pyarrow

TESTS = ("test", "validation", "valid", "val")  # splits that are the test, the first one that there is
READ_TWICE = 64  # samples, to see whether they are random
WAYS = "pass (train, test), or raysim.as_dataset(data, test=0.2); test=0 takes all for training"


def as_dataset(data: Any, name: str = "data", **reading: Any) -> Dataset:
    """A `Dataset` of what you have, under a `name` for messages.

    `data` is split: (train, test), (train, validation, test), or a mapping of these names, such as a `DatasetDict`. Or it is
    one, and `test` says which share of it is drawn for the test, always the same. A part is a map-style torch data set of
    pairs (sample, label), such as a `TensorDataset`, a `Subset` or a list; a table of pandas, Arrow or polars; a `Dataset` of
    the Hugging Face library; or a pair of arrays (x, y). Validation samples beside a test are left out, with a warning:
    `data.client_val_frac` holds out those of each client. The further options are the fields of `Reading`. Raises
    `DataError`, which names the row.
    """
    if isinstance(data, Dataset):
        return data
    how = Reading(**reading)
    parts = _parts(name, data)
    if list(parts) == [""] and how.test is None:
        raise DataError(f"{name}: which samples are for the test? Give a split: {WAYS}")
    if "train" in parts and how.test is not None:
        raise DataError(f"{name}: is split already, so that test={how.test} cannot be; leave it out")
    everywhere = isinstance(how.client, str) or callable(how.client)
    clients = how.client if isinstance(how.client, tuple) else (how.client, how.client if everywhere else None)
    if isinstance(data, tuple) and len(data) == len(clients) == 3:
        clients = clients[::2]  # without those of the validation
    if len(clients) > 2:
        raise DataError(f"{name}: client is a tuple of {len(clients)}; it must be that of train and that of test")
    splits = [
        _split(name, split, part, how, client)
        for (split, part), client in zip(parts.items(), (*clients, None), strict=False)
    ]
    return assemble(name, name, splits, how)


def _parts(name: str, data: Any) -> dict[str, Any]:
    """What is given for `train` and perhaps `test`; under an empty name, what is not split."""
    if isinstance(data, tuple):
        if _is_pair(data):
            return {"": data}
        if len(data) not in (1, 2, 3):
            raise DataError(f"{name}: is a tuple of {len(data)}; it must be (train, test) or (train, validation, test)")
        names = ("train", "validation", "test") if len(data) == 3 else ("train", "test")
        return _parts(name, dict(zip(names, data, strict=False)))
    if not isinstance(data, Mapping):
        return {"": data}
    if "x_train" in data:
        pairs = [split for split in ("train", *TESTS) if f"x_{split}" in data and f"y_{split}" in data]
        return _parts(name, {split: (data[f"x_{split}"], data[f"y_{split}"]) for split in pairs})
    if "train" not in data:
        raise DataError(f"{name}: has {', '.join(map(str, data)) or 'nothing'}; it needs train, and test")
    test = next((split for split in TESTS if split in data), None)
    warn_of_left_out(name, [str(split) for split in data if split not in ("train", test)], test)
    return {"train": data["train"]} | ({} if test is None else {"test": data[test]})


def _is_pair(part: Any) -> bool:
    """Whether it is (x, y), two arrays; x may be a table."""
    arrays = isinstance(part, tuple) and len(part) == 2 and all(hasattr(one, "__array__") for one in part)
    return arrays and not hasattr(part[1], "columns")


def _split(name: str, split: str, part: Any, how: Reading, client: Any) -> Split:
    if _is_pair(part):
        found = Split(split, _array(part[0]), _array(part[1]))
        if callable(client):
            client = [client(sample) for sample in zip(found.x, found.y, strict=True)]
    elif (table := _table(part)) is not None:
        return _of_table(name, split, table, how, client, _class_names(part, how.label))
    elif hasattr(part, "__len__") and hasattr(part, "__getitem__"):
        found, client = _of_samples(name, split, part, how, client)
    else:
        kind = type(part).__name__
        way = "pass its .dataset" if hasattr(part, "dataset") else "it needs a length, and samples by their number"
        raise DataError(f"{name}: a {kind} cannot be read; {way}")
    if isinstance(client, str):
        raise DataError(
            f"{name}: has no column {client!r}: it is no table. Give the clients as an array, or a function"
        )
    names = getattr(part, "classes", None) or getattr(getattr(part, "dataset", None), "classes", None)  # of a Subset
    classes = [str(name) for name in names] if isinstance(names, list | tuple) else None
    return Split(split, found.x, found.y, None if client is None else np.asarray(client), classes)


def _array(value: Any) -> np.ndarray:
    """Of a tensor, array, number or word. Raises TypeError for what numbers would be lost of."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value  # which NumPy does not have
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "UT" else array


# ---- map-style data sets


def _of_samples(name: str, split: str, samples: Any, how: Reading, client: Any) -> tuple[Split, Any]:
    """The samples, and the clients that a function gives them."""
    place = f"{name}: {split or 'the'}{'ing' * (split == 'train')} sample"
    n = len(samples)
    again = set(np.linspace(0, n - 1, READ_TWICE).astype(int).tolist()) if n else set()
    x: list[np.ndarray] = []
    y: list[np.ndarray] = []
    clients = []
    for i in range(n):
        sample = samples[i]
        x.append(_of_sample(f"{place} {i}", sample, 0, how))
        y.append(_of_sample(f"{place} {i}", sample, 1, how))
        if callable(client):
            clients.append(client(sample))
        if i in again and not _same(x[i], _of_sample(f"{place} {i}", samples[i], 0, how)):
            raise DataError(
                f"{place} {i} differs when it is read again: it is drawn at random, and raysim reads it once, before the first "
                "round. Take the random transform out of the data set; data.augment has some that are drawn in every epoch"
            )
        for part, first in ((x[i], x[0]), (y[i], y[0])):
            if part.shape != first.shape or part.dtype.kind != first.dtype.kind:
                raise DataError(
                    f"{place} {i} is {part.dtype} {part.shape}, but the first one is {first.dtype} {first.shape}"
                )
    if not n:
        raise DataError(f"{name}: there is no sample")
    return Split(split, np.stack(x), np.stack(y)), clients if callable(client) else client


def _of_sample(place: str, sample: Any, part: int, how: Reading) -> np.ndarray:
    """The sample itself (part 0) or its label (1), as a copy."""
    if not isinstance(sample, tuple | list) or len(sample) < 2:
        raise DataError(f"{place} is a {type(sample).__name__}; it must be a pair of a tensor and a label")
    value = sample[part]
    if hasattr(value, "getbands"):  # an image of Pillow
        return decoded(place, value.copy, how.mode, how.resize)
    try:
        array = _array(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{place} is no pair of a tensor and a label: {error}") from error
    word = array.dtype == object and array.ndim == 0 and isinstance(array.item(), str)
    if array.dtype.kind not in "biuf" and not word:
        raise DataError(f"{place} holds {array.dtype}, a {type(value).__name__}; it must hold real numbers")
    return array.copy()


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


# ---- tables


def _table(part: Any) -> pyarrow.Table | None:
    """An Arrow table of what is one; None for what is none."""
    if hasattr(part, "with_format") and hasattr(part, "features"):  # of the Hugging Face library
        if not hasattr(part, "__len__"):
            raise DataError(f"a {type(part).__name__} is read once and in order; load it without streaming")
        if part.format["type"] == "custom":
            raise DataError(
                "with_transform and set_transform do not change the table, which is read; use map in their place"
            )
        return part.with_format("arrow")[:]
    if not hasattr(part, "__arrow_c_stream__"):
        return None
    import pyarrow

    # pandas' index is no column
    return pyarrow.table(part.reset_index(drop=True) if hasattr(part, "reset_index") else part)


def _class_names(part: Any, label: Any) -> Sequence[str] | None:
    """Names that the Hugging Face library knows."""
    features = getattr(part, "features", None)
    return (
        getattr(features.get(label), "names", None) if isinstance(features, dict) and isinstance(label, str) else None
    )


def of_table(name: str, split: str, table: pyarrow.Table, how: Reading) -> Split:
    """A split of a table's rows."""
    return _of_table(name, split, table, how, how.client, None)


def _of_table(
    name: str, split: str, table: pyarrow.Table, how: Reading, client: Any, classes: Sequence[str] | None
) -> Split:  # fmt: skip
    place = f"{name} {split}".strip()
    client = "client" if client is None and "client" in table.column_names else client
    labels = [how.label] if isinstance(how.label, str) else [*how.label]
    owner = [client] if isinstance(client, str) else []
    columns = {column: _column(place, table, column) for column in (*labels, *owner)}
    y = columns[labels[0]] if isinstance(how.label, str) else np.stack([columns[column] for column in labels], axis=1)
    if callable(client):
        client = [client(row) for row in table.to_pylist()]
    clients = columns[client] if isinstance(client, str) else None if client is None else np.asarray(client)
    left = [column for column in table.column_names if column not in columns]
    single = next((column for column in ("image", "img", "text") if column in left), None)
    features = [single] if single and how.features is None else left if how.features is None else [*how.features]
    if not features:
        raise DataError(f"{place}: has the columns {', '.join(table.column_names)}, and none for the samples")
    parts = [_column(place, table, column) for column in features]
    if len(parts) == 1 and (parts[0].dtype == object or parts[0].ndim > 1):
        return Split(split, parts[0], y, clients, classes, features)
    for column, part in zip(features, parts, strict=True):
        if part.dtype == object or part.ndim > 1:
            raise DataError(
                f"{place}: column {column!r} holds no numbers; encode it as numbers, or name the columns of the samples "
                "in features"
            )
    return Split(split, np.stack([part.astype(np.float64) for part in parts], axis=1), y, clients, classes, features)


def _column(place: str, table: pyarrow.Table, column: str) -> np.ndarray:
    """[n, ...] numbers; texts, or encoded images, as objects [n]. Raises DataError naming the row of what is missing."""
    from pyarrow import types

    from raysim.data.sources.tables import complete

    if column not in table.column_names:
        raise DataError(
            f"{place}: has no column {column!r} (it has {', '.join(table.column_names)}); name the right one"
        )
    values = complete(place, column, table[column])
    kind = values.type
    if types.is_dictionary(kind):
        values, kind = values.cast(kind.value_type), kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return np.array(values.to_pylist(), object)
    if types.is_binary(kind) or types.is_large_binary(kind):
        return np.array(values.to_pylist(), object)
    if types.is_nested(kind):
        try:
            array = np.array(values.to_pylist())
        except ValueError as error:
            raise DataError(f"{place}: the rows of column {column!r} are of unequal sizes; pad or cut them") from error
        if array.dtype.kind in "iuf":
            return array
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        numbers: np.ndarray = values.to_numpy()
        return numbers
    raise DataError(
        f"{place}: column {column!r} holds {kind}; make numbers or words of it, or leave it out by features"
    )
