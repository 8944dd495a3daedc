from case import UNITS, Case, State, Traced
from cases.fedldf import over_uploaders


def recompute(round_: Traced) -> State:
    """Whole models of the clients kept, weighted by size among them; the draw is the run's."""
    kept = round_.note("hdfl", "uploads") == 1
    assert kept.sum() == 2
    return over_uploaders(round_, dict.fromkeys(UNITS, kept))


HDFL = Case(
    "hdfl", {"weighting": [{"hdfl": 2}]}, {"weighting": [{"hdfl": 3}]}, {"weighting": [{"hdfl": 2}]},
    recompute=recompute,
)  # fmt: skip
