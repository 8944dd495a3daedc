"""CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raysim.core.bounds import Count, Fraction
from raysim.data.arrays import Reading, assemble
from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.given import of_table
from raysim.data.sources.base import FileFacts, Source, files_below, located
from raysim.data.text import VocabularySize

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class Csv(Source):
    """CSV file with a header: a column of labels, and columns of numbers or one of texts; perhaps one of natural clients."""

    path: str
    """The file."""
    test: str | None = None
    """Another file, with the test samples; null: `test_frac` draws them."""
    test_frac: Fraction = 0.0
    """Share of the samples that is drawn for the test, always the same."""
    label: str | tuple[str, ...] = "label"
    """Column of the classes, numbers from 0 on or words; or the columns of the targets."""
    features: tuple[str, ...] | None = None
    """Columns of the samples; null: `text` where there is one, else all columns that are left."""
    client: str | None = None
    """Column of the natural clients, numbers or words; null: `client`, where there is one."""
    task: Literal["classification", "multilabel", "regression"] | None = None
    """What is learned; null: classification where labels are whole numbers or words, regression where they are others."""
    classes: Count | None = None
    """Number of classes; needed where a class has no training row."""
    delimiter: str = ","
    """What stands between two values."""
    length: Count = 200
    """Tokens of a text; longer texts are cut, shorter ones padded."""
    max_vocab: VocabularySize | None = 32_000
    """Largest number of tokens, with the 3 special ones; null keeps every word."""

    def __post_init__(self) -> None:
        if self.test is not None and self.test_frac:
            raise DataError(f"csv: test_frac is {self.test_frac}, but test names a file; leave one of both out")
        if len(self.delimiter) != 1:
            raise DataError(f"csv: delimiter is {self.delimiter!r}; it must be one character")

    def _files(self, root: Path | None) -> list[Path]:
        return [located(path, root) for path in (self.path, self.test) if path is not None]

    def check(self, root: Path | None) -> str | None:
        missing = [file for file in self._files(root) if not file.is_file()]
        return f"csv: the file {missing[0]} is missing; put it there or correct the path." if missing else None

    def files(self, root: Path | None) -> Sequence[FileFacts]:
        return [facts for file in self._files(root) for facts in files_below(file)]

    def load(self, root: Path | None) -> Dataset:
        if problem := self.check(root):
            raise DataError(problem)
        how = Reading(
            test=self.test_frac, label=self.label, features=self.features, client=self.client, task=self.task,
            classes=self.classes, length=self.length, max_vocab=self.max_vocab,
        )  # fmt: skip
        files = self._files(root)
        names = [""] if self.test is None else ["train", "test"]
        splits = [of_table(str(file), name, self._read(file), how) for file, name in zip(files, names, strict=True)]
        return assemble(str(files[0]), files[0].stem, splits, how)

    def _read(self, file: Path) -> pyarrow.Table:
        import pyarrow
        from pyarrow.csv import ConvertOptions, ParseOptions, read_csv

        try:
            table = read_csv(
                file,
                parse_options=ParseOptions(delimiter=self.delimiter),
                convert_options=ConvertOptions(strings_can_be_null=True),
            )
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: not a readable CSV file ({error}); write it again") from error
        if twice := [name for name in table.column_names if table.column_names.count(name) > 1]:
            raise DataError(f"{file}: has the column {twice[0]!r} twice; rename one")
        return table
