"""`raysim list`, `raysim explain` and `raysim data`: what there is to choose from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from raysim.api.errors import reported
from raysim.api.lines import aligned, unused
from raysim.cli import complete
from raysim.cli.options import Changes, ConfigName, Overrides
from raysim.paths import below
from raysim.printable import printable
from raysim.registry import REGISTRY


class Listed(StrEnum):
    """What `raysim list` can show."""

    methods = "methods"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"
    transforms = "transforms"
    attacks = "attacks"
    selections = "selections"
    traits = "traits"
    availabilities = "availabilities"
    tasks = "tasks"
    schedules = "schedules"
    instruments = "instruments"
    sinks = "sinks"
    figures = "figures"


def list_(
    what: Annotated[Listed, typer.Argument(metavar="|".join(Listed))],
    as_json: Annotated[bool, typer.Option("--json", help="As a list of objects: role, name, about.")] = False,
) -> None:
    """Name all that a configuration can use, one line each, with its source."""
    rows = []
    with reported():
        for role, entries in catalogues(what).items():
            rows += [(role, name, first_line(entry)) for name, entry in entries.items()]
    if what is Listed.models:
        rows.append(("model", "…", "any classification model of torchvision, by its name there, such as resnet50."))
    if as_json:
        keys = ("role", "name", "about")
        print(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], ensure_ascii=False, indent=1))
        return
    print("\n".join(aligned(rows)) or f"There are no {what} yet.")


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A section, setting, method or other entry; default: all sections.", autocompletion=complete.explained
        ),
    ] = None,
) -> None:
    """Say what a setting or a method's option may be, what it is by default, and what it does."""
    from raysim.cli.explain import explain as explanation

    with reported():
        print(explanation(name))


def data_show(
    config: ConfigName,
    changes: Changes = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="PNG", help="Image; default: NAME-partition.png, here.")] = None,
) -> None:
    """Show who holds what: a table, and a bubble chart of clients and classes."""
    from raysim.config import load
    from raysim.config.shipped import find
    from raysim.federation import partitioned
    from raysim.report.partition import partition_chart

    with reported():
        settings = load(find(config), [*(overrides or ()), *(changes or ())])
        data, partition = partitioned(settings)
        counts = partition.label_counts(data)  # [N, C]
        for line in partition_table(partition, counts):
            print(line)
        if left_out := len(partition.unused(data)):
            print(unused(left_out, len(data.y)))
        path = out or below(Path(), f"{settings.name}-partition.png")
        try:
            partition_chart(counts, data.label_names, f"{data.name}, {partition.clients} clients").save(path)
        except ImportError as error:  # the table is worth having without the chart
            print(f"raysim: no chart: {error}", file=sys.stderr)
        else:
            print(f"\nThe chart of clients and classes is in {printable(str(path.resolve()))}")


def data_devices(
    file: Annotated[
        Path,
        typer.Argument(help="FedScale's client_device_capacity or client_behave_trace, or FLASH's state_traces.json."),
    ],
    out: Annotated[Path, typer.Argument(metavar="PARQUET", help="The table to write.")],
) -> None:
    """Write measured devices, or when they were available, as a table that `clock` reads."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    from raysim.data.devices import read_devices
    from raysim.store.atomic import replacing

    with reported():
        columns = read_devices(file)
        with replacing(out) as temporary:
            write_table(pa.table(columns), temporary)
        print(f"{printable(str(out))}: {len(columns['client']):,} rows of {', '.join(columns)}")


def catalogues(what: Listed) -> dict[str, Mapping[str, Any]]:
    """Role → entries."""
    if what is Listed.figures:
        from raysim.report import need

        need("matplotlib.figure")
        from raysim.report.figures import FIGURES

        return {"figure": {name: entry.of for name, entry in FIGURES.items()}}
    several = {"methods": ("client", "weighting", "server"), "instruments": ("instrument", "measure")}
    kinds = several.get(what, (what.removesuffix("s"),))
    return {"observer" if kind == "instrument" else kind: REGISTRY.table(kind) for kind in kinds}


def first_line(entry: Any) -> str:
    return (entry.__doc__ or "").strip().partition("\n")[0]


def partition_table(partition: Any, counts: Any) -> list[str]:
    """One line a client, with its training samples by class where they fit; then the server, and clients without data.

    `counts` [N, C] are the training samples of each client and class.
    """
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
