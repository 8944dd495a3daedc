"""The command line. Heavy imports wait inside the commands, so that help comes at once."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from raysim.config import Config
    from raysim.sweep import Point

app = typer.Typer(
    help="Federated learning simulated with Ray actors and PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug's traceback belongs in a report as Python prints it
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Look at data before training on it.", no_args_is_help=True)
app.add_typer(data_app, name="data")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, such as configs/quickstart.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a setting: rounds.total=5, server.0.fedlws.beta=0.2."),
]
Address = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Ray cluster to join, as RAY_ADDRESS; without, a local one is started."),
]


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the run; default: in record.dir.")] = None,
    address: Address = None,
) -> None:
    """Simulate the federation that CONFIG describes."""
    from raysim.config import load

    with reported():
        settings = load(config, overrides or ())
        folder = new_folder(out, Path(settings.record.dir), settings.name)
        try:
            status = simulate(settings, folder, address, resume=False)
        finally:
            with suppress(OSError):
                folder.rmdir()  # only works while nothing was written: a launch that failed leaves nothing behind
    raise typer.Exit(status)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that was stopped.")],
    address: Address = None,
) -> None:
    """Continue a run from its last checkpoint, to the same bits as if it had not stopped."""
    from raysim.config import ConfigError, load

    with reported():
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"{folder}: holds no config.yaml, so it is not the folder of a run.")
        status = simulate(load(folder / "config.yaml"), folder, address, resume=True)
    raise typer.Exit(status)


RunPaths = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold some.")]
Target = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Accuracy to reach, a fraction; default: a whole percentage that every run reached."
    ),
]


Seeds = Annotated[str, typer.Option(metavar="SEED,SEED,...", help="Play everything with each of these seeds.")]


@app.command()
def sweep(
    config: ConfigPath,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder in which each run has its own.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=V,V,...", help="Vary a setting: server.0.fedlws.beta=0.01,0.1."),
    ] = None,
    seeds: Seeds = "",
    target: Target = None,
    address: Address = None,
) -> None:
    """Run a grid of configurations, compare them; the same command continues what was stopped."""
    from raysim.sweep import grid

    with reported():
        points = grid(config, overrides or (), numbers(seeds), out)
        status = play_grid(points, address)
        if any(point.finished for point in points):
            compare_grid(points, out / "report.html", target)
    raise typer.Exit(status)


class Scale(StrEnum):
    """How much of a paper's table `raysim reproduce` runs."""

    full = "full"
    small = "small"


@app.command()
def reproduce(
    item: Annotated[str, typer.Argument(metavar="ITEM", help="A table or figure, such as fedlws/table1.")] = "",
    listed: Annotated[bool, typer.Option("--list", help="Name them all, and the data and time they need.")] = False,
    scale: Annotated[Scale, typer.Option(help="As the paper has it, or what takes minutes.")] = Scale.full,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the data are; default: RAYSIM_DATA.")] = None,
    seeds: Seeds = "",
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs; default: runs/reproduce/ITEM-SCALE.")
    ] = None,
    address: Address = None,
) -> None:
    """Run a table or figure of a paper and print it beside the paper's numbers; the same command continues."""
    from raysim.config import ConfigError
    from raysim.reproduce import find, items, listing

    with reported():
        if listed:
            print("\n".join(listing(items())))
            return
        if not item:
            raise ConfigError("raysim reproduce: name a table or figure; `raysim reproduce --list` shows all.")
        wanted, small = find(item), scale is Scale.small
        changes = [*([f"data.root={data}"] if data else []), *(overrides or ())]
        folder = out or Path("runs", "reproduce", f"{item.replace('/', '_')}-{scale}")
        points = wanted.runs(small, numbers(seeds), changes, folder)
        status = play_grid(list(points.values()), address)
        if any(point.finished for point in points.values()):
            print(f"\n{wanted.text(points, small, overrides or ())}")
    raise typer.Exit(status)


@app.command()
def report(
    runs: RunPaths,
    out: Annotated[Path, typer.Option(metavar="HTML", help="The page; it needs no other file.")] = Path("report.html"),
    target: Target = None,
) -> None:
    """Compare runs in one page: tables and figures; runs that differ in the seed alone are averaged."""
    from raysim.report.page import write
    from raysim.report.runs import find

    with reported():
        summary = write(find(runs), out, target)
        print(f"{summary.sentence}\n{out}")


