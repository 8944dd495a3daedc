"""Words to token ids, as the text experiments of FedALA (Zhang et al., 2023) and FedLWS prepare AG News.

A text becomes the classifier token, then its words, padded with 0 or cut to a fixed length.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from raysim.core.bounds import MOST

VocabularySize = Annotated[int, Ge(4), Le(MOST)]  # with the three special tokens
PAD, UNKNOWN, CLASSIFIER = 0, 1, 2  # the three ids that no word gets
SPECIAL = ("<pad>", "<unk>", "<cls>")  # their names in `Dataset.words`

_SPACING = str.maketrans({'"': "", ";": " ", ":": " ", **{mark: f" {mark} " for mark in "'.,()!?"}})


def tokenize(text: str) -> list[str]:
    """Words of a text by the "basic English" rule of torchtext, which the papers' codes use.

    The exact rule: lower-case; drop double quotes; ``<br />``, ``;`` and ``:`` become a space; each of
    ``' . , ( ) ! ?`` becomes a word of its own; split at white space.
    """
    return text.lower().replace("<br />", " ").translate(_SPACING).split()


def build_vocabulary(texts: Iterable[str], max_vocab: int | None = None) -> dict[str, int]:
    """Word -> id, from 3 on, the most frequent word first and equally frequent words in alphabetical order.

    `max_vocab` bounds the number of ids *including* the three special ones, so it is the height of an embedding table.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenize(text))
    words = sorted(counts, key=lambda word: (-counts[word], word))
    if max_vocab is not None:
        words = words[: max_vocab - 3]
    return {word: token for token, word in enumerate(words, start=3)}


def encode(texts: Sequence[str], vocabulary: dict[str, int], length: int) -> np.ndarray:
    """Token ids [n, length] int32 of n texts."""
    tokens = np.full((len(texts), length), PAD, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        words = tokenize(text)[: length - 1]
        row[0] = CLASSIFIER
        row[1 : 1 + len(words)] = [vocabulary.get(word, UNKNOWN) for word in words]
    return tokens


def facts_of(vocabulary: dict[str, int]) -> dict[str, Any]:
    """What a data set has of its `vocabulary`: the number of ids, and what each stands for."""
    words = (*SPECIAL, *vocabulary)
    return {"vocab": len(words), "words": words}


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """Texts to token ids, see `encode`."""

    vocabulary: dict[str, int]
    length: int
    """Tokens of a text."""
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int32)

    @property
    def shape(self) -> tuple[int]:
        """Of one text."""
        return (self.length,)

    def __call__(self, batch: Sequence[tuple[str, str]], pool: Any = None) -> np.ndarray:
        """Token ids [b, length] int32. It holds the interpreter lock, so that threads would not help."""
        return encode([text for _, text in batch], self.vocabulary, self.length)
