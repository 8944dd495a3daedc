"""Runs are killed, starved and disturbed. Each must end with the bits and tables of an undisturbed run, or with a sentence
that names the cause, after which it can be resumed to them. Nothing may hang or be left behind.

    python benchmarks/chaos.py [--trials 40] [--seed 0] [--faults storm disk_full ...] [--cases fedbuff ...]

Every trial draws a method, a fault and its moment from the seed. Faults that need a privilege which this process does not
have are named and left out. Counts go to benchmarks/results/; a trial with a problem makes the command fail. Faults that strike
at a certain file operation are part of the tests, too (tests/chaos/).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

CASES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedlws": {"server": ["fedlws"]},
    "scaffold": {"client": ["scaffold"], "local": {"momentum": 0.0, "weight_decay": 0.0}},
    "fedala": {"client": ["fedala"]},
    "fedamp": {"client": ["fedamp"], "rounds": {"participation": 1.0}},  # as it asks
    "ditto": {"client": ["ditto"]},
    "stack": {  # all of them that go together
        "client": [{"scaffold": {"c_update": "mean_grad"}}, "fedala", "ditto"], "server": ["fedlws"],
        "local": {"momentum": 0.0, "weight_decay": 0.0},
    },
    "fedbuff": {"clock": {"speed": {"lognormal": {"median": 20, "sigma": 1.0}}, "latency": 0.1},
                "rounds": {"selection": {"fedbuff": {"buffer": 3, "concurrency": 5}}}},
    "oort": {"clock": {"speed": {"lognormal": {"median": 20, "sigma": 1.0}}, "latency": 0.1},
             "rounds": {"selection": {"oort": {"exploration": 0.5, "every": 2}}}},
    "power_of_choice": {"rounds": {"selection": "power_of_choice"}},
}  # fmt: skip
ROUNDS = 8
PATIENCE = 180  # seconds until a command is said to hang
HOSTS, DRIVERS = (b"ray::HostActor", b"ray::train"), (b"ray::Driver",)  # titles of their processes
RAYLET, GCS = b"raylet/raylet", b"gcs/gcs_server"  # in the command lines of Ray's own
AGENTS = b"ray::DashboardAgent", b"ray::RuntimeEnvAgent"  # look for a dead cluster for a minute before they give up
MEASURED = {"seconds", "wall", "host", "node", "transport_up", "transport_down"}  # columns that differ from run to run


def configuration(case: str, engine: Any) -> dict[str, Any]:
    """Eight unequal clients, three a round, a BatchNorm net of 2k parameters."""
    base: dict[str, Any] = {
        "name": case, "seed": 3, "engine": engine,
        "data": {
            "name": {"synthetic": {"samples": 260, "shape": [1, 8, 8], "classes": 4}},
            "partition": {"dirichlet_counts": {"alpha": 0.8, "clients": 8, "min_size": 6}},
        },
        "model": {"name": "tiny_bn_cnn"},
        "rounds": {"total": ROUNDS, "participation": 0.4, "checkpoint_every": 2},
        "local": {"batch_size": 8, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
    }  # fmt: skip
    merged = {key: {**base[key], **value} if key in base else value for key, value in CASES[case].items()}
    return base | merged


# ------------------------------------------------------------------------------------------------- the command line


@dataclass(frozen=True)
class Ended:
    code: int | None  # None: it hung, and was killed
    output: str

    @property
    def with_sentence(self) -> bool:
        """It failed, and said why without a traceback."""
        return self.code in (1, 2) and "Traceback" not in self.output and bool(self.output.strip())


class Command:
    """`raysim` in a session of its own, forked from a process that has imported everything. What it starts is marked."""

    server = multiprocessing.get_context("forkserver")

    def __init__(self, *arguments: str | Path, log: Path, setup: Callable[[], None] | None = None):
        self.server.set_forkserver_preload(["torch", "raysim.cli.app", "raysim.federation", "raysim.api.terminal"])
        self.mark, self.log = uuid4().hex, log
        called = [*map(str, arguments)]
        self.process = self.server.Process(target=_command, args=(called, str(log), self.mark, setup))
        self.process.start()

    def wait_for(self, text: str) -> bool:
        """Whether `text` appears before it ends."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            ended = not self.process.is_alive()
            if self.log.exists() and text in self.log.read_text(errors="replace"):
                return True
            if ended:
                return False
            time.sleep(0.01)
        return False

    def end(self) -> Ended:
        self.process.join(PATIENCE)
        code = self.process.exitcode
        if code is None:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
            self.process.join()
        return Ended(code, self.log.read_text(errors="replace") if self.log.exists() else "")

    def processes(self) -> dict[int, bytes]:
        """Of what it has started: command lines by process id."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"RAYSIM_CHAOS={self.mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ")
            except OSError:  # it has ended meanwhile, or is not ours to look at
                continue
        return found

    def left_behind(self) -> list[str]:
        """Processes that are still there, after a while."""
        deadline = time.monotonic() + 90
        while found := [line.decode() for line in self.processes().values() if not line.startswith(AGENTS)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return found


def _command(arguments: list[str], log: str, mark: str, setup: Callable[[], None] | None) -> None:
    os.setsid()
    os.environ["RAYSIM_CHAOS"] = mark
    os.environ.pop("RAY_ADDRESS", None)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["raysim", *arguments]
    if setup:
        setup()
    from raysim.cli.app import main

    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ------------------------------------------------------------------------------------------- what happens in the process


def before_files(folder: str, act: Callable[[int, str, str], None]) -> None:
    """Call `act` whenever something in `folder` is about to be opened for writing, renamed, made or removed, with the number of
    the call, from 1, the operation and the path."""
    numbers = itertools.count(1)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        written = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir") or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if written and str(arguments[0]).startswith(folder):
            act(next(numbers), event, str(arguments[0]))

    sys.addaudithook(watch)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class DiesAtFile:
    """SIGKILL before the n-th operation on a file in `folder`."""

    folder: str
    n: int

    def __call__(self) -> None:
        before_files(self.folder, lambda number, *_: die() if number == self.n else None)


@dataclass(frozen=True)
class DiesAtNewKind:
    """SIGKILL before the first operation on a file in `folder` that is of another kind than those in the file `deaths`, which
    it is added to. A kind is an operation on a name without its numbers."""

    folder: str
    deaths: Path

    def __call__(self) -> None:
        known = {*self.deaths.read_text().splitlines()}

        def act(_: int, operation: str, path: str) -> None:
            kind = operation if operation == "os.mkdir" else f"{operation} {re.sub('[0-9]+', '0', Path(path).name)}"
            if kind not in known:
                self.deaths.write_text("\n".join([*known, kind]))
                die()

        before_files(self.folder, act)


@dataclass(frozen=True)
class FewDescriptors:
    more: int

    def __call__(self) -> None:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + self.more, used + self.more))


@dataclass(frozen=True)
class ClosedAtFile:
    """`folder` is closed to writing before the n-th operation on a file in it. A process of root, to which no folder is closed,
    becomes that of nobody."""

    folder: str
    n: int

    def __call__(self) -> None:
        if not os.getuid():
            os.setgid(65534)
            os.setuid(65534)
            os.environ["HOME"] = self.folder

        def act(number: int, *_: str) -> None:
            if number == self.n:
                for path in folders(Path(self.folder)):
                    path.chmod(0o555)

        before_files(self.folder, act)


def folders(folder: Path) -> list[Path]:
    return [path for path in (folder, *folder.rglob("*")) if path.is_dir()]


def client_method(name: str, finish: Callable[..., None]) -> None:
    """Register a client method that does something as a client has trained. Its class belongs to no module that an actor
    could import, so that it travels with the run."""
    from dataclasses import make_dataclass

    import raysim

    made = make_dataclass(name.title(), [], bases=(raysim.ClientMethod,), namespace={"finish": finish}, frozen=True)
    made.__doc__, made.__module__ = "Goes wrong.", "__main__"
    raysim.method("client", name)(made)


@dataclass(frozen=True)
class Hangs:
    """A client method that waits for ever, once, in round `t`."""

    marker: str
    t: int

    def __call__(self) -> None:
        marker, t = self.marker, self.t

        def finish(self: Any, run: Any, upload: Any) -> None:
            import os
            import time

            if run.t == t and not os.path.exists(marker):
                os.mkdir(marker)
                time.sleep(10**6)

        client_method("hangs", finish)


@dataclass(frozen=True)
class Hungry:
    """A client method that takes up to 10 GB, once, in round `t`; Ray lets all processes together have 5 GB more."""

    marker: str
    t: int

    def __call__(self) -> None:
        import psutil

        memory = psutil.virtual_memory()
        threshold = (memory.total - memory.available + 5e9) / memory.total
        os.environ |= {"RAY_memory_usage_threshold": f"{threshold:.3f}", "RAY_memory_monitor_refresh_ms": "50"}
        marker, t = self.marker, self.t

        def finish(self: Any, run: Any, upload: Any) -> None:
            import os
            import time

            import torch

            if run.t == t and not os.path.exists(marker):
                os.mkdir(marker)
                blocks = []
                for _ in range(100):
                    blocks.append(torch.ones(25_000_000))
                    time.sleep(0.02)

        client_method("hungry", finish)


@dataclass(frozen=True)
class FewProcesses:
    """Its control group may have so many processes and threads."""

    most: int

    def __call__(self) -> None:
        group = Path("/sys/fs/cgroup/pids", f"raysim-{os.getpid()}")  # removed with the machine
        group.mkdir()
        (group / "pids.max").write_text(str(self.most))
        (group / "cgroup.procs").write_text(str(os.getpid()))


@dataclass(frozen=True)
class LittleSharedMemory:
    """Its /dev/shm has so many megabytes."""

    megabytes: int

    def __call__(self) -> None:
        CLONE_NEWNS = 0x20000  # what is mounted here is seen here only
        if ctypes.CDLL(None).unshare(CLONE_NEWNS):
            raise OSError("no mount namespace of its own")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        size = f"size={self.megabytes}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", "/dev/shm"], check=True)


@dataclass(frozen=True)
class ClockSetBack:
    """By an hour, after so many looks at it."""

    looks: int

    def __call__(self) -> None:
        real, seen = time.time, 0

        def shown() -> float:
            nonlocal seen
            seen += 1
            return real() - (3600 if seen > self.looks else 0)

        time.time = shown


@dataclass(frozen=True)
class Sabotage:
    """A client method that goes wrong, once, in round `t`."""

    marker: str
    how: str
    t: int

    def __call__(self) -> None:
        marker, how, t = self.marker, self.how, self.t

        def finish(self: Any, run: Any, upload: Any) -> None:
            import os

            if run.t != t or os.path.exists(marker):
                return
            os.mkdir(marker)
            if how == "nan":
                upload.value[0] = float("nan")
            elif how == "shape":
                upload.value = upload.value[:-1]
            else:
                raise ValueError("this method is wrong")

        client_method("sabotaged", finish)


# ---------------------------------------------------------------------------------------------------------------- trials


@dataclass
class Trial:
    """One disturbed run and its way to the end."""

    case: str
    random: random.Random
    folder: Path  # for everything
    engine: Any = "local"
    changes: dict[str, Any] = field(default_factory=dict)
    setup: Callable[[], None] | None = None  # in every command that has none of its own
    kept: Command | None = None  # that started the cluster which the run joins
    kills: int = 0
    said: list[str] = field(default_factory=list)  # sentences with which commands ended
    problems: list[str] = field(default_factory=list)
    commands: int = 0

    @property
    def run(self) -> Path:
        """The run's own folder."""
        return self.folder / "run"

    @property
    def rounds(self) -> dict[str, Any]:
        """This section of its configuration."""
        section: dict[str, Any] = configuration(self.case, self.engine)["rounds"]
        return section

    def command(self, *arguments: str | Path, setup: Callable[[], None] | None = None) -> Command:
        self.commands += 1
        return Command(*arguments, log=self.folder / f"log-{self.commands}", setup=setup or self.setup)

    def victims(self, command: Command, titles: tuple[bytes, ...]) -> list[int]:
        """Processes of a run whose titles begin with these."""
        return [pid for pid, line in (self.kept or command).processes().items() if line.startswith(titles)]

    def kill(self, victims: list[int]) -> None:
        """One of these processes; the run, and they with it, may have ended."""
        if victims:
            with suppress(ProcessLookupError):
                os.kill(self.random.choice(victims), signal.SIGKILL)
                self.kills += 1

    def look_behind(self, command: Command) -> None:
        """Note what the command has left, also on the cluster that it has joined."""
        left = command.left_behind()
        deadline = time.monotonic() + 90
        while self.kept and (hosts := self.victims(command, HOSTS + DRIVERS)):
            if time.monotonic() > deadline:
                left += [f"process {pid} on the kept cluster" for pid in hosts]
                break
            time.sleep(0.1)
        self.problems += [f"left behind: {line}" for line in left]

    def start(self, setup: Callable[[], None] | None = None, address: str = "", **changes: Any) -> Command:
        return self.command(*self.arguments(address, **changes), setup=setup)

    def arguments(self, address: str = "", **changes: Any) -> list[str | Path]:
        """`raysim run`, or `raysim resume` where there is something to resume."""
        joined = ["--address", address] if address else []
        if (self.run / "config.yaml").exists():
            return ["resume", self.run, *joined]
        file = self.folder / "federation.yaml"
        file.write_text(yaml.safe_dump(configuration(self.case, self.engine) | self.changes | changes))
        return ["run", file, "--out", self.run, *joined]

    def note(self, ended: Ended, *allowed: int) -> None:
        """A command may have succeeded, been killed (`allowed`), or ended with a sentence; else it is a problem."""
        self.kills += ended.code == -signal.SIGKILL
        if ended.code is None:
            self.problems.append(f"hung:\n{ended.output[-2000:]}")
        elif ended.with_sentence:
            self.said.append(ended.output.strip().splitlines()[-1])
        elif ended.code != 0 and ended.code not in allowed:
            self.problems.append(f"ended with {ended.code}:\n{ended.output[-2000:]}")

    def complete(self, reference: Path) -> None:
        """Run what is left, undisturbed; compare hash and tables with the `reference`, and look for what was left behind."""
        if not (self.run / "result.json").exists():
            last = self.start()
            ended = last.end()
            if ended.code != 0:
                self.problems.append(f"could not be resumed ({ended.code}):\n{ended.output[-2000:]}")
                return
            self.look_behind(last)
        self.problems += differences(self.run, reference)
        self.problems += [f"left behind: {path.name}" for path in self.run.rglob(".*.tmp")]


