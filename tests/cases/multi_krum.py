import numpy as np
from case import Case, State, Traced, fedavg, minus, norm
from cases.fedavg import UNIFORM

ALL = {"rounds": {"participation": 1.0}}  # eight clients, of which each is compared with the five nearest others


def recompute(round_: Traced) -> State:
    """The three clients whose five nearest others are nearest."""
    models = [client.model for client in round_.clients]
    squared = np.array([[norm(minus(a, b), round_.parameters) ** 2 for b in models] for a in models])
    scores = np.sort(squared, axis=1)[:, 1:6].sum(1)  # the nearest of all is the client itself
    return fedavg(round_, np.isin(range(8), np.argsort(scores)[:3]) / 3)


MULTI_KRUM = Case(
    "multi_krum", {"weighting": [{"multi_krum": {"f": 1, "m": 3}}], **ALL},
    {"weighting": [{"multi_krum": {"f": 0}}], **ALL}, {"weighting": [{"multi_krum": {"f": 1}}], **ALL},
    equals={**UNIFORM, **ALL}, recompute=recompute,
)  # fmt: skip
