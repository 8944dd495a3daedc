"""Named random streams: a draw belongs to (seed, round, client, purpose), never to a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from functools import partial
from hashlib import blake2b
from types import FunctionType
from typing import Any

import numpy as np

from raysim.lazy import Tensor, torch

SERVER = -1  # the "client" of draws made by the server


def stream_seed(seed: int, round_: int, client: int, purpose: str) -> int:
    """A 63-bit seed for one stream; streams of different purposes never share draws."""
    key = f"{seed}/{round_}/{client}/{purpose}".encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> 1


def stream_of(code: object) -> str:
    """The part of a purpose that says whose draws they are. It is the class and not its name in the registry, so that no
    numbers depend on what a configuration calls it."""
    return type(code).__name__.lower()


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
    _TWISTER.seed(seed & 0xFFFFFFFF)
    numbers = _TWISTER.randint(0, 1 << 32, size=k, dtype=np.uint32)
    there: dict[int, int] = {}  # what has been moved to a place by an exchange
    drawn = []
    for i, number in enumerate(numbers.tolist()):
        j = i + number % (n - i)
        drawn.append(there.get(j, j))
        there[j] = there.get(i, i)
    return drawn


_TWISTER = np.random.RandomState(0)  # seeded for each draw: that takes a tenth of what making one does


def uniform(key: int, clients: np.ndarray, i: int | np.ndarray) -> np.ndarray:
    """The i-th number [n] of each client's own stream, uniform between 0 and 1, both excluded; a counter goes through SplitMix64
    (Steele et al., Fast Splittable Pseudorandom Number Generators, 2014), so that a million take milliseconds."""
    streams = _mixed(np.uint64(key) + _GAMMA * (clients.astype(np.uint64) + np.uint64(1)))
    bits = _mixed(streams + _GAMMA * np.atleast_1d(np.asarray(i, np.uint64))) >> np.uint64(12)
    numbers: np.ndarray = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return numbers


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def seed_layers(seed: int, device: torch.device | None = None) -> None:
    """Seed torch's global generator, from which layers draw for themselves (dropout)."""
    # torch.manual_seed would also seed devices that this process does not use, and remember each time that it did.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(seed)


def seed_globals(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of Python, NumPy and torch, from which a user's code may draw."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    seed_layers(seed, device)


@dataclass(frozen=True)
class Streams:
    """Where the global generators of Python, NumPy and torch are."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    tensors: tuple[Tensor, ...]  # of the CPU and, where it computes on one, of a GPU

    @classmethod
    def now(cls, device: torch.device) -> Streams:
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
        return cls(random.getstate(), np.random.get_state(legacy=False), tuple(states))

    def restore(self, device: torch.device) -> None:
        """Put the generators back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.tensors[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(self.tensors[1], device)

    def moved(self, device: torch.device) -> str | None:
        """The name of a generator that has been drawn from since; None if there is none."""
        now = Streams.now(device)
        if now.python != self.python:
            return "random"
        (key, i), (before, j) = (where["state"].values() for where in (now.numpy, self.numpy))
        if i != j or not np.array_equal(key, before) or now.numpy["has_gauss"] != self.numpy["has_gauss"]:
            return "np.random"
        return None if all(map(torch.equal, now.tensors, self.tensors)) else "torch"


@contextmanager
def preserved(device: torch.device | None = None) -> Iterator[None]:
    """Put the global generators of Python, NumPy and torch back afterwards."""
    python, numpy_ = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """The global generators of Python, NumPy and torch are at the start of the stream `seed`, and put back afterwards. What
    draws from them meanwhile draws the same in every process."""
    with preserved(device):
        seed_globals(seed, device)
        yield


def may_draw(code: object) -> bool:
    """Whether an object or function may draw from global generators: it is not raysim's own, which has streams of its own, or,
    as layers do, draws from torch's alone; and calls nothing else that may."""
    if isinstance(code, partial):
        return any(map(may_draw, filter(callable, (code.func, *code.args))))
    home = code if isinstance(code, type | FunctionType) else type(code)
    if not home.__module__.startswith("raysim."):
        return True
    return is_dataclass(code) and home is not code and any(map(may_draw, filter(callable, vars(code).values())))


def seeded_for(code: object, seed: int) -> AbstractContextManager[None]:
    """`seeded` around code that `may_draw`; around other code nothing, not even an import of PyTorch, which takes seconds."""
    return seeded(seed) if may_draw(code) else nullcontext()


def initial(seed: int) -> AbstractContextManager[None]:
    """What is drawn from the global generators meanwhile is what a run with this seed makes its models of."""
    return seeded(stream_seed(seed, 0, SERVER, "initial model"))
