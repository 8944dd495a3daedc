"""Folders of image files."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from raysim.data.dataset import Dataset
from raysim.data.decode import ImageDecoder, Mode
from raysim.data.encoded import Encoded, SingleFiles
from raysim.data.errors import DataError
from raysim.data.sources.base import PREPROCESSING, FileFacts, Pictures, facts, located, warn_of_left_out
from raysim.paths import UnsafeName, below

_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp"}
_TESTS = ("test", "val", "valid")
_Labelled = list[tuple[Path, int]]  # files and the numbers of their classes


@dataclass(frozen=True)
class Images(Pictures):
    """Folder of images, train/CLASS/ and test/CLASS/ (or val/, valid/), as CINIC-10 and Tiny-ImageNet come."""

    path: str
    """Folder that holds train/ and, optionally, test/, val/ or valid/. An image's EXIF orientation is ignored, as by torchvision's
    ImageFolder."""
    mode: Mode = field(default="RGB", kw_only=True)
    """Pillow mode that every image is converted to, as the papers' codes do: Tiny-ImageNet mixes grey and colour."""
    follow_links: bool = False
    """Whether symbolic links in the folder are followed, which may lead out of it."""

    def check(self, root: Path | None) -> str | None:
        folder = located(self.path, root)
        if not (folder / "train").is_dir():
            return f"images: the folder {folder / 'train'} is missing; it must hold one folder of images a class."
        return None

    def files(self, root: Path | None) -> Sequence[FileFacts]:
        folder, _, train, test = self._listed(root)
        notes = [note for split in _TESTS if (note := folder / split / "val_annotations.txt").is_file()]
        return [facts(file, folder) for file in (*notes, *(file for file, _ in train + test))]

    def open(self, root: Path | None) -> Dataset:
        folder, classes, train, test = self._listed(root)
        files = [(file.absolute(), label) for file, label in train + test]
        decode = ImageDecoder.like(str(files[0][0]), files[0][0], self.mode, self.resize)
        samples = Encoded(SingleFiles([file for file, _ in files]), decode)
        y = np.array([label for _, label in files], np.int64)
        return Dataset(folder.resolve().name, samples, y, len(train), classes, **PREPROCESSING[self.normalise])

    def _listed(self, root: Path | None) -> tuple[Path, tuple[str, ...], _Labelled, _Labelled]:
        """The folder, the classes, and the files of training and test."""
        if problem := self.check(root):
            raise DataError(problem)
        folder = located(self.path, root)
        classes = tuple(sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir()))
        if not classes:
            raise DataError(f"{folder / 'train'}: holds no class folders; give each class a folder of images")
        return folder, classes, self._class_folders(folder / "train", classes), self._test_files(folder, classes)

    def _test_files(self, folder: Path, classes: tuple[str, ...]) -> _Labelled:
        labelled = [
            split
            for split in (folder / name for name in _TESTS)
            if (split / "val_annotations.txt").is_file()
            or any((split / name).is_dir() for name in classes)  # Tiny-ImageNet's own test/ is unlabelled
        ]
        if not labelled:
            return []
        split, *others = labelled
        warn_of_left_out(folder.name, [other.name for other in others], split.name)
        if (split / "val_annotations.txt").is_file():
            return self._annotated_files(split, classes)
        return self._class_folders(split, classes)

    def _class_folders(self, split: Path, classes: tuple[str, ...]) -> _Labelled:
        """(file, label) of the images below each class folder of `split`, in a fixed order."""
        unknown = sorted(entry.name for entry in split.iterdir() if entry.is_dir() and entry.name not in classes)
        if unknown:
            raise DataError(f"{split / unknown[0]}: not one of the training classes; remove it or add training images")
        self._check_link(split)
        files = []
        for label, name in enumerate(classes):
            if not (split / name).is_dir():
                continue
            self._check_link(split / name)
            found = sorted(self._images(split / name, (os.path.realpath(split / name),)))
            if not found:
                raise DataError(f"{split / name}: holds no images; fill or remove the folder")
            files += [(file, label) for file in found]
        return files

    def _images(self, folder: Path, above: tuple[str, ...]) -> Iterator[Path]:
        """Image files in `folder` and below it. `above` are the real paths of the folders on the way, which a link may
        lead back to."""
        for entry in os.scandir(folder):
            path = folder / entry.name
            is_image = path.suffix.lower() in _IMAGE_SUFFIXES
            if entry.is_symlink() and (is_image or entry.is_dir()):
                self._check_link(path)
            if entry.is_dir():
                real = os.path.realpath(path)
                if real not in above:
                    yield from self._images(path, (*above, real))
            elif is_image:
                _check_regular(path)
                yield path

    def _annotated_files(self, split: Path, classes: tuple[str, ...]) -> _Labelled:
        """(file, label) by Tiny-ImageNet's val_annotations.txt: lines of file name, class and more, tab-separated."""
        annotations = split / "val_annotations.txt"
        for path in (split, annotations, split / "images"):
            self._check_link(path)
        files = []
        try:
            lines = annotations.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{annotations}: not a text in UTF-8 ({error}); write it again") from error
        for row, line in enumerate(lines):
            name, *rest = line.split("\t")
            if not rest or rest[0] not in classes:
                raise DataError(
                    f"{annotations}: row {row} ({line[:80]!r}) names no training class; correct or remove it"
                )
            try:
                path = below(split / "images", name)
            except UnsafeName as error:
                raise DataError(f"{annotations}: row {row}: {error}; correct or remove it") from error
            if not os.path.lexists(path):
                raise DataError(
                    f"{annotations}: row {row} names {name}, which is not in {split / 'images'}; add or remove it"
                )
            for part in (path, *path.parents[: name.count("/")]):
                self._check_link(part)
            _check_regular(path)
            files.append((path, classes.index(rest[0])))
        return files

    def _check_link(self, path: Path) -> None:
        if path.is_symlink() and not self.follow_links:
            raise DataError(f"{path}: is a symbolic link; put the images there, or set follow_links: true")


def _check_regular(path: Path) -> None:
    """A pipe, a socket or a device might never end."""
    if not path.is_file():
        raise DataError(f"{path}: is not a regular file; remove it")