@app.command()
def plot(
    name: Annotated[str, typer.Argument(metavar="NAME", help="accuracy, loss:uplink, ...: raysim list figures.")],
    runs: RunPaths,
    out: Annotated[Path, typer.Option(metavar="FIG", help="Image: .pdf, .svg or .png.")],
) -> None:
    """Draw one figure of one or several runs, for a paper."""
    from raysim.report import need
    from raysim.report.runs import find

    with reported():
        need("matplotlib.figure")
        from raysim.report.figures import draw

        draw(name, find(runs)).save(out)


class Listed(StrEnum):
    """What `raysim list` can show."""

    methods = "methods"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"
    instruments = "instruments"
    figures = "figures"


@app.command("list")
def list_(what: Annotated[Listed, typer.Argument(metavar="|".join(Listed))]) -> None:
    """Name all that a configuration can use, one line each, with its source."""
    rows = []
    with reported():
        for role, entries in catalogues(what).items():
            rows += [(role, name, first_line(entry)) for name, entry in entries.items()]
    print("\n".join(aligned(rows)) or f"There are no {what} yet.")


@data_app.command("show")
def data_show(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="PNG", help="Image; default: NAME-partition.png, here.")] = None,
) -> None:
    """Show who holds what: a table, and a bubble chart of clients and classes."""
    from raysim.config import load
    from raysim.federation import deal
    from raysim.report.partition import bubble_chart

    with reported():
        settings = load(config, overrides or ())
        data, partition = deal(settings)
        counts = partition.label_counts(data)  # [N, C]
        for line in partition_table(partition, counts):
            print(line)
        path = out or Path(f"{settings.name}-partition.png")
        try:
            bubble_chart(counts, data.classes, f"{data.name}, {partition.clients} clients").save(path)
        except ImportError as error:  # the table is worth having without the chart
            print(f"raysim: no chart: {error}", file=sys.stderr)
        else:
            print(f"\nchart  {path}")


@app.command()
def doctor() -> None:
    """Check this machine: versions, CPUs, memory, GPUs, cluster; say what is wrong and what to do."""
    from raysim.doctor import report

    raise typer.Exit(0 if report() else 1)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from raysim import __version__

        print(f"raysim {__version__}")
        raise typer.Exit


# ------------------------------------------------------------------------------------------------------ running


@contextmanager
def reported() -> Iterator[None]:
    """An error of our own, or of files and networks, is a sentence; any other is a bug and keeps its traceback."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, OSError) or type(error).__module__.startswith("raysim.")):
            raise
        from raysim.config import ConfigError

        faults = error.faults if isinstance(error, ConfigError) else (f"raysim: {error}",)
        print("\n".join(faults), file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


def numbers(seeds: str) -> list[int]:
    """`8,9,10` as a list."""
    from raysim.config import ConfigError

    try:
        return [int(seed) for seed in seeds.split(",") if seed]
    except ValueError:
        raise ConfigError(f"--seeds {seeds}: must be whole numbers between commas, such as 8,9,10.") from None


def new_folder(out: Path | None, parent: Path, name: str) -> Path:
    """Make the run's folder: `out`, or NAME-DATE-TIME in `parent`. Refuses a folder that holds anything."""
    from raysim.config import ConfigError

    if out is not None:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out {out}: is a file; name a folder.")
        if out.is_dir() and any(out.iterdir()):
            is_run = (out / "config.yaml").exists()
            way_out = f", or continue with `raysim resume {out}`" if is_run else ""
            raise ConfigError(f"--out {out}: is not empty. Name a new or empty folder{way_out}.")
        out.mkdir(parents=True, exist_ok=True)
        return out
    stem, number = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while True:
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another run of that name began in the same second
            number += 1


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


def simulate(config: Config, folder: Path, address: str | None, *, resume: bool) -> int:
    """Run to the end, or to Ctrl-C; returns the exit code. What was started is stopped, however it ends."""
    interrupts = Interrupts()
    try:
        with interrupts, engine(config, address) as launch:
            interrupts.install()  # again: Ray has put its own handler of SIGTERM in place
            federation = launch(config, folder, resume)
            try:
                print(header(config), flush=True)
                return play(federation, folder, interrupts)
            finally:
                federation.close()
    except KeyboardInterrupt:
        print(f"\nStopped at once. {way_on(folder)}", file=sys.stderr)
        return interrupts.status


