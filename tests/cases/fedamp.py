import torch
from case import Case, State, Traced
from reference import aggregate, gradient, parameters, tensors, train

ALPHA, LAM, SIGMA = 0.4, 0.6, 1.5
ALL = {"participation": 1.0}
LOCAL = {"client": [{"fedfomo": {"models": 1}}], "data": {"client_val_frac": 0.2}, "rounds": ALL}  # no peer, no server


def recompute(round_: Traced) -> State:
    """From w_i, with the penalty lam/(2 alpha) ‖w − u_i‖²; u_i has the client's own statistics."""
    bank = {i: tensors(model) for i, model in round_.bank.items()}
    models = []
    for client in round_.clients:
        own = bank[client.id]
        names = parameters(own)
        centre = {n: own[n].clone() for n in names}
        for i, other in bank.items():
            squared = sum(((other[n] - own[n]) ** 2).sum() for n in names)
            c = ALPHA / SIGMA * torch.exp(-squared / SIGMA) if i != client.id else 0.0
            for n in names:
                centre[n] += c * (other[n] - own[n])

        def attracted(w, x, y, centre=centre):
            grads, statistics = gradient(w, x, y)
            return {n: g + LAM / ALPHA * (w[n] - centre[n]) for n, g in grads.items()}, statistics

        models.append(train(round_.federation, own, client.steps, round_.lr, gradient=attracted))
    return aggregate(models, round_.p)


# At most three float32 steps a client.
FEDAMP = Case(
    "fedamp",
    {"client": [{"fedamp": {"alpha": ALPHA, "lam": LAM, "sigma": SIGMA}}], "rounds": ALL, "local": {"batch_size": 24}},
    {**LOCAL, "client": [{"fedamp": {"alpha": 1e-30, "lam": 0.0, "init": "cloud"}}]},
    {**LOCAL, "client": [{"fedamp": {"alpha": 0.1, "lam": 0.0, "sigma": 1.0, "init": "cloud"}}]}, LOCAL,
    recompute=recompute,
)  # fmt: skip