def differences(run: Path, reference: Path) -> list[str]:
    """Where a finished run is not the reference."""
    from raysim.store import tables

    ours, theirs = (json.loads((folder / "result.json").read_text()) for folder in (run, reference))
    found = [f"sha256 {ours['sha256']}, not {theirs['sha256']}"] if ours["sha256"] != theirs["sha256"] else []
    for table in ("rounds", "clients", "layers", "traffic", "notes", "personal"):
        mine, other = (tables.read(folder, table) for folder in (run, reference))
        columns = [c for c in other.column_names if c not in MEASURED and not c.startswith("seconds_")]
        if not mine.select(columns).equals(other.select(columns)):
            found.append(f"table {table} differs")
    return found


def kill_at_file(trial: Trial) -> None:
    """The command line dies at a random operation on a file of the run; twice."""
    for most in (150, 60):
        command = trial.start(DiesAtFile(str(trial.run), trial.random.randint(1, most)))
        trial.note(command.end(), -signal.SIGKILL)


def kill_at_each_file(trial: Trial) -> None:
    """The command line dies before its first operation on a file of every kind, until one comes through."""
    deaths = trial.folder / "deaths"
    deaths.touch()
    while (ended := trial.start(DiesAtNewKind(str(trial.run), deaths)).end()).code == -signal.SIGKILL:
        pass
    trial.note(ended)