def play_grid(points: Sequence[Point], address: str | None) -> int:
    """Play what is not finished, one run after another on one cluster; a run that fails does not keep the others."""
    from raysim.config import RayEngineConfig

    left = [point for point in points if not point.finished]
    print(f"{len(points)} runs, of which {len(points) - len(left)} are finished", flush=True)
    failed = []
    with ExitStack() as stack:
        if any(isinstance(point.config.engine, RayEngineConfig) for point in left):
            from raysim.engine.ray_engine import cluster

            check_address(address)
            stack.enter_context(cluster(address))
        for number, point in enumerate(left, 1):
            print(f"\nrun {number} of {len(left)}", flush=True)
            try:
                status = simulate(point.config, point.folder, address, resume=point.saved)
            except Exception as error:
                ours = isinstance(error, OSError) or type(error).__module__.startswith("raysim.")
                print(f"{point.name}: {error}" if ours else traceback.format_exc(), file=sys.stderr)
                failed.append(point.name)
                continue
            if status:
                print("The same command continues the sweep.", file=sys.stderr)
                return status
    if failed:
        print(f"{len(failed)} runs failed: {', '.join(failed)}. The same command tries them again.", file=sys.stderr)
    return int(bool(failed))


def compare_grid(points: Sequence[Point], page: Path, target: float | None) -> None:
    """Print the comparison of the finished runs and write their report."""
    from raysim.report import MissingExtra
    from raysim.report.page import write
    from raysim.report.runs import Run, compare
    from raysim.report.summary import summarise

    runs = [Run(point.folder) for point in points if point.finished]
    summary = summarise(compare(runs), target)
    for table in (summary.scores, summary.costs):
        print("\n" + "\n".join(aligned(table, ">")))
    try:
        write(runs, page, target)
    except MissingExtra as error:  # the table is worth having without the page
        print(f"raysim: no report: {error}", file=sys.stderr)
    else:
        print(f"\nreport  {page}")


def check_address(address: str | None) -> None:
    from raysim.config import ConfigError
    from raysim.doctor import answers

    joined = address or os.environ.get("RAY_ADDRESS", "")
    if not answers(joined):  # Ray would try for many minutes, deaf to Ctrl-C
        raise ConfigError(f"{'--address' if address else 'RAY_ADDRESS'}: no Ray cluster answers at {joined}.")


@contextmanager
def engine(config: Config, address: str | None) -> Iterator[Callable[[Config, Path, bool], Any]]:
    from raysim.config import ConfigError, LocalEngineConfig

    if not isinstance(config.engine, LocalEngineConfig):
        from raysim.engine.ray_engine import session

        check_address(address)
        with session(config, address) as launch:
            yield launch
        return
    if address:
        raise ConfigError("--address: engine is local, which joins no cluster. Use --set engine=ray.")
    from raysim.federation import Federation

    yield Federation


def play(federation: Any, folder: Path, interrupts: Interrupts) -> int:
    """Rounds until the run is complete or interrupted."""
    interrupts.patient = True
    shown: set[str] = set()
    while (summary := federation.step()) is not None:
        print(round_line(summary), flush=True)
        for failure in summary["failures"]:
            if failure not in shown:
                shown.add(failure)
                print(failure, file=sys.stderr, flush=True)
        if interrupts.received is not None:
            federation.checkpoint()
            print(f"Stopped. {way_on(folder)}", file=sys.stderr)
            return interrupts.status
    print(ending(federation.finish()), flush=True)
    return 0


def way_on(folder: Path) -> str:
    if any((folder / "checkpoints").glob("*.json")):
        return f"`raysim resume {folder}` continues."
    started = (folder / "config.yaml").exists()
    return f"There is no checkpoint yet: `raysim resume {folder}` starts anew." if started else "Nothing was written."


# ---------------------------------------------------------------------------------------------- lines for people


