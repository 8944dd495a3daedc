"""raysim: federated learning simulated with Ray actors and PyTorch.

What is in `__all__` is promised to stay; the rest may change between releases. Names are imported when they are first
used, because PyTorch takes seconds.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import raysim.ray_variables as _  # noqa: F401  # before Ray is imported
from raysim.version import __version__ as __version__

if TYPE_CHECKING:
    from raysim.analysis.instrument import Instrument as Instrument
    from raysim.api.functions import continued as continued
    from raysim.api.functions import read_config as read_config
    from raysim.api.functions import resume as resume
    from raysim.api.functions import run as run
    from raysim.api.functions import stream as stream
    from raysim.api.simulation import RoundResult as RoundResult
    from raysim.api.simulation import Simulation as Simulation
    from raysim.config import Config as Config
    from raysim.config import ConfigError as ConfigError
    from raysim.core.asynchronous import Asynchronous as Asynchronous
    from raysim.core.attack import Attack as Attack
    from raysim.core.availability import Availability as Availability
    from raysim.core.client import ClientMethod as ClientMethod
    from raysim.core.client import LocalRun as LocalRun
    from raysim.core.client import Upload as Upload
    from raysim.core.cohort import Cohort as Cohort
    from raysim.core.failures import ClientFailure as ClientFailure
    from raysim.core.layers import LayerMap as LayerMap
    from raysim.core.message import Compressor as Compressor
    from raysim.core.message import Message as Message
    from raysim.core.message import Part as Part
    from raysim.core.message import Transform as Transform
    from raysim.core.method import Needs as Needs
    from raysim.core.mixture import Mixture as Mixture
    from raysim.core.rates import Schedule as Schedule
    from raysim.core.score import Metric as Metric
    from raysim.core.selection import Asked as Asked
    from raysim.core.selection import Selection as Selection
    from raysim.core.server import Server as Server
    from raysim.core.server import ServerStep as ServerStep
    from raysim.core.server import Weighting as Weighting
    from raysim.core.simulated import Trait as Trait
    from raysim.core.task import Classification as Classification
    from raysim.core.task import MultiLabel as MultiLabel
    from raysim.core.task import NextToken as NextToken
    from raysim.core.task import Regression as Regression
    from raysim.core.task import Task as Task
    from raysim.data import Dataset as Dataset
    from raysim.data.given import as_dataset as as_dataset
    from raysim.engine.ray.cluster import cluster as cluster
    from raysim.models import Inputs as Inputs
    from raysim.plugins import availability as availability
    from raysim.plugins import dataset as dataset
    from raysim.plugins import instrument as instrument
    from raysim.plugins import method as method
    from raysim.plugins import metric as metric
    from raysim.plugins import model as model
    from raysim.plugins import partition as partition
    from raysim.plugins import schedule as schedule
    from raysim.plugins import task as task
    from raysim.plugins import trait as trait
    from raysim.report.runs import Run as Run
    from raysim.report.runs import load as load

_DECORATORS = (
    "availability", "dataset", "instrument", "method", "metric", "model", "partition", "schedule", "task", "trait",
)  # fmt: skip
_HOMES = {
    "raysim.api.functions": ("continued", "read_config", "resume", "run", "stream"),
    "raysim.api.simulation": ("RoundResult", "Simulation"),
    "raysim.report.runs": ("Run", "load"),
    "raysim.plugins": _DECORATORS,
    "raysim.config": ("Config", "ConfigError"),
    "raysim.core.availability": ("Availability",),
    "raysim.core.client": ("ClientMethod", "LocalRun", "Upload"),
    "raysim.core.server": ("Server", "ServerStep", "Weighting"),
    "raysim.core.task": ("Classification", "MultiLabel", "NextToken", "Regression", "Task"),
    "raysim.core.rates": ("Schedule",),
    "raysim.core.score": ("Metric",),
    "raysim.core.selection": ("Asked", "Selection"),
    "raysim.core.simulated": ("Trait",),
    "raysim.core.cohort": ("Cohort",),
    "raysim.core.asynchronous": ("Asynchronous",),
    "raysim.core.attack": ("Attack",),
    "raysim.core.failures": ("ClientFailure",),
    "raysim.core.layers": ("LayerMap",),
    "raysim.core.message": ("Compressor", "Message", "Part", "Transform"),
    "raysim.core.method": ("Needs",),
    "raysim.core.mixture": ("Mixture",),
    "raysim.analysis.instrument": ("Instrument",),
    "raysim.data": ("Dataset",),
    "raysim.data.given": ("as_dataset",),
    "raysim.models": ("Inputs",),
    "raysim.engine.ray.cluster": ("cluster",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME), "__version__"]


_RENAMED = {"PlayedRound": "RoundResult"}  # names of the last release, until the next one


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"raysim.{name} is now raysim.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return __getattr__(_RENAMED[name])
    if name not in _HOME:
        raise AttributeError(f"module 'raysim' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
