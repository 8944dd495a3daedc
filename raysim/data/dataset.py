"""The one data set type."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from raysim.data.encoded import Encoded
from raysim.data.errors import DataError

if TYPE_CHECKING:
    import torch

    from raysim.core.task import Task


class Stored(Protocol):
    """Samples [n, ...] as they are stored, wherever that is: an array, a file that is mapped, files that are read and
    decoded when rows are asked for. Code that uses samples asks for rows, and so need not know."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any) -> np.ndarray:
        """The samples of `rows`, int64 positions or a slice, in memory."""


def first_wrong(x: np.ndarray, vocab: int | None = None) -> tuple[int, str] | None:
    """The first row of `x` [n, ...] that no model can learn from, and what is wrong with it; None where all can be used."""
    step = max(1, (64 << 20) // max(1, x[:1].nbytes))  # rows at a time: bounds what the test itself takes
    for start in range(0, len(x) if vocab is not None or x.dtype.kind == "f" else 0, step):
        part = x[start : start + step].reshape(len(x[start : start + step]), -1)
        fits = np.isfinite(part) if vocab is None else (part >= 0) & (part < vocab)
        if not fits.all():
            row, column = np.argwhere(~fits)[0]
            if vocab is None:
                return start + int(row), "holds NaN, infinity or a number beyond float32's 3.4e38; repair the row"
            token = part[row, column]
            return start + int(row), f"holds token {token}, outside 0..{vocab - 1}; correct it, or set vocab higher"
    return None


@dataclass(frozen=True)
class FileHashes:
    """By what files are known again without being read."""

    sha256: str
    """Of their names and sizes, and of the labels in them."""
    times_sha256: str
    """Of their names, sizes and times."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples and what is known of them; they are never written to. Raises DataError if they do not fit."""

    name: str
    """Name that messages and tables show."""
    x: Stored
    """Samples: [n, C, H, W] uint8 images, [n, T] int32 tokens or [n, F] float32 features; training rows come first. A
    contiguous array, or what gives its rows."""
    y: np.ndarray
    """Labels, as the task has them: [n] int64 classes, [n, C] float32 of 0 and 1, [n, F] float32 targets or [n, T] int64
    tokens."""
    train_rows: int
    """Rows [0, train_rows) are the training split, the others the test split."""
    classes: tuple[str, ...]
    """Names of a model's outputs: of the classes, the labels, the targets or the tokens."""
    client: np.ndarray | None = None
    """[n] int64 natural client of each row, -1 where a row has none."""
    scale: float = 1.0
    """The model's input is (x / scale - mean) / std, per channel; tokens go in as they are."""
    mean: tuple[float, ...] = (0.0,)
    """See `scale`."""
    std: tuple[float, ...] = (1.0,)
    """See `scale`."""
    vocab: int | None = None
    """Number of token ids, for text."""
    task: "str | Task" = "classification"
    """What is learned: the name of a task, or one."""
    digest: str | None = None
    """What `sha256` returns, where it is known without reading all samples."""
    files: FileHashes | None = None
    """Of the files that the data were read from, where there are any."""
    words: tuple[str, ...] = ()
    """What each token id stands for, where raysim has numbered the words."""

    def __post_init__(self) -> None:
        n = len(self.x)
        if isinstance(self.x, np.ndarray):
            object.__setattr__(self, "x", self._checked(self.x))
        if self.y.dtype.kind in "iub" and self.y.dtype != np.int64:
            object.__setattr__(self, "y", self.y.astype(np.int64))  # which loses nothing, and losses need
        if self.y.dtype.kind not in "if":
            raise DataError(f"{self.name}: y is {self.y.dtype}; number the classes from 0, or pass float32 targets")
        if self.client is not None and self.client.dtype.kind not in "iu":
            raise DataError(f"{self.name}: client is {self.client.dtype}; number the clients from 0")
        if len(self.y) != n or (self.client is not None and self.client.shape != (n,)):
            raise DataError(f"{self.name}: {n} samples need {n} labels, and as many clients where there are any")
        if not 0 < self.train_rows <= n:
            raise DataError(
                f"{self.name}: {self.train_rows} training rows of {n}; at least one row must be for training"
            )
        if self.y.dtype.kind == "f":
            wrong = np.argwhere(~np.isfinite(self.y))
            valid = "finite numbers; repair the row"
        else:
            wrong = np.argwhere((self.y < 0) | (self.y >= self.outputs))
            valid = f"0..{self.outputs - 1}; number the classes from 0"
        if wrong.size:
            at = tuple(wrong[0])
            raise DataError(f"{self.name}: row {at[0]} has label {self.y[at]}, outside {valid}")

    def _checked(self, x: np.ndarray) -> np.ndarray:
        """Samples that models can learn from."""
        if not x.flags.c_contiguous:
            raise DataError(f"{self.name}: x is not C-contiguous; pass it through numpy.ascontiguousarray")
        if not (x.dtype.kind in "iu" if self.is_text else x.dtype.kind == "f" or x.dtype == np.uint8):
            kinds = "integers, the tokens" if self.is_text else "uint8 pixels, float32 features, or tokens with a vocab"
            raise DataError(f"{self.name}: x is {x.dtype}; it must be {kinds}")
        if x.dtype == np.uint8 and x.ndim == 4 and self.scale == 1 and self.std == (1.0,) and x.max(initial=0) > 1:
            raise DataError(f"{self.name}: x is uint8 up to {x.max()}, and scale is 1; set it, as to 255 for pixels")
        if x.dtype.kind == "f":
            with np.errstate(over="ignore"):
                x = x.astype(np.float32, copy=False)
        if wrong := first_wrong(x, self.vocab):
            raise DataError(f"{self.name}: {self.place(wrong[0])} {wrong[1]}")
        return x.astype(np.int32, copy=False) if self.is_text else x

    def place(self, row: int) -> str:
        """How an error names a row: by its position in its split."""
        return f"training row {row}" if row < self.train_rows else f"test row {row - self.train_rows}"

    def sha256(self) -> str:
        """Hash of all samples and labels; of samples that are never held whole, of the files that they are in."""
        return self.contents_sha256() if self.digest is None else self.digest

    def contents_sha256(self) -> str:
        """Hash of all samples and labels. Samples that are streamed are read for it, a part at a time."""
        digest = self.begin_digest()
        for part in self.x.parts() if isinstance(self.x, Encoded) else [self.x[:]]:
            digest.update(np.ascontiguousarray(part).data)
        digest.update(np.ascontiguousarray(self.y).data)
        return digest.hexdigest()

    def begin_digest(self) -> "hashlib._Hash":
        """The hash before the samples' bytes, and then the labels', are added to it."""
        return hashlib.sha256(repr((self.x.shape, self.x.dtype.str, self.train_rows)).encode())

    def form(self) -> dict[str, Any]:
        """What a program needs to know to use a model of these data, as JSON has it."""
        numbers = {"scale": self.scale, "mean": self.mean, "std": self.std}
        pixels = {} if self.is_text else {key: np.asarray(value, float).tolist() for key, value in numbers.items()}
        return {"shape": self.sample_shape, "classes": self.classes, **pixels} | (
            {"words": self.words} if self.words else {}
        )

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample as it is stored."""
        return self.x.shape[1:]

    @property
    def outputs(self) -> int:
        """How many outputs a model of these data has."""
        return len(self.classes)

    @property
    def has_classes(self) -> bool:
        """Whether every sample has one class, by which samples can be partitioned and counted."""
        return self.y.ndim == 1 and self.y.dtype.kind in "iu"

    @property
    def labels(self) -> np.ndarray:
        """[n] int64 class of every sample; all 0, a single class, where samples do not have one class each."""
        return self.y if self.has_classes else np.zeros(len(self.y), np.int64)

    @property
    def label_names(self) -> tuple[str, ...]:
        """[C] names of the classes in `labels`."""
        return self.classes if self.has_classes else ("all",)

    @property
    def num_classes(self) -> int:
        """How many classes `labels` has."""
        return len(self.label_names)

    @property
    def is_text(self) -> bool:
        """Whether samples are tokens."""
        return self.vocab is not None

    def transform(self, x: "torch.Tensor") -> "torch.Tensor":
        """Rows of `x` [B, ...], on any device, to the model's input: float32 of the same shape, or int64 tokens."""
        if self.is_text:
            return x.long()
        x = x / self.scale if self.scale != 1 else x.float()
        # In place, and in the order of torchvision's ToTensor and Normalize: the bits agree.
        for values, neutral, change in ((self.mean, 0, x.sub_), (self.std, 1, x.div_)):
            if len(values) == 1:
                if values[0] != neutral:
                    change(values[0])
            else:
                change(x.new_tensor(values).view((-1,) + (1,) * (x.dim() - 2)))
        return x
