from case import Case, State, Traced
from reference import aggregate, gradient, inputs, parameters, tensors

ETA, LAM, MU, BETA, STEPS = 0.05, 2.0, 0.01, 0.7, 3


def recompute(round_: Traced) -> State:
    """Three steps of θ on every batch, then one of w; θ goes on from the batch before."""
    server, models = tensors(round_.before), []
    names = parameters(server)
    for client in round_.clients:
        w, theta = dict(server), dict(server)
        for rows in client.steps:
            for _ in range(STEPS):
                grads, statistics = gradient(theta, *inputs(round_.federation, rows))
                for n in names:
                    theta[n] = theta[n] - ETA * (grads[n] + LAM * (theta[n] - w[n]) + MU * theta[n])
                theta |= statistics
            for n in names:
                w[n] = w[n] - round_.lr * LAM * (w[n] - theta[n])
        models.append({**theta, **{n: w[n] for n in names}})
    mean = aggregate(models, round_.p)
    return mean | {n: (1 - BETA) * round_.before[n] + BETA * mean[n] for n in names}


# With one inner step and η lam = 1, w follows θ, which is then plain SGD with pFedMe's own rate.
PLAIN = {"lr_decay": 1.0, "momentum": 0.0, "weight_decay": 0.0}
FOLLOWING = {"lam": 2.0, "eta": 0.1, "mu": 0.0, "inner_steps": 1}

# At most two batches of three float32 steps a client.
PFEDME = Case(
    "pfedme",
    {"client": [{"pfedme": {"eta": ETA, "lam": LAM, "mu": MU, "beta": BETA, "inner_steps": STEPS}}],
     "local": {"batch_size": 32}},
    {"client": [{"pfedme": FOLLOWING}], "local": {**PLAIN, "lr": 0.5}},
    {"client": [{"pfedme": {**FOLLOWING, "mu": 0.01}}], "local": {**PLAIN, "lr": 0.5}}, {"local": {**PLAIN, "lr": 0.1}},
    recompute=recompute,
)  # fmt: skip
