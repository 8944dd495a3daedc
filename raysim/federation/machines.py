"""What a run's processes compute with: alike on all hosts and as when the run began, or a warning names what is not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raysim.config import ConfigError
from raysim.engine.base import Engine
from raysim.store.manifest import manifest, read_manifest


def numerics(engine: Engine) -> tuple[dict[str, Any], str | None]:
    """What decides the hosts' bits, as far as they are alike, and a sentence on how they differ, which is a warning as well."""
    first, *others = engine.numerics()
    found = {key: [first[key], *(other.get(key) for other in others)] for key in first}
    differing = {key: dict.fromkeys(values) for key, values in found.items() if len({*values}) > 1}
    alike = {key: value for key, value in first.items() if key not in differing}
    if not differing:
        return alike, None
    how = "; ".join(f"{key}: {', '.join(map(_said, values))}" for key, values in differing.items())
    sentence = (
        f"the client actors differ in what they compute with ({how}), and the result depends on which of them trains whom. "
        "Set switches alike on all nodes, and use nodes of one kind"
    )
    warnings.warn(sentence, stacklevel=2)
    return alike, sentence


def check_device(folder: Path, engine: Engine, numerics: Mapping[str, Any]) -> None:
    """Raises `ConfigError`, and closes the engine, where the run in the folder began on another kind of device or GPU."""
    manifest, now = read_manifest(folder), {"device": engine.device(), "gpu": numerics.get("gpu")}
    there = {"device": manifest.get("device"), "gpu": manifest.get("numerics", {}).get("gpu")}
    for kind, began in there.items():
        if began is not None and began != now[kind]:
            engine.close()
            raise ConfigError(
                f"engine: the run in {folder} began on {began}, and this engine computes on {now[kind]}, which rounds "
                "differently. Choose the device that it began on, or start another run."
            )


def warn_of_changes(folder: Path, numerics: Mapping[str, Any]) -> None:
    """Name what the run in the folder began with and has no more, in this process or in the hosts, where low bits depend on it."""
    then = read_manifest(folder)
    pairs = [(_of_driver(then), _of_driver(manifest("", 0, {}))), (then.get("numerics", {}), numerics)]
    changes = [
        f"the run began with {key} {_said(was[key])}, and now it is {_said(now[key])}"
        for was, now in pairs
        for key in was
        if key in now and was[key] != now[key]  # an older raysim did not write all of them down
    ]
    for change in dict.fromkeys(changes):
        warnings.warn(f"{change}; bits may differ from those of a run that was not stopped", stacklevel=2)


def _of_driver(manifest: Mapping[str, Any]) -> dict[str, Any]:
    versions, hardware = manifest.get("versions", {}), manifest.get("hardware", {})
    known: dict[str, Any] = {
        key: part[key]
        for part, key in ((versions, "torch"), (hardware, "cpu"), (hardware, "cpu_capability"))
        if key in part
    }
    known |= hardware.get("switches", {})
    return known


def _said(value: Any) -> str:
    return "not set" if value is None else str(value)
