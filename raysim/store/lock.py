"""A lock on a file: it ends with the process that took it, and others see it without taking it."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raysim.store.atomic import open_to_append

FLOCK = struct.Struct("hhqqi4x")  # of 64-bit Linux: type, whence, start, length (0: to the end), process
WHOLE = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
FREE = FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)


def take(descriptor: int) -> None:
    """Lock the open file until it is closed. Raises BlockingIOError where another open file has the lock, and OSError
    on a file system without locks."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, WHOLE)


def release(descriptor: int) -> None:
    """Unlock the open file: forks of this process have it too, and would keep the lock."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FREE)


def is_held(path: Path) -> bool:
    """Whether an open file has the lock of `path`; False where that is unknown."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        found, *_ = FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, WHOLE))
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return bool(found != fcntl.F_UNLCK)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is here with this `path`, a folder or a file that is made if need be. On a file system without
    locks all go on."""
    descriptor = os.open(path, os.O_RDONLY) if path.is_dir() else open_to_append(path)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
