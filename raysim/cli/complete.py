"""What a shell offers after TAB. Names are read off raysim's source, because importing it takes seconds."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import typer

PACKAGE = Path(__file__).parents[1]
TABLES = {  # setting -> where its entries are listed
    "client": ("methods/__init__.py", "CLIENTS"),
    "weighting": ("methods/__init__.py", "WEIGHTINGS"),
    "server": ("methods/__init__.py", "STEPS"),
    "upload": ("methods/__init__.py", "TRANSFORMS"),
    "download": ("methods/__init__.py", "TRANSFORMS"),
    "attack": ("methods/__init__.py", "ATTACKS"),
    "rounds.selection": ("methods/__init__.py", "SELECTIONS"),
    **{f"clock.{name}": ("core/simulated.py", "TRAITS") for name in ("speed", "up", "down", "latency")},
    "clock.availability": ("core/availability.py", "AVAILABILITIES"),
    "model.name": ("models/__init__.py", "MODELS"),
    "data.name": ("data/sources/__init__.py", "SOURCES"),
    "data.partition": ("data/partition/__init__.py", "PARTITIONS"),
    "record.instruments": ("analysis/__init__.py", "INSTRUMENTS"),
    "record.sinks": ("store/sinks.py", "SINKS"),
    "engine": ("engine/settings.py", "ENGINES"),
    "preset": ("config/presets.py", "PRESETS"),
}


def configurations(incomplete: str) -> list[str]:
    """Files here, and the configurations that come with raysim."""
    folder, _, _ = incomplete.rpartition("/")
    root = Path(f"{folder}/" if "/" in incomplete else ".")
    there = sorted(root.iterdir()) if root.is_dir() else []
    files = [path for path in there if path.is_dir() or path.suffix in (".yaml", ".yml")]
    offered = [
        path for file in files for path in [f"{file}/" if file.is_dir() else str(file)] if path.startswith(incomplete)
    ]
    return offered + [name for name in _shipped() if name.startswith(incomplete)]


def items(incomplete: str) -> list[str]:
    """Tables and figures of papers."""
    return [name for name in _shipped() if "/" in name and name.startswith(incomplete)]


def settings(context: typer.Context, incomplete: str) -> list[str]:
    """`path=` of every setting or, behind the `=`, the entries that it may name."""
    path, equals, value = incomplete.partition("=")
    if not equals and (before := _before(context)):  # bash takes `server=fed` apart
        return [name for name in _named(before) if name.startswith(incomplete)]
    if equals:
        return [f"{path}={name}" for name in _named(path) if name.startswith(value)]
    return [f"{one}=" for one in _keys("Config") if one.startswith(incomplete)]


def explained(incomplete: str) -> list[str]:
    """All that `raysim explain` knows by name, but for the options of methods."""
    every = [*_keys("Config"), *(name for path in TABLES for name in _named(path))]
    return sorted({name for name in every if name.startswith(incomplete)})


def figures(incomplete: str) -> list[str]:
    """Figures that `raysim plot` draws."""
    return [name for name in _listed("report/figures.py", "FIGURES") if name.startswith(incomplete)]


def measures(incomplete: str) -> list[str]:
    """Measures that `raysim measure` takes."""
    return [name for name in _listed("analysis/__init__.py", "MEASURES") if name.startswith(incomplete)]


def _shipped() -> list[str]:
    top = next(place for place in (PACKAGE / "configs", PACKAGE.parent / "configs") if place.is_dir())
    return sorted(
        path.relative_to(top).with_suffix("").as_posix()
        for path in top.rglob("*.yaml")
        if path.parent.name != "cluster"
    )


def _before(context: typer.Context) -> str | None:
    """The setting whose value comes next, where the last words are `server` and `=`."""
    words = [str(word) for value in context.params.values() if isinstance(value, list | tuple) for word in value]
    return words[-2] if words[-1:] == ["="] and len(words) > 1 else None


def _named(path: str) -> list[str]:
    return _listed(*TABLES[path]) if path in TABLES else []


def _keys(section: str, path: str = "") -> Iterator[str]:
    """Paths of the settings of a class of the schema, and of the sections in it."""
    sections = {node.name: node for node in _tree("config/schema.py").body if isinstance(node, ast.ClassDef)}
    for node in sections[section].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            key = path + node.target.id.rstrip("_")
            kind = node.annotation.id if isinstance(node.annotation, ast.Name) else ""
            yield from _keys(kind, f"{key}.") if kind in sections else [key]


def _listed(file: str, table: str) -> list[str]:
    """The keys of the dictionary that `table` is or is filled with; the functions, where each is called as its name."""
    for node in _tree(file).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == table for target in targets):
            inner = list(ast.walk(node))
            written = next((one.keys for one in inner if isinstance(one, ast.Dict)), [])
            each = [one.value for one in inner if isinstance(one, ast.Starred) and isinstance(one.value, ast.Tuple)]
            names = [key.value for key in written if isinstance(key, ast.Constant)]
            return [*map(str, names), *(item.id for one in each for item in one.elts if isinstance(item, ast.Name))]
    return []


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