def kill_command(trial: Trial) -> None:
    """The command line dies in a random round; twice."""
    for _ in range(2):
        if not (trial.run / "result.json").exists():
            command = trial.start()
            command.wait_for(f"round {trial.random.randint(1, ROUNDS):>{len(str(ROUNDS))}}/")
            time.sleep(trial.random.random() * 0.05)
            command.process.kill()
            trial.note(command.end(), -signal.SIGKILL)
            trial.look_behind(command)


def disk_full(trial: Trial) -> None:
    """A disk with room for some rounds."""
    with small_disk(trial.run, trial.random.randint(60, 400)):
        trial.note(trial.start().end())
        subprocess.run(["mount", "-o", "remount,size=64m", trial.run], check=True)
        ended = trial.start().end()
        trial.note(ended)
        shutil.copytree(trial.run, trial.folder / "copy")
    shutil.copytree(trial.folder / "copy", trial.run, dirs_exist_ok=True)


def quota(trial: Trial) -> None:
    """A disk with room enough, of which the run may have but some (Btrfs, whose quotas bind root, too)."""
    image = trial.folder / "disk"
    with image.open("wb") as file:
        file.truncate(128 << 20)
    subprocess.run(["mkfs.btrfs", "-q", image], check=True, capture_output=True)
    trial.run.mkdir()
    subprocess.run(["mount", "-o", "loop", image, trial.run], check=True)
    try:
        subprocess.run(["btrfs", "quota", "enable", trial.run], check=True)
        for limit in (f"{trial.random.randint(100, 500)}k", "none"):
            subprocess.run(["btrfs", "qgroup", "limit", limit, trial.run], check=True)
            trial.note(trial.start().end())
        shutil.copytree(trial.run, trial.folder / "copy")
    finally:
        subprocess.run(["umount", "-l", trial.run], check=True)
    shutil.copytree(trial.folder / "copy", trial.run, dirs_exist_ok=True)


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def read_only(trial: Trial) -> None:
    """The run's folder is closed to writing before a random operation on a file in it, and opened again."""
    trial.folder.chmod(0o777)
    for parent in trial.folder.parents:
        if parent != Path(tempfile.gettempdir()) and parent.stat().st_mode & 0o5 != 0o5:
            parent.chmod(parent.stat().st_mode | 0o5)
        if parent == Path(tempfile.gettempdir()):
            break
    trial.note(trial.start(ClosedAtFile(str(trial.run), trial.random.randint(1, 60))).end())
    for path in folders(trial.run):
        path.chmod(0o777)


