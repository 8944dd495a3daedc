"""Whole files: each appears complete or not at all, also after a crash or a power cut."""

from __future__ import annotations

import ctypes
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class FolderGone(OSError):
    """A folder was removed while files were written into it. The message is a sentence that names it."""

    @classmethod
    def at(cls, folder: Path) -> FolderGone:
        return cls(f"{folder} is gone: it was removed or moved while files were written into it.")


class Foreign(OSError):
    """A link, a pipe or the like lies where raysim has a file or a folder of its own. The message is a sentence."""

    @classmethod
    def at(cls, path: Path, kind: str) -> Foreign:
        return cls(f"{path} is no regular {kind}: raysim writes to no other. Remove it, and start again.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path. At the end that file is on disk and renamed to `path`; after an error nothing changes.

    Raises `FolderGone` where the folder is not there: what was written into it before would be missing in a new one.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # hidden: no reader's pattern matches it
    with undone_by_an_error(temporary, path):
        remove(temporary)  # what a crash has left, or a link that leads elsewhere
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    _sync(path.parent)  # or a power cut may undo the rename


@contextmanager
def creating(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which must not exist. At the end its content is on disk; after an error it is not there.

    A crash may leave a part of it: it counts when a file that is written later by `replacing`, in the same folder, names
    it. Raises as `replacing`.
    """
    with undone_by_an_error(path, path), open(path, "xb", buffering=1 << 20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def begin_sync(file: BinaryIO, start: int) -> None:
    """Let the disk begin with what was written from `start` on, so that there is less to wait for at the end. Only Linux
    does."""
    file.flush()
    if sys.platform == "linux":
        SYNC_FILE_RANGE_WRITE = 2
        begin, size = ctypes.c_int64(start), ctypes.c_int64(0)  # 0: to the end
        ctypes.CDLL(None).sync_file_range(file.fileno(), begin, size, SYNC_FILE_RANGE_WRITE)


@contextmanager
def undone_by_an_error(written: Path, path: Path) -> Iterator[None]:
    """After an error remove the file that was `written`, and raise one that names the `path` it was to have."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, FileExistsError | Foreign):
            raise
        written.unlink(missing_ok=True)
        if isinstance(error, Exception) and not path.parent.is_dir():
            raise FolderGone.at(path.parent) from None
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error  # as from a full disk: where
        raise


def subfolder(path: Path) -> Path:
    """Make the folder `path`, if need be, inside one that is there. Raises `FolderGone`, and as `own_folder`."""
    try:
        path.mkdir()
    except FileExistsError:
        own_folder(path)
    except FileNotFoundError:
        raise FolderGone.at(path.parent) from None
    return path


def own_folder(path: Path) -> bool:
    """Whether there is a folder `path`. Raises `Foreign` for anything else there, such as a link to a folder."""
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            raise Foreign.at(path, "folder")
    except FileNotFoundError:
        return False
    return True


def remove(path: Path) -> None:
    """Remove a file of raysim's, if it is there; of a link only the link. Raises `Foreign` for a folder."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        if path.is_dir():
            raise Foreign.at(path, "file") from None
        raise


def open_to_append(path: Path) -> int:
    """A descriptor of the file `path`, which is made if need be. Raises `Foreign` for a link, a pipe or the like."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise Foreign.at(path, "file") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Foreign.at(path, "file")
    return descriptor


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` as JSON, atomically. Tuples come back as lists and keys as strings. Raises TypeError for what JSON
    cannot hold."""
    text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | np.ndarray], about: Mapping[str, str] | None = None
) -> None:
    """Write tensors under their names as a safetensors file, atomically, with what is said `about` them. Raises as
    `as_safetensors`."""
    content = as_safetensors(tensors, about)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def as_safetensors(tensors: Mapping[str, Tensor | np.ndarray], about: Mapping[str, str] | None = None) -> bytes:
    """The content of a safetensors file.

    A tensor may be a view, share storage, and have any device or memory format: a contiguous copy of each is written.
    Raises ValueError for the one name that safetensors reserves.
    """
    import torch
    from safetensors.torch import save

    if "__metadata__" in tensors:  # safetensors would write a file that cannot be read
        raise ValueError("'__metadata__' cannot be the name of a tensor")
    copies = {
        name: torch.from_numpy(np.array(tensor, order="C"))
        if isinstance(tensor, np.ndarray)
        else tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    return save(copies, dict(about) if about else None)
