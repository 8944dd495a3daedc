import numpy as np
from case import Case, State, Traced
from reference import aggregate, close, gradient, part, tensors, train


def recompute(round_: Traced) -> State:
    """Option II: steps along ∇F − c_k + c; c_k⁺ = c_k − c + (w_g − w_k)/(Sη); uniform mean."""
    server, models = tensors(round_.before), []
    c = part(round_.server, "shared.scaffold.", server)
    for client in round_.clients:
        own = part(client.before, "scaffold.c.", server)

        def controlled(w, x, y, own=own):
            grads, statistics = gradient(w, x, y)
            return {n: g - own[n] + c[n] for n, g in grads.items()}, statistics

        model = train(round_.federation, server, client.steps, round_.lr, gradient=controlled)
        length = len(client.steps) * round_.lr
        new = {n: own[n] - c[n] + (server[n] - model[n]) / length for n in c}
        close(part(client.after, "scaffold.c.", {}), new, 5e-5)  # errors of the model over Sη ≥ 0.08
        close(part(client.upload, "scaffold.", {}), {n: new[n] - own[n] for n in c}, 5e-5)
        models.append(model)
    return aggregate(models, np.full(len(models), 1 / len(models)))


PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
ONE = {"local": PLAIN, "rounds": {"total": 1, "evaluate_every": 1}}  # the first round: no client has a control yet
# At most three float32 steps a client.
SCAFFOLD = Case(
    "scaffold", {"client": ["scaffold"], "local": {**PLAIN, "batch_size": 16}},
    {"client": ["scaffold"], **ONE}, {"client": ["scaffold"], **ONE, "weighting": ["fedavg"]},
    {"weighting": [{"fedavg": {"weights": "uniform"}}], **ONE},
    recompute=recompute, tolerance=5e-6,
)  # fmt: skip
