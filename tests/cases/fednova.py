import numpy as np
from case import Case, State, Traced, fedavg


def recompute(round_: Traced) -> State:
    """A_k of momentum 0.9 in closed form, from counted steps."""
    rho, steps = 0.9, np.array([len(c.steps) for c in round_.clients])
    applied = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    tau = round_.p @ applied
    after = fedavg(round_)
    for name in round_.parameters:
        directions = [(c.model[name] - round_.before[name]) / a for c, a in zip(round_.clients, applied, strict=True)]
        after[name] = round_.before[name] + tau * sum(p * d for p, d in zip(round_.p, directions, strict=True))
    return after


ONE_STEP = {"local": {"batch_size": 64}}  # every client takes as many steps
FEDNOVA = Case(
    "fednova", {"weighting": ["fednova"]}, {"weighting": ["fednova"], **ONE_STEP},
    {"weighting": ["fednova"], "local": {"batch_size": 45}},  # the two largest clients take two
    equals=ONE_STEP, recompute=recompute,
)  # fmt: skip