def few_descriptors(trial: Trial) -> None:
    """The process may open but a few files more."""
    trial.note(trial.start(FewDescriptors(trial.random.randint(1, 12))).end())


def clock_set_back(trial: Trial) -> None:
    trial.note(trial.start(ClockSetBack(trial.random.randint(5, 60))).end())


def client_fault(trial: Trial) -> None:
    """Once, a client's model is not finite, of another shape, or cannot be made: the client tries again, or the run ends
    with a sentence and goes on when it is resumed."""
    how = trial.random.choice(["nan", "shape", "exception"])
    methods = [*CASES[trial.case].get("client", []), "sabotaged"]
    trial.setup = Sabotage(str(trial.folder / "was sabotaged"), how, trial.random.randint(1, ROUNDS - 2))
    ended = trial.start(client=methods, rounds=trial.rounds | {"on_client_failure": "retry"}).end()
    sentence = "" if how == "nan" else "an error in a client's code ends the run"
    if ended.code != (0 if how == "nan" else 1) or sentence not in ended.output:
        trial.problems.append(f"{how} ended with {ended.code}:\n{ended.output[-2000:]}")
    trial.said += [sentence] if sentence else []


def links(trial: Trial) -> None:
    """A link, a pipe, a socket or a folder takes a name in the folder of a run that was killed, and what had the name is put
    back after the next command. What a link leads to stays as it is."""
    trial.note(trial.start(DiesAtFile(str(trial.run), trial.random.randint(30, 120))).end(), -signal.SIGKILL)
    outside = trial.folder / "outside"
    outside.mkdir()
    for name in ("victim", "round-000002.safetensors", ".config.yaml.tmp"):
        (outside / name).write_text("theirs")
    place, aside = trial.run / trial.random.choice(_names(trial.run)), trial.folder / "aside"
    place.parent.mkdir(parents=True, exist_ok=True)
    if had := os.path.lexists(place):
        place.rename(aside)
    kind = trial.random.choice(list(PLANTS))
    PLANTS[kind](place, outside)
    planted = place.lstat()
    ended = trial.start().end()
    trial.note(ended)
    where = f"{kind} as {place.relative_to(trial.run)}"
    there = {path.name: path.read_text() for path in outside.iterdir()}
    if there != dict.fromkeys(("victim", "round-000002.safetensors", ".config.yaml.tmp"), "theirs"):
        trial.problems.append(f"{where}: outside is now {there}")
    if os.path.lexists(place) and place.lstat().st_ino == planted.st_ino:  # nothing has taken its place
        with suppress(OSError):  # a folder that the run has made its own
            place.rmdir() if kind == "folder" else place.unlink()
    if ended.code and had and not os.path.lexists(place):
        aside.rename(place)
    if trial.problems:
        trial.problems.append(where)


