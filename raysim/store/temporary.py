"""Temporary folders that each belong to one process. Those of processes that were killed are found by their free locks."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TextIO


def own(folder: Path) -> TextIO:
    """Let this process own the folder until it closes the file that this returns, or dies."""
    lock = open(folder / "new", "x")  # noqa: SIM115  # the caller closes it
    with suppress(OSError):  # a file system without locks: a folder without one is never removed
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / "new", folder / "lock")  # only now can others find it
    return lock


def owned(parent: Path, prefix: str) -> list[Path]:
    """The folders of this user's living processes. Those of dead ones are removed."""
    living = []
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # gone meanwhile, or without a lock
            if folder.lstat().st_uid == os.geteuid():  # root could open all
                if _is_held(folder / "lock"):
                    living.append(folder)
                else:
                    shutil.rmtree(folder, ignore_errors=True)
    return living


def _is_held(path: Path) -> bool:
    with open(path, "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
