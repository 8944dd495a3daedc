"""CIFAR's archives are pickles, and a pickle may run any code. This reader rebuilds containers and arrays by itself: no
class or function that a file names is looked up, and its opcodes are counted before any is carried out."""

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from raysim.data.errors import DataError

MOST_BYTES = 1 << 30
_TUPLES = 1000  # CIFAR has four an array; Python's own hash of ever deeper ones would overflow the stack
_OPCODES = """
PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 BINFLOAT
STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINBYTES8 BINUNICODE8
EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE BUILD
"""


class _StandIn:
    """What a file may name. The classes themselves are not its to change."""

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("only arrays and their types have a state")


class _DType(_StandIn):
    """Stands for `numpy.dtype`."""

    def __init__(self, code: str, *_: Any):
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[3:5] != (None, None):
            raise pickle.UnpicklingError("only plain numbers are allowed in arrays")
        self.order = state[1]

    def dtype(self) -> np.dtype[Any]:
        if self.code not in ("b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"):
            raise pickle.UnpicklingError(f"an array of {self.code!r} is not allowed")
        return np.dtype(self.code).newbyteorder(getattr(self, "order", "|"))


class _Array(_StandIn):
    """Stands for an array until its content is there."""

    value: np.ndarray | None = None

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, content = state
        content = content.encode("latin1") if isinstance(content, str) else content  # as Python 2 wrote it
        if not isinstance(dtype, _DType) or not isinstance(content, bytes):
            raise pickle.UnpicklingError("an array must have a type and bytes")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise pickle.UnpicklingError("an array's shape must be of whole numbers")
        kind = dtype.dtype()
        if math.prod(shape) * kind.itemsize != len(content):
            raise pickle.UnpicklingError("an array has not as many bytes as its shape needs")
        self.value = np.frombuffer(content, kind).reshape(shape, order="F" if fortran else "C")


class _NDArray(_StandIn):
    """Stands for `numpy.ndarray`, which is named as what `_reconstruct` shall make, and never called."""

    def __init__(self, *_: Any):
        raise pickle.UnpicklingError("an array must be written as numpy.ndarray.__reduce__ does")


class _Encoded(_StandIn):
    """Stands for `_codecs.encode`: how Python 3 spells bytes in an old pickle. No other codec is let in."""

    def __new__(cls, text: str, encoding: str) -> Any:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"codec {encoding!r} is not allowed")
        return text.encode("latin1")


_STAND_INS = {
    ("_codecs", "encode"): _Encoded,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _NDArray,
    ("numpy", "dtype"): _DType,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only NumPy arrays are allowed")


def _check_opcodes(content: bytes) -> None:
    """Refuse what no archive of arrays needs, and what would take more memory than the file."""
    allowed, tuples = frozenset(_OPCODES.split()), 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name not in allowed:
            raise pickle.UnpicklingError(f"it uses {opcode.name}, which arrays do not need")
        if "PUT" in opcode.name and int(argument or 0) > count:  # room is made for all numbers up to this one
            raise pickle.UnpicklingError("it numbers its parts with gaps")
        tuples += opcode.name.startswith("TUPLE")
        if tuples > _TUPLES:
            raise pickle.UnpicklingError(f"it holds more than {_TUPLES} tuples")


def read_arrays(file: Path) -> dict[str, Any]:
    """The dictionary of arrays, lists, strings and numbers that `file` holds; DataError for anything else."""
    if not file.is_file() or file.stat().st_size > MOST_BYTES:
        raise DataError(
            f"{file}: is missing, not a regular file, or larger than {MOST_BYTES >> 30} GiB; fetch it again"
        )
    try:
        encoded = file.read_bytes()
        _check_opcodes(encoded)
        content = _ArrayUnpickler(io.BytesIO(encoded), encoding="latin1").load()  # written by Python 2
    except Exception as error:  # broken bytes make the unpickler raise almost anything
        raise DataError(f"{file}: refused to unpickle ({error}); fetch the file again from its authors") from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: holds a {type(content).__name__}, not a dictionary; fetch it again from its authors")
    return {key: _finished(file, value) for key, value in content.items()}


def _finished(file: Path, value: Any) -> Any:
    """An array in the place of what stands for it."""
    if not isinstance(value, _Array):
        return value
    if value.value is None:
        raise DataError(f"{file}: holds an array without content; fetch it again from its authors")
    return value.value
