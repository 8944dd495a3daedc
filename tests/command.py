"""Commands that tests start, as real processes. A test meets them at lines of their output and at gates, never at a time."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import select
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

TESTS = Path(__file__).parent
PYTHONPATH = os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "installed")))
"""What commands import raysim and `sabotage` from, and find its `Waits` installed."""
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "pandas", "raysim.federation.remote", "raysim.api.terminal", "raysim.cli.app"])


class Command:
    """`raysim` in a session of its own, as in a terminal; forked from a process that has imported everything, which takes
    seconds. Threads read its output to the end. Whatever it starts carries its mark."""

    started: ClassVar[list[Command]] = []  # by the test that is running; `attached` shows their output where it fails
    python = False  # whether the words are those of `python`

    def __init__(self, *words: object, folder: Path | None = None, **environment: str):
        self.words, self.mark = [*map(str, words)], uuid4().hex
        self.lines: list[
            tuple[int, str]
        ] = []  # of the standard output (1) and error (2), in the order in which they came
        self._news, self._open = threading.Condition(), 2
        ours = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        ours |= {"PYTHONPATH": PYTHONPATH, "RAYSIM_TEST": self.mark} | environment
        pipes = [SERVER.Pipe(duplex=False) for _ in range(2)]
        ends = [write for _, write in pipes]
        target = _python if self.python else _raysim
        self.process = SERVER.Process(target=_started, args=(target, self.words, folder or Path.cwd(), ours, *ends))
        self.process.daemon = True
        self.process.start()
        self.started.append(self)
        self._readers = [
            threading.Thread(target=self._read, args=(number, read), daemon=True)
            for number, (read, _) in enumerate(pipes, 1)
        ]
        for end, reader in zip(ends, self._readers, strict=True):
            end.close()
            reader.start()

    def _read(self, number: int, pipe: Connection) -> None:
        with open(pipe.fileno(), errors="replace", closefd=False) as lines:
            for line in lines:
                with self._news:
                    self.lines.append((number, line))
                    self._news.notify_all()
        with self._news:
            self._open -= 1
            self._news.notify_all()

    def wait_for(self, text: str) -> None:
        """Return when a line with `text` has been printed. It is an error if the output ends without."""
        with self._news:
            while not any(text in line for _, line in self.lines):
                assert self._open, f"{text!r} never came:\n{self.output}"
                self._news.wait()

    def end(self) -> int:
        """Its exit code, as soon as it has ended and so has its output."""
        for reader in self._readers:
            reader.join()
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        return code

    def signal(self, number: int) -> None:
        """To it alone; a terminal's Ctrl-C goes to its whole group."""
        os.kill(self.process.pid or 0, number)

    @property
    def output(self) -> str:
        return "".join(line for _, line in self.lines)

    @property
    def out(self) -> str:
        return "".join(line for number, line in self.lines if number == 1)

    @property
    def err(self) -> str:
        return "".join(line for number, line in self.lines if number == 2)

    def processes(self) -> dict[int, str]:
        """Of what it has started and what is still there: command lines by process id."""
        return marked(f"RAYSIM_TEST={self.mark}\0")

    def wait_for_all(self, *but: str) -> None:
        """Return when all that it has started has ended, `but` what is called so. pytest's time-out is the only limit; the
        report of the test then says what is left."""
        while left := [process for process, line in self.processes().items() if not line.startswith(but)]:
            for process in left:
                wait_for_end(process)

    def kill(self) -> None:
        """End it and all that it has started."""
        self.process.kill()
        self.process.join()
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


class Python(Command):
    """`python` with a script, `-c CODE` or `-m raysim`, in a folder; it knows nothing but raysim."""

    python = True


def python(*words: object, folder: Path, **environment: str) -> Python:
    """One that has ended."""
    command = Python(*words, folder=folder, **environment)
    command.end()
    return command


def _started(
    target: Callable[[list[str]], None], words: list[str], folder: Path, environment: dict[str, str], out: Connection,
    err: Connection,
) -> None:  # fmt: skip
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path += [path for path in environment["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    target(words)


def _raysim(words: list[str]) -> None:
    sys.argv = ["raysim", *words]
    from raysim.cli.app import main

    main()


def _python(words: list[str]) -> None:
    if words[:2] == ["-m", "raysim"]:
        _raysim(words[2:])
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, os.getcwd())
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def marked(text: str) -> dict[int, str]:
    """Command lines, by process id, of living processes with `text` in the environment that they were started with."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is not ours to look at
            if text.encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def wait_for_end(process: int) -> None:
    """Return when there is no such process, or only what its parent has not asked for yet."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process)
        try:
            select.select([descriptor], [], [])
        finally:
            os.close(descriptor)


@contextmanager
def held(gate: Path) -> Iterator[None]:
    """A block in which a client waits at the gate, a FIFO (see `sabotage.Waits`). Those that come afterwards pass."""
    with gate.open("w"):  # which returns when a client has opened it, too
        gate.unlink()
        yield
