import numpy as np
from case import Case, State, Traced


def among(round_: Traced, cut: int) -> State:
    """The mean of each coordinate's values but the `cut` smallest and the `cut` largest; of counters the greatest."""
    after = {}
    for name in round_.before:
        values = np.sort([client.model[name] for client in round_.clients], axis=0)
        counts = name.endswith("num_batches_tracked")
        after[name] = values[-1] if counts else values[cut : len(values) - cut].mean(0)
    return after


MEDIAN = Case(
    "median", {"weighting": ["median"], "rounds": {"participation": 0.5}},  # four clients: the mean of the middle two
    {"weighting": ["median"]}, {"weighting": [{"trimmed_mean": 0}]},
    equals={"weighting": [{"trimmed_mean": 0.34}]}, recompute=lambda round_: among(round_, 1),
)  # fmt: skip
