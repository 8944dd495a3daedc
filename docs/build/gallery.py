"""Draw the gallery's figures: `python docs/build/gallery.py` plays the quickstart twice, with and without FedLWS."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import raysim
from raysim.report.figures import draw
from raysim.report.runs import Run

IMAGES = Path(__file__).parents[1] / "images"
BOTH = ("scores", "accuracy", "accuracy:uplink", "loss", "train-loss")
FIRST = (
    "partition",
    "classes",
    "sizes",
    "coherence",
    "heterogeneity:cosine",
    "balance:gamma",
    "timeline",
    "parameters",
    "traffic",
    "seconds",
)
SECOND = ("layers:fedlws.gamma", "layers:norm")


def main(folder: Path) -> None:
    """Runs that are in `folder` already are not played again."""
    fedavg = played(folder / "fedavg", record__instruments=["coherence", "heterogeneity", "balance"])
    fedlws = played(folder / "fedlws", server="fedlws")
    for names, runs in ((BOTH, [fedavg, fedlws]), (FIRST, [fedavg]), (SECOND, [fedlws])):
        for name in names:
            draw(name, runs).save(IMAGES / f"figure-{name.replace(':', '_')}.png")


def played(folder: Path, **settings: object) -> Run:
    if folder.is_dir():
        return raysim.load(folder)
    return raysim.run("quickstart", out=folder, engine="local", **settings)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with TemporaryDirectory() as new:
            main(Path(new))
