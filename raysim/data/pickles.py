"""CIFAR's archives are pickles, and a pickle may run any code: this reader rebuilds arrays and containers only."""

import io
import pickle
from pathlib import Path
from typing import Any

from raysim.data.errors import DataError


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 spells bytes in an old pickle; no other codec is let in."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"codec {encoding!r} is not allowed")
    return text.encode("latin1")


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _latin1
        if (module, name) in {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
        }:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only NumPy arrays are allowed")


def read_arrays(file: Path) -> dict[str, Any]:
    """The dictionary of arrays, lists, strings and numbers that `file` holds; DataError for anything else."""
    try:
        content = _ArrayUnpickler(io.BytesIO(file.read_bytes()), encoding="latin1").load()  # written by Python 2
    except Exception as error:  # broken bytes make the unpickler raise almost anything
        raise DataError(f"{file}: refused to unpickle ({error}); fetch the file again from its authors") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: holds a {type(content).__name__}, not a dictionary; fetch it again from its authors")
    return content