PLANTS: dict[str, Callable[[Path, Path], Any]] = {
    "link to a file": lambda place, outside: place.symlink_to(outside / "victim"),
    "link to a folder": lambda place, outside: place.symlink_to(outside),
    "link to nothing": lambda place, outside: place.symlink_to(outside / "new"),
    "link to itself": lambda place, _: place.symlink_to(place.name),
    "pipe": lambda place, _: os.mkfifo(place),
    "socket": lambda place, _: os.mknod(place, stat.S_IFSOCK | 0o600),
    "folder": lambda place, _: place.mkdir(),
}


def _names(run: Path) -> list[str]:
    """What lies in the folder of a run and in its checkpoints, and what it is about to write there."""
    there = [*run.iterdir(), *(run / "checkpoints").glob("*")]
    coming = ["result.json", "model.safetensors", "failed.txt", ".lock", "checkpoints", "checkpoints/.mine"]
    coming += [
        f".{name}.tmp" for name in ("config.yaml", "manifest.json", "result.json", "failed.txt", "model.safetensors")
    ]
    return sorted({*(str(path.relative_to(run)) for path in there), *coming})


def kill_host(trial: Trial) -> None:
    """A client actor dies at a random moment."""
    kill_one(trial, HOSTS)


def kill_driver(trial: Trial) -> None:
    """The driver dies at a random moment."""
    kill_one(trial, DRIVERS)


