import numpy as np
from case import UNITS, Case, State, Traced, average, fedavg, minus, norm


def over_uploaders(round_: Traced, sent: dict[str, np.ndarray]) -> State:
    """Every unit, its running statistics included, as the mean by size over the clients [K] that `sent` it."""
    after = fedavg(round_)
    for unit, chosen in sent.items():
        models = [c.model for c, here in zip(round_.clients, chosen, strict=True) if here]
        names = [n for n in after if n in UNITS[unit] or n.startswith(f"{unit}.norm.")]
        after |= average(models, round_.sizes[chosen] / round_.sizes[chosen].sum(), names)
        after |= {n: np.max([m[n] for m in models], axis=0) for n in names if n.endswith("num_batches_tracked")}
    return after


def recompute(round_: Traced) -> State:
    """With n = 1: every layer is copied from the client where it moved most."""
    sent = {}
    for unit, names in UNITS.items():
        moved = [norm(minus(c.model, round_.before), names) for c in round_.clients]
        sent[unit] = np.arange(len(moved)) == np.argmax(moved)  # the first of equals
    return over_uploaders(round_, sent)


FEDLDF = Case(
    "fedldf", {"weighting": [{"fedldf": {"top_n": 1}}]}, {"weighting": [{"fedldf": {"top_n": 3}}]},
    {"weighting": [{"fedldf": {"top_n": 2}}]}, recompute=recompute,
)  # fmt: skip
