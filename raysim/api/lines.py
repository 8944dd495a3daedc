"""Words and numbers for people: how a run is introduced, and what it came to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from raysim.paths import command
from raysim.printable import printable

if TYPE_CHECKING:
    from raysim.config import Config

SCORES = (("final", "final"), ("best", "best"), ("mean of last 10", "last10"))  # words, and key of a result


def header(config: Config, manifest: Mapping[str, Any] = MappingProxyType({})) -> str:
    """One line on what is simulated; the run's `manifest` knows the samples."""
    from raysim.config import ENGINES, SOURCES, STACKS, name_in
    from raysim.report.folder import methods_line

    methods = methods_line(*([method.name for method in getattr(config, stack)] for stack in STACKS))
    clients = config.clients
    share = f"{100 * config.rounds.participation:.3g}% of all"
    drawn = f"{config.cohort_size} of {clients}" if clients else share
    parts = [
        config.name,
        methods + (" (oracle: learns on test samples)" if config.data.proxy.oracle else ""),
        config.model.name,
        f"{name_in(SOURCES, config.data.name)}, {drawn} clients a round",
        *([unused(left_out, manifest["samples"])] if (left_out := manifest.get("unused_samples")) else []),
        f"{name_in(ENGINES, config.engine)} engine",
    ]
    return printable(" | ".join(parts))


def unused(count: int, samples: int) -> str:
    """That a partition leaves samples out."""
    return f"{count:,} of {samples:,} samples ({100 * count / samples:.2g} %) are given to no client"


def ending(result: Mapping[str, Any]) -> str:
    """The lines after the last round: `result` is what `result.json` holds, and the folder."""
    personal, name = result.get("personal"), result.get("headline") or "accuracy"
    fallen = result.get("fell_back") or {}
    way = f"{command('explain', next(iter(fallen)))} says what it does then" if fallen else ""
    rows = [
        *([(name, summed_up(name, result))] if result["final"] is not None or personal is None else []),
        *([("personal", summed_up(name, personal))] if personal else []),
        *([("clients", among_clients(personal))] if personal and personal["macro"] is not None else []),
        *([("ended", result["ended"])] if result.get("ended") else []),
        *([("fell back", f"{fallbacks(fallen)}; {way}")] if fallen else []),
        ("traffic", f"up {bytes_(result['bytes_up'])}   down {bytes_(result['bytes_down'])}"),
        ("time", f"{result['rounds']} round{'s' * (result['rounds'] != 1)} in {result['seconds']:.1f} s"),
        *([("on the clock", lasting(seconds))] if (seconds := result.get("sim_seconds")) is not None else []),
        ("sha256", result["sha256"]),
        ("folder", str(result["folder"])),
    ]
    return "\n" + "\n".join(aligned(rows))


def fallbacks(counted: Mapping[str, Mapping[str, int]]) -> str:
    """Which methods could not do their work, and how often: `result["fell_back"]` in words."""
    return ", ".join(f"{method} {count['times']} of {count['of']} times" for method, count in counted.items())


def summed_up(metric: str, scores: Mapping[str, Any]) -> str:
    """The last, the best, and the mean of the last ten scores, where there are ten."""
    shown = SCORES if scores.get("evaluations", 10) >= 10 else SCORES[:-1]
    return "   ".join(f"{words} {scored(metric, scores[key])}" for words, key in shown)


def scored(metric: str, value: float | None) -> str:
    """An accuracy in percent, any other metric as a number; nothing measured as `-`."""
    return percent(value) if metric == "accuracy" or value is None else f"{value:.4f}"


def among_clients(personal: Mapping[str, Any]) -> str:
    """How the clients' own accuracies were distributed at the end."""
    mean, std = percent(personal["macro"]), percent(personal["std"])
    auc = personal["auc"]
    known = auc is not None and not math.isnan(auc)
    area = f"{auc:.4f}" if known else "- (it compares the scores of right and wrong classes, and there is one class)"
    return f"mean {mean} ± {std}   worst tenth {percent(personal['worst10'])}   AUC {area}"


def percent(share: float | None) -> str:
    """0.5 as `50.00 %`; nothing measured as `-`."""
    return "-" if share is None else f"{100 * share:.2f} %"


def bytes_(count: float) -> str:
    """A number of bytes in the largest decimal unit that keeps it above 1."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def lasting(seconds: float) -> str:
    """Simulated seconds in the largest unit of which there are two."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def aligned(rows: Sequence[tuple[str, ...]], align: str = "<") -> list[str]:
    """Rows as lines whose columns begin (`<`) or end (`>`) together; their cells are made printable."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{c:{align}{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
