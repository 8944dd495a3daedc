"""Draw the gallery's figures: `python docs/build/gallery.py` runs the quickstart with FedAvg, FedLWS and FedALA, with
FedLDF, which sends less, with SCAFFOLD, which sends more, and a few rounds on Ray."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import raysim
from raysim.analysis.confusion import Confusion, Personalization
from raysim.analysis.measure import write
from raysim.federation.saved import SavedRun
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
    "seconds",
)
SECOND = ("balance:gamma", "layers:fedlws.gamma", "layers:norm")
THIRD = ("confusion",)
PERSONAL = ("clients", "personalization")
ALL = ("pareto", "class-accuracy")
COSTS = ("parameters", "traffic")
ACTORS = ("timeline",)


def main(folder: Path) -> None:
    """Runs that are in `folder` already are not run again."""
    fedavg = ran(folder / "fedavg", record__instruments=["coherence", "heterogeneity"])
    fedlws = ran(folder / "fedlws", server="fedlws", record__instruments=["balance"])
    fedldf = ran(folder / "fedldf", weighting={"fedldf": {"top_n": 1}})
    scaffold = ran(folder / "scaffold", client="scaffold")
    actors = ran(folder / "actors", engine={"ray": {"clients_per_actor": 3}}, rounds__total=10)
    own = {"data__client_test_frac": 0.25, "evaluate__personal": "after_init"}
    personal = [ran(folder / "own", **own), ran(folder / "fedala", client="fedala", **own)]
    for run in (fedavg, fedlws, fedldf):
        write("confusion", Confusion(), SavedRun(run.folder))
    for run in personal:
        write("personalization", Personalization(), SavedRun(run.folder))
    for names, runs in (
        (BOTH, [fedavg, fedlws]), (FIRST, [fedavg]), (SECOND, [fedlws]), (THIRD, [raysim.load(fedavg.folder)]),
        (PERSONAL, [raysim.load(run.folder) for run in personal]),
        (ALL, [raysim.load(run.folder) for run in (fedavg, fedlws, fedldf)]),
        (COSTS, [fedavg, fedldf, scaffold]), (ACTORS, [actors]),
    ):  # fmt: skip
        for name in names:
            draw(name, runs).save(IMAGES / f"figure-{name.replace(':', '_')}.png")


def ran(folder: Path, **settings: object) -> Run:
    if folder.is_dir():
        return raysim.load(folder)
    return raysim.run("quickstart", out=folder, **{"engine": "local", **settings})


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with TemporaryDirectory() as new:
            main(Path(new))
