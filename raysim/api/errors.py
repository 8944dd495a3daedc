"""Errors as people read them."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from raysim.printable import printable


def faults_of(error: Exception) -> Sequence[str] | None:
    """An error of our own, or of files and networks, as sentences; None for any other, which is a bug."""
    ours = type(error).__module__.startswith("raysim.")
    if not ours and (isinstance(error, MemoryError) or _torch_lacks_memory(error)):
        return (f"raysim: there is not enough memory: {error}" if str(error) else "raysim: there is not enough memory",)
    if not (isinstance(error, OSError) or ours):
        return None
    from raysim.config import ConfigError

    if isinstance(error, ConfigError):
        return error.faults
    sentence = _of_file(error) if isinstance(error, OSError) else error
    return (f"raysim: {sentence}", *getattr(error, "__notes__", ()))


def _of_file(error: OSError) -> object:
    """Where the system refuses a file, a sentence on the one that is meant, and not on what raysim makes on the way to it."""
    if error.errno is None or not isinstance(error.filename, str):
        return error
    path = meant = Path(error.filename)
    if path.name == ".lock":
        meant = path.parent
    elif path.name.startswith(".") and path.suffix == ".tmp":
        meant = path.with_name(path.stem[1:])
    written = meant != path or error.errno in (errno.EROFS, errno.ENOSPC)  # else it may as well have been read
    return f"{meant}{' cannot be written' if written else ''}: {error.strerror}."


def shown(fault: str) -> str:
    """A sentence for a terminal. A name in it cannot pass for another sentence: lines that follow the first are indented."""
    return printable(fault, lines=True).replace("\n", "\n  ")


def _torch_lacks_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:  # whose import takes seconds
        return False
    from raysim.core.failures import out_of_memory

    return out_of_memory(error)


@contextmanager
def reported() -> Iterator[None]:
    """Print an error of our own, or of files and networks, as sentences, and exit; a bug keeps its traceback."""
    try:
        yield
    except BrokenPipeError:  # the reader of our lines, such as `head`, has left: the command line ends quietly
        raise
    except Exception as error:
        if (faults := faults_of(error)) is None:
            raise
        from raysim.config import ConfigError

        print("\n".join(map(shown, faults)), file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
