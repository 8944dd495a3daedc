"""Pages that are written from raysim itself when the documentation is built: the reference, and the gallery of figures.

What stands there comes from the classes that read a configuration, so it cannot grow old.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from raysim.cli.explain import Topic, topics
from raysim.report.figures import FIGURES, caption
from raysim.store.tables import OPEN, TABLES

DOCS = Path(__file__).parents[1]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
LEARNS = max((DOCS.parent / "benchmarks/results").glob("learns-*.md"))


def on_files(files: Files, config: Any) -> Files:
    """What MkDocs calls once it has found the written pages."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Path → Markdown of every page that is not written by hand."""
    of = {kind: [topic for topic in topics() if topic.kind == kind] for kind in {topic.kind for topic in topics()}}
    return {
        "reference/settings.md": page(
            "Settings",
            "Every section of a configuration. `raysim explain` says the same in a terminal.",
            [("Sections", of["section"]), ("Engines", of["engine"]), ("Sinks", of["sink"]), ("Presets", of["preset"])],
        ),
        "reference/methods.md": page(
            "Methods",
            "Methods compose: any `client` methods, one or more `weighting`s, any `server` steps.",
            [(f"`{role}`", of[kind]) for role, kind in (
                ("client", "client method"), ("weighting", "weighting"), ("server", "server step"),
            )],
        ),
        "reference/transforms.md": page(
            "Transforms", "What `upload` and `download` list: how messages are encoded.", [("", of["transform"])]
        ),
        "reference/attacks.md": page("Attacks", "What `attack` lists: what malicious clients send.", [("", of["attack"])]),
        "reference/selections.md": page(
            "Selections", "What `rounds.selection` names: who takes part in a round.", [("", of["selection"])]
        ),
        "reference/availabilities.md": page(
            "Availabilities", "When clients can be asked: what `clock.availability` names.", [("", of["availability"])]
        ),
        "reference/traits.md": page(
            "Traits", "What `clock.speed`, `clock.up`, `clock.down` and `clock.latency` name.", [("", of["trait"])]
        ),
        "reference/models.md": page(
            "Models", "Besides these, every classification model of torchvision has its name there.", [("", of["model"])]
        ),
        "reference/data.md": page(
            "Data sets and partitions",
            "What `data.name` and `data.partition` may be.",
            [("Data sets", of["data set"]), ("Partitions", of["partition"]), ("Augmentations", of["augmentation"])],
        ),
        "reference/schedules.md": page(
            "Schedules", "What `local.lr_schedule` and the `eta_schedule` of a server step list.", [("", of["schedule"])]
        ),
        "reference/instruments.md": page(
            "Instruments",
            "Observers look at every round; measures look at a saved run.",
            [("Observers", of["observer"]), ("Measures", of["measure"])],
        ),
        "reference/tables.md": "\n".join(tables()),
        "gallery.md": "\n".join(gallery()),
        **{f"notebooks/{path.stem}.md": "\n".join(notebook(path)) for path in NOTEBOOKS},
        "all-methods.md": f"# All methods on one federation\n\n{LEARNS.read_text(encoding='utf-8')}",
    }  # fmt: skip


def page(title: str, about: str, parts: Iterable[tuple[str, list[Topic]]]) -> str:
    lines = [f"# {title}", "", about, ""]
    for heading, entries in parts:
        lines += [f"## {heading}", ""] if heading else []
        for topic in entries:
            lines += [f"### {topic.name or 'The whole'}", "", *prose(topic.about), ""]
            lines += table(
                ("key", "default", "what it is"), [(f"`{r.key}`", shown(r.default), r.about) for r in topic.rows]
            )
    return "\n".join(lines)


def prose(text: str) -> list[str]:
    """A docstring as Markdown: its indented parts are code, its other lines stay as they are."""
    return [re.sub(r"([*<\[])", r"\\\1", line) if not line.startswith("    ") else line for line in text.splitlines()]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    body = ["| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *body, ""] if body else []


def shown(default: str) -> str:
    return f"`{default}`" if default else ""


def tables() -> Iterator[str]:
    yield from [
        "# Tables of a run",
        "",
        'Each is a folder of Parquet files in the run\'s folder: `run["rounds"]` reads it.',
    ]
    for name, schema in TABLES.items():
        yield from ["", f"## {name}", ""]
        rows = [(field, "may be null" if field.nullable else "") for field in schema]
        cells = [
            (f"`{f.name}`", str(f.type), f.metadata[b"unit"].decode(), f.metadata[b"description"].decode(), null)
            for f, null in rows
        ]
        yield from table(("column", "type", "unit", "what it is", ""), cells)
        if name in OPEN:
            prefix = OPEN[name].prefix
            yield f"Further columns{f' `{prefix}NAME`' if prefix else ''}: {OPEN[name].about}."


def notebook(path: Path) -> Iterator[str]:
    """A notebook as a page: its cells and the outputs that it keeps."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
        yield ""
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                yield f"![Output](data:image/png;base64,{''.join(data['image/png']).strip()})"
            else:
                yield f"```text\n{''.join(data.get('text/plain', output.get('text', ''))).rstrip()}\n```"
            yield ""
    yield f"The notebook itself: [{path.name}]({path.name})."


def gallery() -> Iterator[str]:
    """The figures that `docs/build/gallery.py` has drawn, each with its docstring and the command that draws it."""
    yield from [
        "# Figures",
        "",
        "All are of the quickstart, with one seed: of FedAvg, or of FedLWS, FedLDF or FedALA beside it.",
    ]
    yield "`raysim plot NAME RUN... --out FILE` draws one, `raysim report` all for which a run has the data.\n"
    drawn = {
        path.stem.removeprefix("figure-").replace("_", ":"): path for path in sorted((DOCS / "images").glob("figure-*"))
    }
    for name in sorted(drawn, key=lambda name: list(FIGURES).index(name.partition(":")[0])):
        yield f"## {name}\n\n{caption(name)}\n\n![{name}](images/{drawn[name].name}){{ width=600 }}\n"
