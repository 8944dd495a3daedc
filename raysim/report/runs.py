"""Runs to look at: their tables, and figures of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from raysim.paths import command, natural, slug
from raysim.report import ReportError, need
from raysim.report.folder import RunFolder
from raysim.store.code import unregistered
from raysim.store.documents import about_tensors, read_tensors
from raysim.store.manifest import lost

if TYPE_CHECKING:
    from torch import Tensor, nn

    from raysim.report.canvas import Canvas

BESIDE = {".lock", "manifest.json"}  # the config.yaml of a run: one from its first moment on, one wherever it is copied


class Run(RunFolder):
    """A run, finished or still growing; `run["rounds"]` is a table, `run.figure("accuracy")` a figure."""

    def figure(self, name: str) -> Canvas:
        """One of `figures`, as a matplotlib figure. Raises `ReportError` for another name and where data are missing."""
        need("matplotlib.figure")
        from raysim.report.figures import draw

        return draw(name, [self])

    def _repr_html_(self) -> str:
        """What a notebook shows: how far the run is, where it lies, its scores, and their curve if matplotlib is there."""
        from raysim.report.groups import compare
        from raysim.report.summary import summarise

        state = f"{self.stack}, {self.rounds_done} of {self.rounds} rounds, {self.state}"
        lines = [f"<div>{escape(state)}<br><code>{escape(str(self.folder))}</code></div>"]
        heads, scores = summarise(compare([self])).scores
        cells = [(head, score) for head, score in zip(heads, scores, strict=True) if head and score != "-"]
        lines += ["<table>"] + [f"<tr><th>{escape(head)}</th><td>{escape(score)}</td></tr>" for head, score in cells]
        lines.append("</table>")
        with suppress(ReportError, ImportError):
            lines.append(self._curve().svg(f"{slug(self.folder.name)}-{self.rounds_done}"))
        return "".join(lines)

    def _curve(self) -> Canvas:
        """The curve of the score by which the run is judged, or of its training loss."""
        for name in ("personal", "accuracy", "metric"):
            with suppress(ReportError):
                return self.figure(name)
        return self.figure("train-loss")

    def model(self, which: Literal["final", "best"] = "final") -> nn.Module:
        """The global model with the final weights, on the CPU and in eval mode; or, with `record.keep_best`, with those of
        the best evaluation: of a run that has not ended, the best that was saved. Raises `ReportError` where the run has
        none, and `ModelError` where its model is not registered here."""
        from raysim.core.rng import initial
        from raysim.models import Inputs, ModelError, build

        tensors, inputs = self.tensors(which), self.manifest.get("inputs")
        if inputs is None:
            raise ReportError(lost(self.folder))
        name, options = self.config["model"]["name"], self.config["model"]["options"]
        if missing := unregistered(self.folder).get(("model", name)):
            raise ModelError(missing)
        with initial(self.config["seed"]):  # a model may keep tensors that its state_dict does not have
            model = build(name, Inputs(**inputs | {"shape": tuple(inputs["shape"])}), **options)
        model.load_state_dict(tensors)
        return model.eval()

    def tensors(self, which: Literal["final", "best"] = "final") -> dict[str, Tensor]:
        """The state_dict of `model`, for which the model need not be registered here. Raises `ReportError` as `model` does."""
        path = self.folder / ("best.safetensors" if which == "best" else "model.safetensors")
        if which == "best":
            self._check_best(path)
        if not path.exists():
            raise ReportError(
                f"{self.folder}: has no final model yet; {command('resume', self.folder)} finishes the run."
            )
        return read_tensors(path)

    def _check_best(self, path: Path) -> None:
        if not path.exists():
            raise ReportError(
                f"{self.folder}: holds no model of its best round; record.keep_best: true keeps it from the start."
            )
        saved, best = about_tensors(path).get("round"), (self.result or {}).get("best_round")
        if saved is not None and best is not None and saved != str(best):  # an older raysim did not say
            raise ReportError(
                f"{path}: is not of round {best + 1}, the best, whose model was not saved; record.keep_best saves them."
            )

    @property
    def figures(self) -> list[str]:
        """Names of the figures for which the run has recorded the data."""
        need("matplotlib.figure")
        from raysim.report.figures import available

        return available([self])


def find(folders: Iterable[str | Path]) -> list[Run]:
    """The runs that these folders are or hold, each once. Raises `ReportError` where one is or holds none."""
    found: dict[Path, Run] = {}
    for folder in map(Path, folders):
        inside = sorted(_inside(folder), key=natural)
        if not inside:
            raise ReportError(f"{folder}: no runs found.")
        for one in inside:
            found.setdefault(one.resolve(), Run(one))
    return list(found.values())


def _inside(folder: Path) -> Iterator[Path]:
    """The folders of runs that this one is or holds. What lies in the folder of a run is the run's own."""
    for place, below, files in os.walk(folder):
        if "config.yaml" in files and not BESIDE.isdisjoint(files):
            below.clear()
            yield Path(place)


def load(folder: str | Path) -> Run:
    """A run to look at: `load(folder)["rounds"]` is an Arrow table, `load(folder).figure("accuracy")` a figure."""
    return Run(folder)
