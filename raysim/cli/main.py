"""The command line. Heavy imports wait inside the commands, so that help comes at once."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from raysim.cli.play import aligned, faults_of, play

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
            status = play(settings, folder, address, resume=False)
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
        status = play(load(folder / "config.yaml"), folder, address, resume=True)
    raise typer.Exit(status)


RunPaths = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold some.")]
Target = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Accuracy to reach, a fraction; default: a whole percentage that every run reached."
    ),
]


Seeds = Annotated[str, typer.Option(metavar="SEED,SEED,...", help="Play everything with each of these seeds.")]
Parallel = Annotated[
    str, typer.Option(metavar="N|auto", help="Runs at a time, each a process of its own; auto: as the machine carries.")
]


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
    parallel: Parallel = "1",
    address: Address = None,
) -> None:
    """Run a grid of configurations, compare them; the same command continues what was stopped."""
    from raysim.sweep.sweep import compare, grid, play_all

    with reported():
        points = grid(config, overrides or (), numbers(seeds), out)
        status = play_all(points, address, at_once(parallel))
        if status < 128:  # who stops it does not wait for a report
            compare(points, out / "report.html", target)
    raise typer.Exit(status)


class Scale(StrEnum):
    """How much of a paper's table `raysim reproduce` runs."""

    full = "full"
    small = "small"


@app.command()
def reproduce(
    item: Annotated[str, typer.Argument(metavar="ITEM", help="A table or figure, such as fedlws/table1.")] = "",
    listed: Annotated[bool, typer.Option("--list", help="Name them all, and the data they need.")] = False,
    scale: Annotated[Scale, typer.Option(help="As the paper has it, or what takes minutes.")] = Scale.full,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the data are; default: RAYSIM_DATA.")] = None,
    seeds: Seeds = "",
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs; default: runs/reproduce/ITEM-SCALE.")
    ] = None,
    parallel: Parallel = "1",
    address: Address = None,
) -> None:
    """Run a table or figure of a paper and print it beside the paper's numbers; the same command continues."""
    from raysim.config import ConfigError
    from raysim.sweep.reproduce import find, items, listing
    from raysim.sweep.sweep import play_all

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
        status = play_all(list(points.values()), address, at_once(parallel))
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


@app.command()
def measure(
    name: Annotated[str, typer.Argument(metavar="NAME", help="rescaling, hessian, ...: raysim list instruments.")],
    runs: RunPaths,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="OPTION=VALUE", help="Set an option: samples=2000.")
    ] = None,
) -> None:
    """Measure saved runs with one of the papers' instruments; `raysim plot` and `report` show what it found."""
    from raysim.analysis import MEASURES
    from raysim.analysis.measure import need, write
    from raysim.config import Catalogue, read_entry
    from raysim.report.runs import find

    with reported():
        wanted = read_entry(Catalogue("measure", MEASURES), name, overrides or ())
        need(wanted)
        from raysim.analysis.saved import SavedRun

        for one in find(runs):
            taken = write(name, wanted, SavedRun(one.folder))
            print(f"{one.folder}: {taken.sentence}", flush=True)


class Listed(StrEnum):
    """What `raysim list` can show."""

    methods = "methods"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"
    instruments = "instruments"
    sinks = "sinks"
    figures = "figures"


@app.command("list")
def list_(what: Annotated[Listed, typer.Argument(metavar="|".join(Listed))]) -> None:
    """Name all that a configuration can use, one line each, with its source."""
    rows = []
    with reported():
        for role, entries in catalogues(what).items():
            rows += [(role, name, first_line(entry)) for name, entry in entries.items()]
    if what is Listed.models:
        rows.append(("model", "…", "any classification model of torchvision, by its name there, such as resnet50."))
    print("\n".join(aligned(rows)) or f"There are no {what} yet.")


@app.command()
def explain(
    name: Annotated[
        str | None, typer.Argument(help="A section, setting, method or other entry; default: all sections.")
    ] = None,
) -> None:
    """Say what a setting or a method's option may be, what it is by default, and what it does."""
    from raysim.cli.explain import explain as explanation

    with reported():
        print(explanation(name))


@data_app.command("show")
def data_show(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="PNG", help="Image; default: NAME-partition.png, here.")] = None,
) -> None:
    """Show who holds what: a table, and a bubble chart of clients and classes."""
    from raysim.config import load
    from raysim.federation import partitioned
    from raysim.report.partition import bubble_chart

    with reported():
        settings = load(config, overrides or ())
        data, partition = partitioned(settings)
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
    from raysim.cli.doctor import report

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
    except BrokenPipeError:  # who read our lines, such as `head`, has had enough: the command line ends quietly
        raise
    except Exception as error:
        if (faults := faults_of(error)) is None:
            raise
        from raysim.config import ConfigError

        print("\n".join(faults), file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


def numbers(seeds: str) -> list[int]:
    """`8,9,10` as a list."""
    from raysim.config import ConfigError

    try:
        return [int(seed) for seed in seeds.split(",") if seed]
    except ValueError:
        raise ConfigError(f"--seeds {seeds}: must be whole numbers between commas, such as 8,9,10.") from None


def at_once(parallel: str) -> int | None:
    """`--parallel` as a number; None: as many as the machine carries."""
    from raysim.config import ConfigError

    if parallel != "auto" and not (parallel.isdecimal() and int(parallel)):
        raise ConfigError(f"--parallel {parallel}: must be a whole number > 0, or auto.")
    return None if parallel == "auto" else int(parallel)


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
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be made: {error.strerror}.") from None
        return out
    stem, number = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while True:
        folder = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another run of that name began in the same second
            number += 1
        except OSError as error:
            raise ConfigError(f"record.dir: {folder} cannot be made: {error.strerror}.") from None


# ---------------------------------------------------------------------------------------------- lines for people


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
    if what is Listed.sinks:
        from raysim.store.sinks import SINKS

        return {"sink": SINKS}
    if what is Listed.figures:
        from raysim.report import need

        need("matplotlib.figure")
        from raysim.report.figures import FIGURES

        return {"figure": {name: entry.draw for name, entry in FIGURES.items()}}
    from raysim.analysis import INSTRUMENTS, MEASURES

    return {"observer": INSTRUMENTS, "measure": MEASURES}


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
    usual = warnings.formatwarning

    def shown(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        ours = Path(filename).is_relative_to(Path(__file__).parents[1])
        return f"raysim: {message}\n" if ours else usual(message, category, filename, lineno, line)

    warnings.formatwarning = shown
    app(prog_name="raysim")
