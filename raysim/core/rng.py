"""Named random streams: a draw belongs to (seed, round, client, purpose), never to a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np

from raysim.late import torch

SERVER = -1  # the "client" of draws made by the server


def stream_seed(seed: int, round_: int, client: int, purpose: str) -> int:
    """A 63-bit seed for one stream; streams of different purposes never share draws."""
    key = f"{seed}/{round_}/{client}/{purpose}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


def generator(seed: int, round_: int, client: int, purpose: str) -> torch.Generator:
    """A CPU generator at the start of the stream (seed, round, client, purpose)."""
    return torch.Generator().manual_seed(stream_seed(seed, round_, client, purpose))


def draw(n: int, k: int, seed: int) -> list[int]:
    """The first k of `torch.randperm(n)` with this seed: k of n without replacement, in random order.

    Of few among many the rest is not made: torch's shuffle fixes one place after the other, with one 32-bit number of its
    Mersenne Twister each, and NumPy has the same twister.
    """
    if 8 * k > n or n >= 1 << 27:  # where torch shuffles in another way
        return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].tolist()
    numbers = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 1 << 32, size=k, dtype=np.uint32)
    there: dict[int, int] = {}  # what has been moved to a place by an exchange
    drawn = []
    for i, number in enumerate(numbers.tolist()):
        j = i + number % (n - i)
        drawn.append(there.get(j, j))
        there[j] = there.get(i, i)
    return drawn


@contextmanager
def initial(seed: int) -> Iterator[None]:
    """What is drawn from torch's global stream meanwhile is what a run with this seed makes its models of."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, 0, SERVER, "initial model"))
        yield


def seed_layers(seed: int, device: torch.device) -> None:
    """Seed torch's global stream, from which layers draw for themselves (dropout)."""
    # torch.manual_seed would also seed devices that this process does not use, and remember each time that it did.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
