"""raysim: `raysim.stream`, as a script or a notebook executes a run."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from turns import Turns

import raysim


def main() -> None:
    folder, turns = Path(os.environ["PEERS_FOLDER"]), Turns()

    def parameters() -> Iterator[np.ndarray]:
        return (p.detach().numpy() for p in run.model().parameters())

    with raysim.stream(folder / "config.yaml", out=folder / "run") as run:
        run.start()
        for ran in range(turns.rounds):
            turns.after(ran, parameters)
            next(run)
        turns.after(turns.rounds, parameters)


if __name__ == "__main__":
    main()
