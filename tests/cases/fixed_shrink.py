from case import UNITS, Case, State, Traced, fedavg

SETTING = {"gamma": 0.97, "decrement": 0.01}


def recompute(round_: Traced) -> State:
    """Layers shrink by 0.97, 0.96, 0.95."""
    after = fedavg(round_)
    for gamma, names in zip((0.97, 0.96, 0.95), UNITS.values(), strict=True):
        after |= {n: gamma * after[n] for n in names}
    return after


FIXED_SHRINK = Case(
    "fixed_shrink", {"server": [{"fixed_shrink": SETTING}]}, {"server": [{"fixed_shrink": 1}]},
    {"server": [{"fixed_shrink": 0.99}]}, recompute=recompute,
)  # fmt: skip
