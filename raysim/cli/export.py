"""`raysim table`, `raysim export` and `raysim schema`: what other programs read."""

from __future__ import annotations

import io
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raysim.api.errors import reported
from raysim.api.lines import aligned
from raysim.paths import below

if TYPE_CHECKING:
    from raysim.report.runs import Run

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


class To(StrEnum):
    """The format of an exported model, which is also the ending of its file but for torch's."""

    torch = "torch"
    safetensors = "safetensors"
    onnx = "onnx"


def table(
    folder: RunFolder,
    name: Annotated[
        str | None, typer.Argument(metavar="[TABLE]", help="rounds, clients, ...; without: list them.")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="As comma-separated values; what is null is empty.")] = False,
) -> None:
    """Print a table of a run, finished or still growing."""
    from raysim.report.runs import Run

    with reported():
        run = Run(folder)
        if name is None:
            print("\n".join(aligned([(name, f"{run[name].num_rows:,} rows") for name in run.tables])))
            return
        rows = run[name]
        if csv:
            import pyarrow.csv

            text = io.BytesIO()
            pyarrow.csv.write_csv(rows, text, pyarrow.csv.WriteOptions(quoting_style="needed"))
            print(text.getvalue().decode(), end="")
            return
        cells = zip(*(map(_cell, column.to_pylist()) for column in rows.columns), strict=True)
        print("\n".join(aligned([tuple(rows.column_names), *cells], ">")))


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def export(
    folder: RunFolder,
    to: Annotated[To, typer.Option(metavar="|".join(To), help="torch: a state_dict for torch.load.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: NAME.pt, .safetensors or .onnx, here.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The model of the best evaluation (record.keep_best).")] = False,
) -> None:
    """Write a run's global model for other programs: they need no raysim to open it."""
    from raysim.report.runs import Run
    from raysim.store.atomic import write_json
    from raysim.store.documents import read_json
    from raysim.store.manifest import DATA, DataForm

    with reported():
        run = Run(folder)
        path = out or below(Path(), f"{folder.resolve().name}.{'pt' if to is To.torch else to.value}")
        _write_model(run, "best" if best else "final", to, path)
        print(path)
        if (run.folder / DATA).exists():  # not of an older run
            beside = path.with_name(f"{path.name}.json")
            write_json(beside, read_json(run.folder / DATA, DataForm))
            print(beside)


def _write_model(run: Run, which: Literal["final", "best"], to: To, path: Path) -> None:
    from raysim.lazy import torch
    from raysim.report import ReportError, need
    from raysim.store.atomic import replacing

    if to is To.onnx:
        need("onnx", "onnxscript", extra="onnx")
        model = run.model(which)
    else:
        state = run.tensors(which)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        if to is To.torch:
            torch.save(state, temporary)
        elif to is To.safetensors:
            from safetensors.torch import save_file

            save_file(state, temporary)
        else:
            inputs = run.manifest["inputs"]
            dtype = torch.float32 if inputs["vocab"] is None else torch.long
            try:
                torch.onnx.export(
                    model, (torch.zeros(2, *inputs["shape"], dtype=dtype),), temporary, input_names=["input"],
                    output_names=["output"], dynamic_shapes=({0: torch.export.Dim("batch")},), external_data=False,
                    verbose=False,
                )  # fmt: skip
            except Exception as error:
                why = f"{error}".strip().partition("\n")[0]
                raise ReportError(f"{run.folder}: torch cannot write this model as ONNX: {why}") from error


def schema(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there; default: print it.")] = None,
) -> None:
    """The JSON schema of a configuration, by which editors complete keys and underline mistakes."""
    from raysim.config.json_schema import json_schema
    from raysim.store.atomic import replacing

    with reported():
        text = json.dumps(json_schema(), indent=1, ensure_ascii=False)
        if out is None:
            print(text)
            return
        with replacing(out) as path:
            path.write_text(f"{text}\n", encoding="utf-8")
        print(out)