def kill_one(trial: Trial, titles: tuple[bytes, ...]) -> None:
    """Kill one of the run's processes whose title begins with one of these, a while after the run has begun."""
    command = trial.start()
    command.wait_for("round")
    time.sleep(trial.random.random() * 1.5)
    trial.kill(trial.victims(command, titles))
    trial.note(command.end())
    trial.look_behind(command)


def storm(trial: Trial) -> None:
    """Client actors, drivers and at times the command line die at random moments of one run on Ray."""
    for _ in range(2):
        if (trial.run / "result.json").exists():
            return
        command = trial.start()
        command.wait_for("round")
        for _ in range(trial.random.randint(1, 4)):
            time.sleep(trial.random.random() * 1.5)
            if command.process.is_alive():
                trial.kill(trial.victims(command, HOSTS + DRIVERS))
        if trial.random.random() < 0.3:
            command.process.kill()
        trial.note(command.end(), -signal.SIGKILL)
        trial.look_behind(command)


def kill_cluster(trial: Trial) -> None:
    """Ray's raylet or its GCS dies at a random moment."""
    command = trial.start()
    command.wait_for("round")
    time.sleep(trial.random.random() * 1.5)
    which = trial.random.choice((RAYLET, GCS))
    trial.kill([pid for pid, line in command.processes().items() if line.partition(b" ")[0].endswith(which)])
    trial.note(command.end())
    trial.look_behind(command)


