import numpy as np
from case import UNITS, Case, State, Traced, average, fedavg, minus, norm

BETA = 0.3


def recompute(round_: Traced) -> State:
    """Tau is a mean of norms around the unweighted mean, the norms are the old layer's."""
    before, after = round_.before, fedavg(round_)
    updates = [minus(c.model, before) for c in round_.clients]
    centre = average(updates, np.full(len(updates), 1 / len(updates)))
    for names in UNITS.values():
        tau = np.mean([norm(minus(u, centre), names) for u in updates])
        old, moved = norm(before, names), norm(minus(after, before), names)
        gamma = old / (BETA * tau * moved + old)
        for name in names:
            after[name] = gamma * after[name]
    return after


FEDLWS = Case(
    "fedlws", {"server": [{"fedlws": {"beta": BETA}}]}, {"server": [{"fedlws": {"beta": 0.0}}]},
    {"server": [{"fedlws": {"beta": 0.01}}]}, recompute=recompute,
)  # fmt: skip
