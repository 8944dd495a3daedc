"""One run from the command line: playing it, showing how it goes, stopping it when asked to."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysim.config import Config
    from raysim.engine.ray.placement import Resources


class Interrupts:
    """Ctrl-C and SIGTERM: the first waits for the round in progress, the second stops at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.patient = False  # nothing is worth waiting for before the first round

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        return self

    def install(self) -> None:
        for number in self._before:
            signal.signal(number, self._on)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on(self, number: int, frame: object) -> None:
        first, self.received = self.received is None, number
        if not (first and self.patient):
            raise KeyboardInterrupt
        os.write(2, b"\nStopping after this round; once more stops at once.\n")  # print is not safe in a signal handler

    @property
    def status(self) -> int:
        return 128 + (self.received or signal.SIGINT)


def play(
    config: Config, folder: Path, address: str | None = None, *, resume: bool, resources: Resources | None = None
) -> int:
    """Run to the end, or to Ctrl-C; returns the exit code. What was started is stopped, however it ends.

    `resources` are the run's part of a cluster that it shares; without, it takes what is free.
    """
    from raysim.config import check_unchanged

    interrupts = Interrupts()
    try:
        with interrupts, claimed(folder):
            if resume:
                check_unchanged(config, folder)
                for change in moved(folder):
                    print(
                        f"raysim: {change}; bits may differ from those of a run that was not stopped", file=sys.stderr
                    )
                if result := finished(config, folder):
                    print(f"This run is complete.\n{ending(result)}", flush=True)
                    return 0
            with engine(config, address, resources) as launch:
                interrupts.install()  # again: Ray has put its own handler of SIGTERM in place
                federation = launch(config, folder, resume)
                try:
                    print(header(config), flush=True)
                    return _rounds(federation, folder, interrupts)
                finally:
                    federation.close()
    except KeyboardInterrupt:
        print(f"\nStopped at once. {way_on(folder)}", file=sys.stderr)
        return interrupts.status


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """The run in `folder` is played by one process at a time. Raises `ConfigError` where another does."""
    from raysim.config import ConfigError

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another process is playing this run; wait until it has ended.") from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            if list(folder.iterdir()) == [path]:  # a launch that failed leaves nothing behind
                path.unlink()


def moved(folder: Path) -> list[str]:
    """In what the machine differs from the one that the run in `folder` began on, where low bits depend on it."""
    from raysim.store.records import begun, manifest

    then, now = begun(folder), manifest("", 0, {})
    deciding = (("versions", "torch"), ("hardware", "cpu"), ("hardware", "cpu_capability"))
    pairs = [(key, then.get(part, {}).get(key), now[part][key]) for part, key in deciding if then]
    return [f"the run began with {key} {was}, and this is {is_}" for key, was, is_ in pairs if was != is_]


def finished(config: Config, folder: Path) -> dict[str, Any] | None:
    """What a run that has played all its rounds ended with."""
    path = folder / "result.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return result | {"folder": folder} if result.get("rounds") == config.rounds.total else None


def check_address(address: str | None) -> None:
    from raysim.cli.doctor import answers
    from raysim.config import ConfigError

    joined = address or os.environ.get("RAY_ADDRESS", "")
    if not answers(joined):  # Ray would try for many minutes, deaf to Ctrl-C
        raise ConfigError(f"{'--address' if address else 'RAY_ADDRESS'}: no Ray cluster answers at {joined}.")


@contextmanager
def engine(
    config: Config, address: str | None, resources: Resources | None
) -> Iterator[Callable[[Config, Path, bool], Any]]:
    from raysim.config import ConfigError, LocalEngineConfig

    if not isinstance(config.engine, LocalEngineConfig):
        from raysim.federation.remote import session

        check_address(address)
        with session(config, address, resources) as launch:
            yield launch
        return
    if address:
        raise ConfigError("--address: engine is local, which joins no cluster. Use --set engine=ray.")
    from raysim.federation import Federation

    yield Federation


def _rounds(federation: Any, folder: Path, interrupts: Interrupts) -> int:
    """Rounds until the run is complete or interrupted."""
    interrupts.patient = True
    shown: set[str] = set()
    played = accepted = 0
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    with Bar() if live else nullcontext() as bar:
        while (summary := federation.step()) is not None:
            if bar:
                bar.show(summary)
            else:
                print(round_line(summary), flush=True)
            played, accepted = played + 1, accepted + summary["clients_ok"]
            for failure in summary["failures"]:
                if failure not in shown:
                    shown.add(failure)
                    print(failure, file=sys.stderr, flush=True)
            if interrupts.received is not None:
                break
    if interrupts.received is not None:
        federation.checkpoint()
        print(f"Stopped. {way_on(folder)}", file=sys.stderr)
        return interrupts.status
    print(ending(federation.finish() | {"folder": folder}), flush=True)
    if played and not accepted:
        print("raysim: no client's model was accepted in any round: the global one never changed", file=sys.stderr)
    return 0


