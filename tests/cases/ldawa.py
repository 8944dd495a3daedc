import numpy as np
from case import Case, State, Traced, fedavg, norm


def recompute(round_: Traced) -> State:
    """Past its warm-up: every tensor's cosine with the old one, not renormalised; uniform statistics."""
    clients, before = round_.clients, round_.before
    after = fedavg(round_, np.full(len(clients), 1 / len(clients)))
    for name in round_.parameters:
        cosines = [
            (c.model[name] * before[name]).sum() / (norm(c.model, [name]) * norm(before, [name])) for c in clients
        ]
        after[name] = np.mean([min(1, cos) * c.model[name] for cos, c in zip(cosines, clients, strict=True)], axis=0)
    return after


LDAWA = Case(
    "ldawa", {"weighting": [{"ldawa": {"warmup": 1}}]}, {"weighting": ["ldawa"]},
    {"weighting": [{"ldawa": {"warmup": 2}}]}, recompute=recompute,
)  # fmt: skip
