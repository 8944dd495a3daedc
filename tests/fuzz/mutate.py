"""Damage with a fixed seed: bytes of a file, or keys and values of a document; and what makes a case cheap."""

from __future__ import annotations

import copy
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

CASES = 2000  # of each reader
SEED = os.environ.get("RAYSIM_FUZZ_SEED", "")  # other damage than the suite's: see `benchmarks/hostile.py`
Result = TypeVar("Result")

STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 10**30, 1e300, float("nan"), float("inf"), "", "..", "../../x", "/etc/passwd", "a\0b",
    "\u202e", "$\\frac$", "<b>", "x" * 5000, [], {}, [[]], {"": None}, [None, 1, "a"],
)  # fmt: skip


@contextmanager
def in_memory() -> Iterator[Path]:
    """A new folder for files that are written thousands of times, where the machine has one in memory."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def remembered(function: Callable[[str], Result]) -> Callable[[str], Result]:
    """`function` of a text, whose last result, or error, is kept for the readers that follow."""
    known: dict[str, tuple[Any, Exception | None]] = {}

    def call(text: str) -> Result:
        if text not in known:
            known.clear()
            try:
                known[text] = function(text), None
            except Exception as error:
                known[text] = None, error
        value, error = known[text]
        if error:
            raise error.with_traceback(None)
        return copy.deepcopy(value)

    return call


def chance_of(test: int | str) -> random.Random:
    """What a test draws its damage from."""
    return random.Random(f"{SEED} {test}" if SEED else test)


def damaged(content: bytes, random: random.Random) -> bytes:
    """A few of: cut, flipped bits, bytes replaced, a piece doubled or moved, a large number put in."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5, 20))):
        at = random.randrange(len(data) + 1)
        size = random.choice((1, 2, 4, 16, 200))
        match random.randrange(6):
            case 0:
                data[at:] = b"" if random.random() < 0.3 else data[at:]
            case 1 if at < len(data):
                data[at] ^= 1 << random.randrange(8)
            case 2:
                data[at : at + size] = random.randbytes(size)
            case 3:
                data[at:at] = data[at : at + size]
            case 4:
                del data[at : at + size]
            case 5:
                data[at : at + 4] = random.choice((b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0" * 4, b"\xff\xff\xff\x7f"))
    return bytes(data)


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a document."""
    if path:
        yield path
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))
        else:
            yield (*path, key)


def altered(document: Any, random: random.Random) -> Any:
    """A document with one or two values removed, replaced or renamed."""
    document = copy.deepcopy(document)
    for _ in range(random.choice((1, 1, 2))):
        ways = [*places(document)]
        if not ways:
            return document
        *way, key = random.choice(ways)
        node = document
        for step in way:
            node = node[step]
        match random.randrange(4):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[random.choice(("", "..", "x", "1", "<b>"))] = node.pop(key)
            case _:
                node[key] = copy.deepcopy(random.choice(STRANGE))
    return document
