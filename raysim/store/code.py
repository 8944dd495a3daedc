"""The code of a user that a run uses, in its folder: `code` in the manifest has an entry for each model, method, data set and
so on that is not raysim's own, and the folder `code/` their texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import unified_diff
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from raysim.definition import Definition
from raysim.paths import UnsafeName, below, slug
from raysim.registry import KINDS, REGISTRY
from raysim.store.atomic import replacing, subfolder
from raysim.store.documents import DamagedFile, read_bytes
from raysim.store.manifest import Recorded, read_manifest

Definitions = Mapping[tuple[str, str], Definition]  # by kind and name
CALLED = {"client": "client method", "server": "server step", "dataset": "data set"}  # where the kind is no word for it
TEXT_BYTES = 1 << 24
SHOWN = 20  # lines of a difference


class Changes(NamedTuple):
    """How the code of a run differs from what it was when the run began."""

    changed: list[str]  # a sentence for each entry, and the lines that differ
    unknown: list[str]  # a sentence for each entry whose source is not known


def record(folder: Path, definitions: Definitions, before: Iterable[Recorded] = ()) -> list[Recorded]:
    """Write the texts of definitions into the folder of a run; returns what the manifest has to say of them, after what it
    said `before`: an entry that has changed has several there, and the last one counts."""
    records = [*before]
    known = {(one["kind"], one["name"]): one["sha256"] for one in records}
    for (kind, name), definition in definitions.items():
        sha256, text = definition.sha256, None
        if (kind, name) in known and sha256 in (None, known[kind, name]):
            continue
        if sha256 is not None and definition.text is not None:
            text = f"code/{slug(f'{kind}-{name}')}-{sha256[:8]}.py"
            path = below(folder, text)
            subfolder(path.parent)
            with replacing(path) as temporary:
                temporary.write_text(definition.text, encoding="utf-8")
        records.append(
            {  # type: ignore[typeddict-item]  # which asks for the key that configures pydantic
                "kind": kind, "name": name, "file": definition.file, "sha256": sha256, "text": text, "given": definition.given,
            }
        )  # fmt: skip
    return records


def recorded(folder: Path) -> dict[tuple[str, str], Recorded] | None:
    """By kind and name, what counts of the record of the run in `folder`; None where an older raysim has made none. Raises
    `DamagedManifest`."""
    records = read_manifest(folder).get("code")
    return None if records is None else {(one["kind"], one["name"]): one for one in records}


def changes(folder: Path, definitions: Definitions) -> Changes:
    """How the code that a run would use now differs from the record. What it did not use before is no change."""
    records, found = recorded(folder), Changes([], [])
    for (kind, name), definition in definitions.items():
        was = {"sha256": None} if records is None else records.get((kind, name))
        if was is None:
            continue
        what = f"the {CALLED.get(kind, kind)} {name!r}"
        if was["sha256"] is None or definition.text is None:
            found.unknown.append(f"the source of {what} is not known, so that it cannot be said whether it has changed")
        elif was["sha256"] != definition.sha256:
            where = f" ({definition.file})" if definition.file else ""
            lines = [*_difference(folder, was.get("text"), definition.text)]
            found.changed.append("\n".join([f"{folder}: {what}{where} has changed since the run began", *lines]))
    return found


def _difference(folder: Path, path: str | None, now: str) -> Iterator[str]:
    """The first lines in which a text differs from what it is `now`."""
    try:
        then = read_bytes(below(folder, path or ""), TEXT_BYTES).decode("utf-8", "replace")
    except (OSError, DamagedFile, UnsafeName):
        return
    lines = [*unified_diff(then.splitlines(), now.splitlines(), n=1, lineterm="")][2:]
    lines = [line for line in lines if not line.startswith("@@")]
    yield from (f"    {line}" for line in lines[:SHOWN])
    if len(lines) > SHOWN:
        yield f"    ... and {len(lines) - SHOWN} lines more"


def unregistered(folder: Path) -> dict[tuple[str, str], str]:
    """By kind and name, a sentence on each entry of the record that this process does not know, with what brings it."""
    found = {}
    for (kind, name), was in (recorded(folder) or {}).items():
        if kind not in KINDS or name in REGISTRY.table(kind):
            continue
        what = f"{folder}: the {CALLED.get(kind, kind)} {name!r} was"
        is_method = kind in ("client", "weighting", "server", "transform", "attack")
        decorator = f"raysim.method({kind!r}, {name!r})" if is_method else f"raysim.{kind}({name!r})"
        if was["file"] is None:
            place = "given as an object" if was["given"] else "defined in a notebook or a prompt"
            text = f"; its source is in {folder / was['text']}" if was["text"] else ""
            found[kind, name] = f"{what} {place}; in Python register it first, as {decorator}(...) does{text}"
            continue
        path, resume = PurePosixPath(was["file"]), f"raysim.resume({str(folder)!r}"
        module = ".".join(path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts)
        if was["given"]:
            ways = f"give it to `{resume}, ...)` again, or register it first: `{decorator}(...)`"
            found[kind, name] = f"{what} given as an object of {path}. In Python {ways}."
        else:
            way = f"import that file first, as in `import {module}, raysim; {resume})`"
            found[kind, name] = f"{what} defined in {path}. In Python {way}."
    return found
