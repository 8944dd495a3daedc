"""Texts to be continued character by character."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge

from raysim.core.bounds import Count
from raysim.data.dataset import Dataset
from raysim.data.errors import DataError
from raysim.data.sources.base import Source, located


@dataclass(frozen=True)
class Characters(Source):
    """A text, for next-character prediction: by default sixteen sonnets, each a natural client (Shakespeare, 1609)."""

    path: str | None = None
    """A text file in UTF-8, in which blank lines separate the natural clients; null is the sonnets."""
    length: Count = 40
    """Characters of a sample. Samples do not overlap; a client's rest that fills none is left out."""
    test_every: Annotated[int, Ge(2)] = 5
    """Every so many samples of a client, one is for the test."""

    def check(self, root: Path | None) -> str | None:
        if self.path is None or located(self.path, root).is_file():
            return None
        return f"characters: the file {located(self.path, root)} is missing; put it there or correct the path."

    def load(self, root: Path | None) -> Dataset:
        if problem := self.check(root):
            raise DataError(problem)
        file = files("raysim.data.sources").joinpath("sonnets.txt") if self.path is None else located(self.path, root)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: not a readable text in UTF-8 ({error}); save it again") from error
        alphabet = sorted(set(text))
        number = {character: i for i, character in enumerate(alphabet)}
        windows: list[np.ndarray] = []
        client: list[int] = []
        for paragraph in filter(None, (part.strip("\n") for part in text.split("\n\n"))):
            tokens = np.array([number[character] for character in paragraph], np.int64)
            starts = range(0, len(tokens) - self.length, self.length)
            if starts:
                client += [client[-1] + 1 if client else 0] * len(starts)
            windows += [tokens[start : start + self.length + 1] for start in starts]
        if not windows:
            raise DataError(f"{file}: no paragraph has more than {self.length} characters; lower length")
        owner = np.array(client, np.int64)
        nth = np.arange(len(owner)) - np.searchsorted(owner, owner)  # position of each sample among its client's
        is_test = nth % self.test_every == self.test_every - 1
        order = np.argsort(is_test, kind="stable")
        tokens = np.stack(windows)[order]
        return Dataset(
            "characters", np.ascontiguousarray(tokens[:, :-1], np.int32), np.ascontiguousarray(tokens[:, 1:]),
            int((~is_test).sum()), tuple(alphabet), owner[order], vocab=len(alphabet), task="next_token",
            words=tuple(alphabet),
        )  # fmt: skip