def nodes_come_and_go(trial: Trial) -> None:
    """Of a cluster of three nodes one is removed, another is added, one of the old ones goes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        command = trial.start(address=cluster.address)
        command.wait_for("round")
        for _ in range(2):
            time.sleep(trial.random.random() * 2)
            cluster.remove_node(nodes.pop(trial.random.randrange(len(nodes))), allow_graceful=False)
            nodes.append(cluster.add_node(num_cpus=1, wait=False))
        trial.note(command.end())
    finally:
        cluster.shutdown()


def link_down(trial: Trial) -> None:
    """A machine's cable is pulled, and perhaps plugged in again before its node is given up."""
    from machines import Machines

    with Machines(3) as machines, machines.popen(0, "raysim", *trial.arguments(machines.address)) as process:
        assert process.stdout
        begun = next((line for line in process.stdout if line.startswith("round")), "")
        time.sleep(trial.random.random() * 3)
        machines.link(victim := trial.random.choice((1, 2)), up=False)
        time.sleep(trial.random.random() * 20)
        machines.link(victim, up=True)
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            process.returncode = None
        trial.note(Ended(process.returncode, begun + output))


def few_processes(trial: Trial) -> None:
    """There may be but a few processes and threads: Ray cannot come up, or loses some of its own."""
    trial.note(trial.start(FewProcesses(trial.random.randint(4, 400))).end())


def memory_runs_out(trial: Trial) -> None:
    """A client takes memory until Ray's memory monitor ends a process, the first time that it trains in some round."""
    methods = [*CASES[trial.case].get("client", []), "hungry"]
    trial.setup = Hungry(str(trial.folder / "has eaten"), trial.random.randint(1, ROUNDS - 1))
    trial.note(trial.start(client=methods).end())


def client_hangs(trial: Trial) -> None:
    """A client waits for ever, the first time that it trains in some round: its actor is replaced."""
    methods = [*CASES[trial.case].get("client", []), "hangs"]
    trial.setup = Hangs(str(trial.folder / "has hung"), trial.random.randint(1, ROUNDS - 1))
    trial.note(trial.start(client=methods).end())


def shared_memory_full(trial: Trial) -> None:
    """Little is left of /dev/shm, where Ray's object store would be."""
    trial.note(trial.start(LittleSharedMemory(trial.random.randint(8, 200))).end())


def spilling(trial: Trial) -> None:
    """Client states that are larger than the object store."""
    trial.note(trial.start().end())


@dataclass(frozen=True)
class Fault:
    disturb: Callable[[Trial], None]
    engine: Any = "local"
    root: bool = False  # it mounts a disk or is somebody else
    tool: str = ""  # a command that it needs
    kept: bool = False  # on a cluster that `raysim up` has started, the same for all trials
    changes: dict[str, Any] = field(default_factory=dict)  # of the configuration


RAY = {"ray": {"clients_per_actor": 2}}
FAULTS = {
    "kill_at_file": Fault(kill_at_file),
    "kill_at_each_file": Fault(kill_at_each_file),
    "kill_command": Fault(kill_command),
    "disk_full": Fault(disk_full, root=True),
    "quota": Fault(quota, root=True, tool="mkfs.btrfs"),
    "read_only": Fault(read_only),
    "few_descriptors": Fault(few_descriptors),
    "clock_set_back": Fault(clock_set_back),
    "client_fault": Fault(client_fault),
    "links": Fault(links),
    "kill_host": Fault(kill_host, RAY),
    "kill_driver": Fault(kill_driver, RAY),
    "storm": Fault(storm, RAY),
    "storm_on_kept": Fault(storm, RAY, kept=True),
    "kill_cluster": Fault(kill_cluster, RAY),
    "memory_runs_out": Fault(memory_runs_out, RAY),
    "client_hangs": Fault(client_hangs, {"ray": {"clients_per_actor": 2, "client_timeout": 10}}),
    "nodes_come_and_go": Fault(nodes_come_and_go, RAY),
    "link_down": Fault(
        link_down, RAY, root=True,
        changes={"data": {  # clients that take a while
            "name": {"synthetic": {"samples": 6000, "shape": [1, 8, 8], "classes": 4}},
            "partition": {"dirichlet_counts": {"alpha": 0.8, "clients": 8, "min_size": 6}},
        }},
    ),
    "few_processes": Fault(few_processes, RAY, root=True),
    "shared_memory_full": Fault(shared_memory_full, RAY, root=True),
    "spilling": Fault(
        spilling, {"ray": {"clients_per_actor": 2, "state_bytes": 80 << 20}},
        changes={"model": {"name": "mlp", "options": {"hidden": [4000, 1000]}}},
    ),
}  # fmt: skip


