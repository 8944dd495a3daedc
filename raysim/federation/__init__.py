"""A run: built from a configuration, run round by round, written down, saved and resumed."""

from raysim.core.selection import sample
from raysim.federation.builder import (
    MakeEngine,
    RunParts,
    aggregator,
    build,
    host_spec,
    partitioned,
    prepare,
)
from raysim.federation.failures import RoundFailed
from raysim.federation.loop import Federation
from raysim.federation.round import Round, run_round

__all__ = [
    "Federation", "MakeEngine", "Round", "RoundFailed", "RunParts", "aggregator", "build", "host_spec", "partitioned",
    "prepare", "run_round", "sample",
]  # fmt: skip
