import numpy as np
from case import UNITS, Case, State, Traced, fedavg, minus, norm


def recompute(round_: Traced) -> State:
    """methods.md 3.1 with n = 1: every layer, its statistics included, is copied from the client where it moved most."""
    after = fedavg(round_)
    for unit, names in UNITS.items():
        moved = [norm(minus(c.model, round_.before), names) for c in round_.clients]
        sender = round_.clients[int(np.argmax(moved))].model  # the first of equals
        statistics = [n for n in after if n.startswith(f"{unit}.norm.") and n not in names]
        after |= {n: sender[n] for n in [*names, *statistics]}
    return after


FEDLDF = Case(
    "fedldf", {"weighting": [{"fedldf": {"top_n": 1}}]}, {"weighting": [{"fedldf": {"top_n": 3}}]},
    {"weighting": [{"fedldf": {"top_n": 2}}]}, recompute=recompute,
)  # fmt: skip
