"""Names that become paths, and their order; paths that stay where they are, and paths in commands. Code that makes a path of a
name it has not chosen itself makes it here."""

from __future__ import annotations

import hashlib
import re
import shlex
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import cast

LONGEST = 255  # bytes in the name of a file, on every file system that we know of


class Anchored:
    """An attribute that is a path. What it was set to counts from the working folder of that moment: once that is another, a
    relative path is an absolute one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}_"

    def __set__(self, holder: object, path: str | Path) -> None:
        setattr(holder, self._name, (Path(path), Path(path).absolute()))

    def __get__(self, holder: object, owner: type) -> Path:
        given, absolute = getattr(holder, self._name)
        with suppress(OSError):  # the working folder is gone
            if given.absolute() == absolute:
                return cast(Path, given)
        return cast(Path, absolute)


class UnsafeName(ValueError):
    """A name that would lead out of its folder, or that no file can have."""


def below(folder: Path, name: str) -> Path:
    """The path `name`, which may have folders of its own, below `folder`.

    Nothing is looked up: symbolic links in the folder are the reader's business. Raises `UnsafeName`.
    """
    parts = name.split("/")
    if not name or PurePosixPath(name).is_absolute() or not {"", ".", ".."}.isdisjoint(parts):
        raise UnsafeName(f"{name[:80]!r} leads out of {folder}; a name has no '.', '..' or empty part")
    if not name.isprintable() or any(len(part.encode(errors="replace")) > LONGEST for part in parts):
        raise UnsafeName(
            f"{name[:80]!r} cannot be the name of a file: it is too long, or has characters that do not print"
        )
    return folder / name


def slug(words: str) -> str:
    """A part of a file's name: words with dashes between them. What has to be cut ends with `digits`."""
    plain = re.sub(r"[^\w.-]+", "-", words).strip("-")
    return plain if 0 < len(plain) <= 40 else f"{plain[:40]}-{digits(words)}".strip("-")


def digits(words: str) -> str:
    """Six digits that distinguish equal names."""
    return hashlib.sha256(words.encode()).hexdigest()[:6]


def command(*words: str | Path) -> str:
    """A command of raysim for a sentence, in backquotes: a shell reads each of the `words` as it is."""
    return f"`{shlex.join(['raysim', *map(str, words)])}`"


def natural(name: str | Path) -> list[tuple[int, str]]:
    """A key that sorts `run-9` before `run-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(name))]
