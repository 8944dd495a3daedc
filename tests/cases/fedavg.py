import numpy as np
from case import Case, State, Traced, fedavg
from reference import drawn

UNIFORM = {"weighting": [{"fedavg": {"weights": "uniform"}}]}


def uniform(round_: Traced) -> State:
    for client in round_.clients:  # each has trained on all of its samples, in the order of its stream
        order = drawn(round_.federation, round_.t, client.id, "batches")
        assert np.concatenate(client.steps).tolist() == order.tolist()
    return fedavg(round_, np.full(len(round_.clients), 1 / len(round_.clients)))


def stepped(round_: Traced) -> State:
    after = fedavg(round_)
    for name in round_.parameters:
        after[name] = round_.before[name] + 0.5 * (after[name] - round_.before[name])
    return after


SIZES = Case("fedavg", UNIFORM, {"weighting": ["fedavg"]}, UNIFORM, recompute=uniform)
STEP = Case(
    "step_size", {"server": [{"step_size": {"eta": 0.5}}]}, {"server": ["step_size"]},
    {"server": [{"step_size": {"eta": 0.9}}]}, recompute=stepped,
)  # fmt: skip
