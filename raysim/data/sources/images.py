"""Folders of image files."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.decode import Mode, decode_images
from raysim.data.errors import DataError
from raysim.data.sources.base import PREPROCESSING, Normalise, Source, located

_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp"}


@dataclass(frozen=True)
class Images(Source):
    """Folder of images, train/CLASS/ and test/CLASS/ (or val/, valid/), as CINIC-10 and Tiny-ImageNet come."""

    path: str
    """Folder that holds train/ and, optionally, test/, val/ or valid/."""
    normalise: Normalise = "half"
    """Range of the pixels as the model sees them: half is [-1, 1], unit is [0, 1]."""
    mode: Mode = "RGB"
    """Pillow mode that every image is converted to, as the papers' codes do: Tiny-ImageNet mixes grey and colour."""

    def check(self, root: Path | None) -> str | None:
        folder = located(self.path, root)
        if not (folder / "train").is_dir():
            return f"images: the folder {folder / 'train'} is missing; it must hold one folder of images a class."
        return None

    def load(self, root: Path | None) -> Dataset:
        if problem := self.check(root):
            raise DataError(problem)
        folder = located(self.path, root)
        classes = tuple(sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir()))
        if not classes:
            raise DataError(f"{folder / 'train'}: holds no class folders; give each class a folder of images")
        train = _class_folders(folder / "train", classes)
        test = self._test_files(folder, classes)
        files = train + test
        x = decode_images(
            [[(str(file), file) for file, _ in files[i : i + 4096]] for i in range(0, len(files), 4096)],
            len(files),
            self.mode,
        )
        y = np.array([label for _, label in files], np.int64)
        return Dataset(folder.resolve().name, x, y, len(train), classes, **PREPROCESSING[self.normalise])

    @staticmethod
    def _test_files(folder: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
        for split in (folder / "test", folder / "val", folder / "valid"):
            if (split / "val_annotations.txt").is_file():
                return _annotated_files(split, classes)
            if any((split / name).is_dir() for name in classes):  # Tiny-ImageNet's own test/ is unlabelled
                return _class_folders(split, classes)
        return []


def _class_folders(split: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """(file, label) of the images below each class folder of `split`, in a fixed order."""
    unknown = sorted(entry.name for entry in split.iterdir() if entry.is_dir() and entry.name not in classes)
    if unknown:
        raise DataError(f"{split / unknown[0]}: not one of the training classes; remove it or add training images")
    files = []
    for label, name in enumerate(classes):
        found = sorted(file for file in (split / name).rglob("*") if file.suffix.lower() in _IMAGE_SUFFIXES)
        if not found and (split / name).is_dir():
            raise DataError(f"{split / name}: holds no images; fill or remove the folder")
        files += [(file, label) for file in found]
    return files


def _annotated_files(split: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """(file, label) by Tiny-ImageNet's val_annotations.txt: lines of file name, class and more, tab-separated."""
    annotations = split / "val_annotations.txt"
    files = []
    for row, line in enumerate(annotations.read_text().splitlines()):
        name, *rest = line.split("\t")
        if not rest or rest[0] not in classes:
            raise DataError(f"{annotations}: row {row} ({line!r}) names no training class; correct or remove it")
        if not (split / "images" / name).is_file():
            raise DataError(
                f"{annotations}: row {row} names {name}, which is not in {split / 'images'}; add or remove it"
            )
        files.append((split / "images" / name, classes.index(rest[0])))
    return files
