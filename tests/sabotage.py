"""Client methods and models that go wrong on purpose."""

from __future__ import annotations

import errno
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError
from torch import Tensor, nn

from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.failures import ClientFailure
from raysim.models import MODELS, Inputs


@dataclass(frozen=True)
class Stalls(ClientMethod):
    """In round `t` the first client to have taken a step says in the pipe of `ending` where it is, and waits to be killed."""

    folder: str
    t: int = 1
    node: str = ""  # only on this one

    def observe_grad(self, run: LocalRun) -> None:
        if run.t != self.t or run.steps != 1:
            return
        if self.node and self.node != ray.get_runtime_context().get_node_id():
            return
        with suppress(FileExistsError):
            os.mkdir(f"{self.folder}/taken")  # by one client only
            (Path(self.folder) / "victim").write_text(str(os.getpid()))
            Event().wait()


@dataclass(frozen=True)
class Fails(ClientMethod):
    """A client that fails whenever it trains, or (client -1) all of them."""

    how: Literal["dies", "hangs", "lacks_memory", "cannot_read", "raises", "refuses", "diverges"]
    client: int = -1
    t: int = 0  # from this round on
    times: int = 1 << 30  # after which it succeeds; counted in `folder`
    folder: str = ""

    def finish(self, run: LocalRun, upload: Upload) -> None:
        if run.t < self.t or self.client not in (run.client, -1) or self._spent():
            return
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hangs":
            hang(self.folder)
        if self.how == "lacks_memory":
            raise MemoryError("no room for 3 numbers")
        if self.how == "cannot_read":
            raise OSError(errno.EIO, "the disk does not answer")
        if self.how == "raises":
            raise ArithmeticError(f"client {run.client} cannot count")
        if self.how == "refuses":
            raise ClientFailure(f"client {run.client} holds no sense")
        upload.value[-1] = float("nan")

    def _spent(self) -> bool:
        for i in range(self.times if self.folder else 0):
            try:
                os.mkdir(f"{self.folder}/failed-{i}")
                (Path(self.folder) / f"failed-{i}/process").write_text(str(os.getpid()))
                return False
            except FileExistsError:
                pass
        return bool(self.folder)


@dataclass(frozen=True)
class FailsInTests(Fails):
    """A client that fails whenever its own model is tested after it has trained."""

    def finish(self, run: LocalRun, upload: Upload) -> None:
        pass

    def personal(self, run: LocalRun) -> None:
        super().finish(run, Upload(run.value))


@dataclass(frozen=True)
class HardTimes(ClientMethod):
    """In round `still` all clients come back with what they received; in round `lossy` a `client` returns NaN."""

    client: int
    still: int = 1
    lossy: int = 2

    def finish(self, run: LocalRun, upload: Upload) -> None:
        if run.t == self.still:
            upload.value.copy_(run.received)
        if run.t == self.lossy and run.client == self.client:
            upload.value[-1] = float("nan")


@dataclass(frozen=True)
class Waits(ClientMethod):
    """In round `t` a client that has trained waits at the FIFO `gate`, where a test holds it (`command.held`)."""

    gate: str
    t: int

    def finish(self, run: LocalRun, upload: Upload) -> None:
        if run.t == self.t:
            with suppress(FileNotFoundError), open(self.gate) as gate:
                gate.read()


@dataclass(frozen=True)
class Tells(ClientMethod):
    """Every client leaves the process and the actor it was trained in as a file in `folder`."""

    folder: str

    def finish(self, run: LocalRun, upload: Upload) -> None:
        actor = ray.get_runtime_context().get_actor_id()
        (Path(self.folder) / f"host-{run.client}").write_text(f"{os.getpid()} {actor}")


def hang(folder: str) -> None:
    """Say in `folder` which actor hangs, and hang until it is killed."""
    (Path(folder) / "hung").write_text(str(ray.get_runtime_context().get_actor_id()))
    Event().wait()


def kill_before(federation: Any, method: str, victim: Callable[[Any], int | None], patch: Any) -> list[int]:
    """Of a federation on Ray the host that `victim` names of a call is killed before the engine's `method` begins the call,
    once. Returns the list of hosts that were."""
    real, killed = getattr(federation.engine, method), list[int]()

    def begin(call: Any) -> Any:
        host = None if killed else victim(call)
        if host is not None:
            killed.append(host)
            actor = federation.engine.hosts[host]
            ray.kill(actor, no_restart=True)
            with suppress(RayActorError):
                while True:  # until it is dead: Ray does not wait for that
                    ray.get(actor.ping.remote())
        return real(call)

    patch.setattr(federation.engine, method, begin)
    return killed


def to_the_end(federation: Any) -> None:
    """Run all rounds that are left, and close."""
    while federation.step() is not None:
        pass
    federation.finish()
    federation.close()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@contextmanager
def ending(folder: Path, strike: Callable[[int], None] = kill) -> Iterator[None]:
    """`strike` the process of the client that `Stalls` as soon as it does. It is an error if none does in the block."""
    struck: list[int] = []
    os.mkfifo(folder / "victim")

    def wait() -> None:
        struck.append(int((folder / "victim").read_text()))  # once a client has written it
        strike(struck[0])

    thread = Thread(target=wait, daemon=True)
    thread.start()
    yield
    assert struck, "no client stalled"
    thread.join()


def kills_actors(inputs: Inputs) -> nn.Module:
    """A model whose making kills an actor."""
    if ray.is_initialized() and ray.get_runtime_context().get_actor_id():
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(inputs.shape), inputs.classes))


TRIED = 2  # samples on which a model is tried before a run


class _HangsInTests(nn.Sequential):
    folder: str

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) > TRIED:
            with suppress(FileExistsError):
                os.mkdir(f"{self.folder}/once")
                hang(self.folder)
        return super().forward(x)


def hangs_in_tests(inputs: Inputs, folder: str) -> nn.Module:
    """A model that waits for ever the first time it is tested."""
    model = _HangsInTests(nn.Flatten(), nn.Linear(math.prod(inputs.shape), inputs.classes))
    model.folder = folder
    return model


def lacks_memory_in_tests(inputs: Inputs) -> nn.Module:
    """A `tiny_bn_cnn` that has no memory the first time it is tested."""
    model, failed = MODELS["tiny_bn_cnn"](inputs), list[int]()

    def fail(module: nn.Module, inputs: tuple[Tensor]) -> None:
        if not (module.training or failed) and len(inputs[0]) > TRIED:
            failed.append(1)
            raise MemoryError("no room to test")

    model.register_forward_pre_hook(fail)
    return model
