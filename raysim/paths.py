"""Names that become paths, and their order. Whoever makes a path of a name that he has not chosen himself makes it here."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

LONGEST = 255  # bytes in the name of a file, on every file system that we know of


class UnsafeName(ValueError):
    """A name that would lead out of its folder, or that no file can have."""


def below(folder: Path, name: str) -> Path:
    """The path `name`, which may have folders of its own, below `folder`.

    Nothing is looked up: symbolic links in the folder are the business of whoever reads it. Raises `UnsafeName`.
    """
    parts = name.split("/")
    if not name or PurePosixPath(name).is_absolute() or not {"", ".", ".."}.isdisjoint(parts):
        raise UnsafeName(f"{name[:80]!r} leads out of {folder}; a name has no '.', '..' or empty part")
    if not name.isprintable() or any(len(part.encode(errors="replace")) > LONGEST for part in parts):
        raise UnsafeName(
            f"{name[:80]!r} cannot be the name of a file: it is too long, or has characters that do not print"
        )
    return folder / name


def natural(name: str | Path) -> list[tuple[int, str]]:
    """A key that sorts `run-9` before `run-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(name))]