class Bar:
    """The last round and the time left, in the bottom line of a terminal; what is printed meanwhile stands above it."""

    def __enter__(self) -> Bar:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn(), TextColumn("left"),
            refresh_per_second=2,
            redirect_stderr=sys.stderr.isatty(),
            speed_estimate_period=math.inf,  # rounds may take minutes, of which the usual window holds none
        )  # fmt: skip
        self._progress.start()
        self._task: Any = None
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def show(self, summary: Mapping[str, Any]) -> None:
        done, total = summary["round"] + 1, summary["rounds"]
        if self._task is None:  # a resumed run does not begin at 0
            self._task = self._progress.add_task("", total=total, completed=done - 1)
        line = "   ".join((f"round {done:>{len(str(total))}}/{total}", *scores(summary)))
        self._progress.update(self._task, completed=done, description=line)


def way_on(folder: Path) -> str:
    if any((folder / "checkpoints").glob("*.json")):
        return f"`raysim resume {folder}` continues."
    started = (folder / "config.yaml").exists()
    return f"There is no checkpoint yet: `raysim resume {folder}` starts anew." if started else "Nothing was written."


# ---------------------------------------------------------------------------------------------- lines for people


def faults_of(error: Exception) -> Sequence[str] | None:
    """An error of our own, or of files and networks, as sentences; None for any other, which is a bug."""
    if not (isinstance(error, OSError) or type(error).__module__.startswith("raysim.")):
        return None
    from raysim.config import ConfigError

    return error.faults if isinstance(error, ConfigError) else (f"raysim: {error}",)


def header(config: Config) -> str:
    from raysim.config import CLIENTS, ENGINES, SOURCES, STEPS, WEIGHTINGS, name_in

    stack = [name_in(CLIENTS, m) for m in config.client] + [name_in(WEIGHTINGS, m) for m in config.weighting]
    stack = (stack or ["fedavg"]) + [name_in(STEPS, m) for m in config.server]
    clients = config.clients
    share = f"{config.rounds.participation:.0%} of all"
    drawn = f"{config.cohort_size} of {clients}" if clients else share
    parts = [
        config.name,
        " + ".join(stack) + (" (oracle: learns on test samples)" if config.data.proxy.oracle else ""),
        config.model.name,
        f"{name_in(SOURCES, config.data.name)}, {drawn} clients a round",
        f"{name_in(ENGINES, config.engine)} engine",
    ]
    return " | ".join(parts)


def round_line(summary: Mapping[str, Any]) -> str:
    total = str(summary["rounds"])
    return "   ".join(
        (
            f"round {summary['round'] + 1:>{len(total)}}/{total}",
            *scores(summary),
            f"clients {summary['clients_ok']} ok, {summary['clients_failed']} failed",
            f"{summary['seconds']:.2f} s",
        )
    )


def scores(summary: Mapping[str, Any]) -> list[str]:
    """Accuracy, of the global model and of the clients' own, whichever was tested, and loss."""
    accuracy, tested = summary["accuracy"], summary["loss"] is not None
    personal = summary.get("personal_accuracy_micro")
    loss = summary["loss"] if tested else summary["train_loss"]
    return [
        *([f"accuracy {percent(accuracy):>7}"] if personal is None or accuracy is not None else []),
        *([f"personal {percent(personal):>7}"] if personal is not None else []),
        f"{'test' if tested else 'train'} loss {'-' if loss is None else format(loss, '.4f'):>7}".rjust(18),
    ]


SCORES = (("final", "final"), ("best", "best"), ("mean of last 10", "last10"))


def ending(result: Mapping[str, Any]) -> str:
    personal = result.get("personal")
    rows = [
        *([("accuracy", course(result))] if result["final"] is not None or personal is None else []),
        *([("personal", course(personal)), ("clients", spread(personal))] if personal else []),
        ("traffic", f"up {bytes_(result['bytes_up'])}   down {bytes_(result['bytes_down'])}"),
        ("time", f"{result['rounds']} round{'s' * (result['rounds'] != 1)} in {result['seconds']:.1f} s"),
        ("sha256", result["sha256"]),
        ("folder", str(result["folder"])),
    ]
    return "\n" + "\n".join(aligned(rows))


def course(scores: Mapping[str, Any]) -> str:
    """An accuracy over the rounds."""
    return "   ".join(f"{words} {percent(scores[key])}" for words, key in SCORES)


def spread(personal: Mapping[str, Any]) -> str:
    """The clients' own accuracies at the end."""
    mean, std = percent(personal["macro"]), percent(personal["std"])
    return f"mean {mean} ± {std}   worst tenth {percent(personal['worst10'])}   AUC {personal['auc']:.4f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def bytes_(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def aligned(rows: Sequence[tuple[str, ...]], align: str = "<") -> list[str]:
    """Rows as lines whose columns begin (`<`) or end (`>`) together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{c:{align}{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
