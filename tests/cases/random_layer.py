from case import UNITS, Case, State, Traced
from cases.fedldf import over_uploaders


def recompute(round_: Traced) -> State:
    """The draw is the run's, what follows from it is 3.1."""
    drawn = round_.note("random_layer", "uploads").reshape(len(round_.clients), len(UNITS)) == 1
    assert (drawn.sum(0) == 2).all()
    return over_uploaders(round_, dict(zip(UNITS, drawn.T, strict=True)))


RANDOM_LAYER = Case(
    "random_layer", {"weighting": [{"random_layer": 2}]}, {"weighting": [{"random_layer": 3}]},
    {"weighting": [{"random_layer": 2}]}, recompute=recompute,
)  # fmt: skip
