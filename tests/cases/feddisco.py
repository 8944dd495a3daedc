import numpy as np
from case import Case, State, Traced, fedavg


def recompute(round_: Traced) -> State:
    """KL from uniform, divided by its sum over the cohort; a = 0.5, b = 0.1."""
    labels, train = round_.federation.data.y, round_.federation.partition.train
    kl = []
    for client in round_.clients:
        counts = np.bincount(labels[train[client.id]], minlength=4)
        shares = counts[counts > 0] / counts.sum()
        kl.append(float((shares * np.log(shares * 4)).sum()))
    weights = np.maximum(0, round_.p - 0.5 * np.array(kl) / sum(kl) + 0.1)
    return fedavg(round_, weights / weights.sum())


FEDDISCO = Case(
    "feddisco", {"weighting": ["feddisco"]}, {"weighting": [{"feddisco": {"a": 0, "b": 0}}]},
    {"weighting": ["feddisco"]}, recompute=recompute,
)  # fmt: skip
