"""Encoded images to uint8 arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Gt, Le

from raysim.data.errors import DataError

if TYPE_CHECKING:
    import PIL.Image

Mode = Literal["L", "RGB"]  # Pillow's names: grey, colour
Side = Annotated[int, Gt(0), Le(4096)]  # pixels
Size = tuple[Side, Side]  # height, width
Source = bytes | Path | Callable[[], "PIL.Image.Image"]  # an encoded image, its file, or what reads it
MOST_PIXELS = 1 << 24  # of one image, 4096×4096
FORMATS = ("PNG", "JPEG", "BMP", "PPM", "WEBP", "GIF", "TIFF")  # Pillow runs another program for some of the others


@dataclass(frozen=True)
class ImageDecoder:
    """Images that all become as the first one is, or as `mode` and `resize` say."""

    first: str
    """How an error names the first image."""
    shape: tuple[int, int, int]
    """[C, H, W] of each image."""
    mode: Mode | None
    """What every image is converted to; None refuses a mix of grey and colour."""
    resize: Size | None
    """Height and width that every image is scaled to; None refuses unequal sizes."""
    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)

    @classmethod
    def like(cls, place: str, source: Source, mode: Mode | None, resize: Size | None) -> ImageDecoder:
        """For images like this one. Raises DataError where it cannot be read."""
        channels, height, width = decoded(place, source, mode, resize).shape
        return cls(place, (channels, height, width), mode, resize)

    def __call__(self, batch: Sequence[tuple[str, Any]], pool: ThreadPoolExecutor | None = None) -> np.ndarray:
        """Pixels [b, C, H, W]. Raises DataError for an image that cannot be read, is neither grey nor RGB, or differs in
        size or mode from the first."""
        places, sources = zip(*batch, strict=True)
        apply = pool.map if pool else map
        out = np.empty((len(batch), *self.shape), np.uint8)
        for row, image in enumerate(apply(decoded, places, sources, repeat(self.mode), repeat(self.resize))):
            if image.shape != self.shape:
                raise DataError(
                    f"{places[row]}: the image is {_size(image.shape)}, but {self.first} is {_size(self.shape)}; give all "
                    "images one size or set resize: [HEIGHT, WIDTH], and set mode to L or RGB where grey and colour are mixed"
                )
            out[row] = image
        return out


def decoded(place: str, source: Source, mode: Mode | None, resize: Size | None) -> np.ndarray:
    """Pixels [C, H, W] uint8 of one image. Bytes are turned as their EXIF data say, a file is not, as in torchvision's folders
    of images."""
    from PIL import Image, ImageOps

    try:
        with source() if callable(source) else _opened(source) as encoded:
            width, height = encoded.size
            if width * height > MOST_PIXELS:  # a file of a few bytes may say that it holds gigabytes
                raise ValueError(f"it has {width}×{height} pixels, more than {MOST_PIXELS:,}")
            if mode and encoded.mode.startswith(("I", "F")):  # Pillow would make 255 of all that is more
                raise ValueError(f"its mode is {encoded.mode}, of more than 8 bits a pixel; scale it to 8 bits")
            if isinstance(source, bytes):  # of a table: upright, as the Hugging Face library decodes it
                ImageOps.exif_transpose(encoded, in_place=True)
            image = encoded.convert(mode) if mode else encoded
            if resize and image.mode in ("L", "RGB"):
                image = image.resize(resize[::-1], Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    except Exception as error:  # the decoders raise OSError, SyntaxError, ValueError, struct.error, ... on broken bytes
        raise DataError(f"{place}: not a readable image ({error}); repair or remove it") from error
    if image.mode not in ("L", "RGB"):
        raise DataError(f"{place}: the image has mode {image.mode}; convert it to L or RGB, or set mode to one of them")
    return pixels[None] if image.mode == "L" else pixels.transpose(2, 0, 1)


def _opened(source: bytes | Path) -> PIL.Image.Image:
    import PIL.Image

    return PIL.Image.open(source if isinstance(source, Path) else BytesIO(source), formats=FORMATS)


def _size(shape: tuple[int, ...]) -> str:
    channels, height, width = shape
    return f"{width}×{height} {'grey' if channels == 1 else 'RGB'}"
