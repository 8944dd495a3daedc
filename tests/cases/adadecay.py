import numpy as np
from case import UNITS, Case, State, Traced, fedavg


def recompute(round_: Traced) -> State:
    """With strength 0.01, alpha 4: |d| is standardised within each layer."""
    after, before = fedavg(round_), round_.before
    for names in UNITS.values():
        moved = {n: np.abs(after[n] - before[n]) for n in names}
        everything = np.concatenate([m.ravel() for m in moved.values()])
        for n in names:
            theta = 2 / (1 + np.exp(-4 * (moved[n] - everything.mean()) / everything.std()))
            after[n] = after[n] - 0.01 * theta * before[n]
    return after


ADADECAY = Case(
    "adadecay", {"server": [{"adadecay": 0.01}]}, {"server": [{"adadecay": 0}]}, {"server": [{"adadecay": 0.02}]},
    recompute=recompute, tolerance=1e-5,  # theta multiplies the error of |d|, which is float32's, by 4 / std
)  # fmt: skip
