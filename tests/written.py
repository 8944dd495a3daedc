"""Runs that never ran: tables written by hand, for what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conftest import tiny

from raysim.config import to_yaml
from raysim.report.runs import Run
from raysim.store.atomic import write_json
from raysim.store.tables import Recorder

RESULT = {
    "final": 0.5, "best": 0.5, "last10": 0.5, "personal": None, "bytes_up": 1, "bytes_down": 1, "sha256": "0" * 64,
    "rounds": 3, "seconds": 1.0,
}  # fmt: skip


def by_hand(
    folder: Path, accuracy: Sequence[float | None], seed: int = 3, finished: bool = True,
    personal: Sequence[float | None] | None = None, **changes: Any,
) -> Run:  # fmt: skip
    """A run that scored so in each round, sent 1 MB up and 3 MB down in each, and took 2^t seconds to the end of round t."""
    folder.mkdir()
    rounds = {"evaluate_every": 1, **changes.pop("rounds", {})}
    (folder / "config.yaml").write_text(to_yaml(tiny(seed=seed, rounds=rounds, **changes)))
    with Recorder(folder) as recorder:
        for t, score in enumerate(accuracy):
            recorder.add(
                "rounds", round=t, accuracy=score, clients_ok=3, clients_failed=0, bytes_up=10**6, bytes_down=3 * 10**6,
                personal_accuracy_micro=personal[t] if personal else None,
                seconds=2.0**t - 2.0 ** (t - 1) * (t > 0), seconds_train=0.5, wall=2.0**t,
            )  # fmt: skip
    write_json(folder / "manifest.json", {})
    if finished:
        write_json(folder / "result.json", RESULT)
    return Run(folder)