def header(config: Config) -> str:
    from raysim.config import CLIENTS, ENGINES, SOURCES, STEPS, WEIGHTINGS, name_in

    stack = [name_in(CLIENTS, m) for m in config.client] + [name_in(WEIGHTINGS, m) for m in config.weighting]
    stack = (stack or ["fedavg"]) + [name_in(STEPS, m) for m in config.server]
    clients = getattr(config.data.partition, "clients", None)
    share = f"{config.rounds.participation:.0%} of all"
    drawn = f"{config.rounds.cohort_size(clients)} of {clients}" if clients else share
    parts = [
        config.name,
        " + ".join(stack),
        config.model.name,
        f"{name_in(SOURCES, config.data.name)}, {drawn} clients a round",
        f"{name_in(ENGINES, config.engine)} engine",
    ]
    return " | ".join(parts)


def round_line(summary: Mapping[str, Any]) -> str:
    total = str(summary["rounds"])
    tested = summary["loss"] is not None
    loss = summary["loss"] if tested else summary["train_loss"]
    return "   ".join(
        (
            f"round {summary['round'] + 1:>{len(total)}}/{total}",
            f"accuracy {percent(summary['accuracy']):>7}",
            f"{'test' if tested else 'train'} loss {'-' if loss is None else format(loss, '.4f'):>7}".rjust(18),
            f"clients {summary['clients_ok']} ok, {summary['clients_failed']} failed",
            f"{summary['seconds']:.2f} s",
        )
    )


SCORES = (("final", "final"), ("best", "best"), ("mean of last 10", "last10"))


def ending(result: Mapping[str, Any]) -> str:
    rows = [
        ("accuracy", "   ".join(f"{words} {percent(result[key])}" for words, key in SCORES)),
        ("traffic", f"up {bytes_(result['bytes_up'])}   down {bytes_(result['bytes_down'])}"),
        ("time", f"{result['rounds']} round{'s' * (result['rounds'] != 1)} in {result['seconds']:.1f} s"),
        ("sha256", result["sha256"]),
        ("folder", str(result["folder"])),
    ]
    return "\n" + "\n".join(aligned(rows))


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


def catalogues(what: Listed) -> dict[str, Mapping[str, Any]]:
    """Role → entries."""
    if what is Listed.methods:
        from raysim.methods import CLIENTS, STEPS, WEIGHTINGS

        return {"client": CLIENTS, "weighting": WEIGHTINGS, "server": STEPS}
    if what is Listed.models:
        from raysim.models import MODELS

        return {"model": MODELS}
    if what is Listed.datasets:
        from raysim.data import SOURCES

        return {"dataset": SOURCES}
    if what is Listed.partitions:
        from raysim.data import PARTITIONS

        return {"partition": PARTITIONS}
    if what is Listed.figures:
        from raysim.report import need

        need("matplotlib.figure")
        from raysim.report.figures import FIGURES

        return {"figure": {name: entry.draw for name, entry in FIGURES.items()}}
    from raysim.config import INSTRUMENTS

    return {"instrument": INSTRUMENTS}


def first_line(entry: Any) -> str:
    return (entry.__doc__ or "").strip().partition("\n")[0]


def partition_table(partition: Any, counts: Any) -> list[str]:
    """One line a client, with its training samples by class where they fit; then the server, and what is amiss."""
    tests, vals = ([len(rows) for rows in split] for split in (partition.test, partition.val))
    held = {"test": tests, "val": vals}
    extra = [name for name, sizes in held.items() if any(sizes)]
    by_class = counts.shape[1] <= 20
    names = [f"c{c}" for c in range(counts.shape[1])] if by_class else ["classes", "largest"]
    rows = [("client", "train", *extra, *names)]
    for client, row in enumerate(counts):
        share = row.max() / max(row.sum(), 1)
        cells = [str(n) if n else "." for n in row] if by_class else [str((row > 0).sum()), f"{share:.0%}"]
        rows.append((str(client), str(row.sum()), *(str(held[name][client]) for name in extra), *cells))
    sizes = counts.sum(1)
    lines = aligned(rows, ">")
    lines += ["", f"{len(sizes)} clients, {sizes.sum():,} training samples: {sizes.min():,} to {sizes.max():,} each"]
    lines += [f"server: {len(partition.server_test):,} test samples, {len(partition.proxy):,} proxy samples"]
    if empty := [str(client) for client, size in enumerate(sizes) if size == 0]:
        lines += [f"clients without training samples: {', '.join(empty)} (they are never trained)"]
    return lines


def main() -> None:
    app(prog_name="raysim")


if __name__ == "__main__":
    main()
