"""Random changes of images, drawn for each sample in every pass over a client's training samples: torchvision's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raysim.core.bounds import Fraction, NonNegative, NonNegativeInt
from raysim.lazy import Tensor, torch, v2


class Augmentation(ABC):
    """A random transform of an image. Subclasses are frozen dataclasses of settings."""

    @abstractmethod
    def transform(self, size: tuple[int, int], black: list[float]) -> Any:
        """The transform of torchvision for images of this `size`, height and width; `black` is what each channel of a model's
        input is where nothing is."""


@dataclass(frozen=True)
class RandomCrop(Augmentation):
    """The image moved by up to `padding` pixels up or down, and left or right; black comes in at the borders."""

    padding: NonNegativeInt = 4
    """Pixels."""

    def transform(self, size: tuple[int, int], black: list[float]) -> Any:
        return v2.RandomCrop(size, padding=self.padding, fill=black)


@dataclass(frozen=True)
class HorizontalFlip(Augmentation):
    """Left and right exchanged."""

    p: Fraction = 0.5
    """Probability."""

    def transform(self, size: tuple[int, int], black: list[float]) -> Any:
        return v2.RandomHorizontalFlip(self.p)


@dataclass(frozen=True)
class VerticalFlip(Augmentation):
    """Top and bottom exchanged."""

    p: Fraction = 0.5
    """Probability."""

    def transform(self, size: tuple[int, int], black: list[float]) -> Any:
        return v2.RandomVerticalFlip(self.p)


@dataclass(frozen=True)
class RandomRotation(Augmentation):
    """The image turned around its centre; black comes in at the corners."""

    degrees: NonNegative = 15.0
    """Largest angle to either side."""

    def transform(self, size: tuple[int, int], black: list[float]) -> Any:
        return v2.RandomRotation(self.degrees, interpolation=v2.InterpolationMode.BILINEAR, fill=black)


@dataclass(frozen=True)
class RandomErasing(Augmentation):
    """A rectangle of 2 to 33 % of the image made black (Zhong et al., 2020)."""

    p: Fraction = 0.5
    """Probability."""

    def transform(self, size: tuple[int, int], black: list[float]) -> Any:
        return v2.RandomErasing(self.p, value=black)


AUGMENTATIONS: dict[str, type[Augmentation]] = {
    "random_crop": RandomCrop,
    "horizontal_flip": HorizontalFlip,
    "vertical_flip": VerticalFlip,
    "random_rotation": RandomRotation,
    "random_erasing": RandomErasing,
}


def augmented(x: Tensor, augment: Sequence[Augmentation], black: Tensor, seed: int) -> Tensor:
    """Images `x` [n, C, H, W], each changed by all of `augment` in their order, with draws from `seed`; `black` [C]."""
    size, fill = (x.shape[2], x.shape[3]), black.tolist()
    transforms = [one.transform(size, fill) for one in augment]
    out = torch.empty_like(x)  # in the memory format of x
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # from which torchvision draws, whatever the device
        for i, image in enumerate(x):
            for transform in transforms:
                image = transform(image)
            out[i] = image
    return out
