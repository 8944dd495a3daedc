"""The process of one run of several: `python -m raysim.sweep.child`, started and described by `raysim.sweep.parallel`."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from pathlib import Path

from raysim.api.errors import faults_of, shown
from raysim.api.terminal import run_in_terminal
from raysim.config import from_dict
from raysim.engine.ray.placement import Node, Resources


def main() -> int:
    """Execute the run that the first line of the standard input describes."""
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    resources = None
    if task["resources"]:
        resources = Resources(tuple(Node(**node) for node in task["resources"]["nodes"]))
    try:
        config, folder = from_dict(task["config"]), Path(task["folder"])
        return run_in_terminal(
            config, folder, task["address"], resume=task["resume"], resources=resources,
            accept_changed_code=task["accept_changed_code"],
        )  # fmt: skip
    except Exception as error:
        print("\n".join(map(shown, faults_of(error) or ())) or traceback.format_exc(), file=sys.stderr)
        return 1


def _end_with_parent() -> None:
    """Exit with the parent, so that a restarted sweep has no competing writers."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
