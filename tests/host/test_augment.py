"""Training images that are changed at random, in every epoch and at every client otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import simulate, tiny

from raysim.config import ConfigError
from raysim.data import Dataset, Partition
from raysim.data.augment import AUGMENTATIONS, HorizontalFlip, RandomCrop, augmented
from raysim.data.partition.shards import Shards
from raysim.host.samples import SampleSource


def test_what_is_done_to_an_image() -> None:
    """A flip is a flip, a crop moves; each sample has draws of its own, and black is black of the model's input."""
    x = torch.arange(1.0, 65).reshape(1, 1, 8, 8).repeat(200, 2, 1, 1)
    black = torch.tensor([-1.0, -2.0])
    flipped = augmented(x, [HorizontalFlip()], black, 5)
    turned = (flipped == x.flip(-1)).all(-1).all(-1).all(-1)
    assert torch.equal(flipped[~turned], x[~turned])
    assert 60 < turned.sum() < 140
    moved = augmented(x, [RandomCrop(padding=2)], black, 5)
    padded = torch.stack([torch.nn.functional.pad(x[0, c], (2, 2, 2, 2), value=float(black[c])) for c in range(2)])
    places = {}
    for image in moved:
        [place] = [(i, j) for i in range(5) for j in range(5) if torch.equal(padded[:, i : i + 8, j : j + 8], image)]
        places[place] = True
    assert len(places) == 25
    every = [entry() for entry in AUGMENTATIONS.values()]
    before = torch.get_rng_state()
    last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(augmented(x, every, black, 5), augmented(last, every, black, 5))
    assert not torch.equal(augmented(x, every, black, 5), augmented(x, every, black, 6))
    assert torch.equal(torch.get_rng_state(), before)


def test_passes_differ_and_tests_are_left_alone() -> None:
    x = np.arange(2 * 64, dtype=np.uint8).reshape(2, 1, 8, 8)
    data = Dataset("d", x, np.zeros(2, np.int64), 1, ("a",), scale=255.0, mean=(0.5,), std=(0.5,))
    rows = np.arange(2)
    partition = Partition(Shards.of([rows[:1]]), Shards.of([rows[1:]]), Shards.of([rows[:0]]), rows[1:], rows[:0])
    samples = SampleSource(data, partition, torch.device("cpu"), channels_last=False, augment=[RandomCrop()])
    client = samples.client(0)
    for part, row in ((client.train, 0), (client.test, 1)):
        assert torch.equal(part.x[0], data.transform(torch.from_numpy(x[row : row + 1]))[0])
    assert client.augment is not None
    changed = [client.augment(client.train.x, seed) for seed in range(9)]
    assert len({one.numpy().tobytes() for one in changed}) > 5
    assert min(one.min().item() for one in changed) == -1  # black


@pytest.mark.parametrize("together", [1, 3])
def test_the_same_bits_on_both_engines(together: int, tmp_path: Path, warm_ray: Any) -> None:
    engine = {"batch_clients": together}
    augment = {"augment": ["random_crop", {"horizontal_flip": {"p": 0.3}}]}
    settings = {"local": {"epochs": 2}, "data": augment, "rounds": {"total": 2}}
    local = simulate(tiny(**settings, engine={"local": engine}), tmp_path / "local").sha256()
    assert local != simulate(tiny(**settings | {"data": {}}, engine={"local": engine}), tmp_path / "plain").sha256()
    ray = simulate(tiny(**settings, engine={"ray": engine}), tmp_path / "ray", make_engine=warm_ray).sha256()
    assert ray == local


def test_only_images_are_augmented(tmp_path: Path) -> None:
    data = {"name": {"synthetic": {"shape": [5]}}, "augment": ["horizontal_flip"]}
    with pytest.raises(
        ConfigError, match=r"data\.augment: changes images \[C, H, W\], but samples of synthetic are \[5\]"
    ):
        simulate(tiny(data=data, model={"name": "mlp"}), tmp_path)
    with pytest.raises(ConfigError, match="there is no augmentation 'flip'"):
        tiny(data={"augment": ["flip"]})
