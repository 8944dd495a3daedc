"""Encoded images to one uint8 array."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np

from raysim.data.errors import DataError

Mode = Literal["L", "RGB"]  # Pillow's names: grey, colour
MOST_PIXELS = 1 << 24  # of one image, 4096×4096
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "WEBP", "GIF", "TIFF")  # Pillow runs another program for some of the others


def decode_images(
    batches: Iterable[Sequence[tuple[str, bytes | Path]]], count: int, mode: Mode | None = None
) -> np.ndarray:
    """Pixels [count, C, H, W] uint8 of `count` images that come in batches of (place, encoded bytes or file).

    `place` is how an error names the image. `mode` converts every image; None refuses a mix of grey and colour. Raises
    DataError for an image that cannot be read, is neither grey nor RGB, or differs in size or mode from the first.
    """
    pixels: np.ndarray | None = None
    first = ""
    row = 0
    with ThreadPoolExecutor() as pool:  # Pillow's decoders release the interpreter lock
        for batch in batches:
            places, sources = [place for place, _ in batch], [source for _, source in batch]
            for place, image in zip(places, pool.map(_decode, places, sources, repeat(mode)), strict=False):
                if pixels is None:
                    pixels, first = _room((count, *image.shape), place), place
                if image.shape != pixels.shape[1:]:
                    raise DataError(
                        f"{place}: the image is {_size(image.shape)}, but {first} is {_size(pixels.shape[1:])}; "
                        "give all images one size, and set mode to L or RGB where grey and colour are mixed"
                    )
                pixels[row] = image
                row += 1
    assert pixels is not None, "callers refuse splits without images"
    return pixels


def _room(shape: tuple[int, ...], place: str) -> np.ndarray:
    try:
        return np.empty(shape, np.uint8)
    except MemoryError:
        raise DataError(f"{place}: {shape[0]} images of this size need {math.prod(shape):,} bytes of memory") from None


def _decode(place: str, source: bytes | Path, mode: Mode | None) -> np.ndarray:
    from PIL import Image

    try:
        with Image.open(source if isinstance(source, Path) else BytesIO(source), formats=FORMATS) as encoded:
            width, height = encoded.size
            if width * height > MOST_PIXELS:  # a file of a few bytes may say that it holds gigabytes
                raise ValueError(f"it has {width}×{height} pixels, more than {MOST_PIXELS:,}")
            image = encoded.convert(mode) if mode else encoded
            pixels = np.asarray(image)
    except Exception as error:  # the decoders raise OSError, SyntaxError, ValueError, struct.error, ... on broken bytes
        raise DataError(f"{place}: not a readable image ({error}); repair or remove it") from error
    if image.mode not in ("L", "RGB"):
        raise DataError(f"{place}: the image has mode {image.mode}; convert it to L or RGB, or set mode to one of them")
    return pixels[None] if image.mode == "L" else pixels.transpose(2, 0, 1)


def _size(shape: tuple[int, ...]) -> str:
    channels, height, width = shape
    return f"{width}×{height} {'grey' if channels == 1 else 'RGB'}"