@contextmanager
def kept_cluster(folder: Path) -> Iterator[Command]:
    """Of `raysim up`, ended by `raysim down`; yields the command, whose mark the cluster's processes carry."""
    up = Command("up", log=folder / "log-up")
    if up.end().code:
        raise RuntimeError(f"no cluster is up:\n{up.end().output}")
    try:
        yield up
    finally:
        Command("down", log=folder / "log-down").end()


def simulate(fault: str, case: str, seed: int, folder: Path, kept: Command | None = None) -> Trial:
    """One trial. `folder` is for all trials: the undisturbed runs are kept there."""
    of = FAULTS[fault]
    reference = folder / f"undisturbed-{case}{f'-{fault}' if of.changes else ''}"
    if not (reference / "result.json").exists():
        shutil.rmtree(reference, ignore_errors=True)
        file = folder / f"{case}.yaml"
        file.write_text(yaml.safe_dump(configuration(case, "local") | of.changes))
        ended = Command("run", file, "--out", reference, log=folder / f"log-{case}").end()
        if ended.code != 0:
            raise RuntimeError(f"the undisturbed run of {case} failed:\n{ended.output}")
    own = Path(tempfile.mkdtemp(prefix=f"{fault}-{case}-", dir=folder))
    trial = Trial(case, random.Random(f"{fault} {case} {seed}"), own, of.engine, of.changes, kept=kept)
    of.disturb(trial)
    trial.complete(reference)
    return trial


@dataclass
class Tried:
    """How trials have ended, by fault."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    kills: Counter[str] = field(default_factory=Counter)
    said: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, fault: str, trial: Trial) -> None:
        end = "problem" if trial.problems else "sentence, then the same bits" if trial.said else "same bits"
        self.counts[fault][end] += 1
        self.kills[fault] += trial.kills
        self.said[fault].update(trial.said)
        for problem in trial.problems:
            print(f"{trial.folder.name}: {problem}", flush=True)
        shutil.rmtree(trial.folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40, help="of each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    tried = Tried()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(prefix="rc", dir="/tmp") as clusters,  # a short path: Ray's sockets lie there
    ):
        os.environ["RAY_TMPDIR"] = clusters  # where no `raysim up` of somebody else is found
        for fault in args.faults:
            if FAULTS[fault].root and os.getuid():
                print(f"{fault}: left out, it needs root")
                continue
            if FAULTS[fault].tool and not shutil.which(FAULTS[fault].tool):
                print(f"{fault}: left out, it needs {FAULTS[fault].tool}")
                continue
            with kept_cluster(Path(folder)) if FAULTS[fault].kept else nullcontext() as kept:
                for i in range(args.trials):
                    case = args.cases[i % len(args.cases)]
                    tried.add(fault, simulate(fault, case, args.seed + i, Path(folder), kept))
            print(fault, dict(tried.counts[fault]), f"{tried.kills[fault]} kills", flush=True)
    from raysim.store.manifest import manifest

    result = {"command": " ".join(sys.argv), **vars(tried), "machine": manifest("", 0, {})}
    out = Path(__file__).parent / "results" / f"chaos-{time.strftime('%Y-%m-%dT%H%M')}.json"
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(out)
    if any("problem" in ends for ends in tried.counts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
