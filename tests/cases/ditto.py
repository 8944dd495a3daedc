from typing import Any

import torch
from case import Case, State, Traced
from reference import aggregate, close, gradient, part, tensors, train

LAM = 0.5


def recompute(round_: Traced) -> State:
    """With s = 1: v around the received model, then w from it; each has momentum of its own."""
    server, models, histories = tensors(round_.before), [], set()

    def pulled(v, x, y):
        grads, statistics = gradient(v, x, y)
        return {n: g + LAM * (v[n] - server[n]) for n, g in grads.items()}, statistics

    for client in round_.clients:
        half = len(client.steps) // 2
        v = part(client.before, "ditto.v.", {}) or server
        histories.add(v is server)
        v = train(round_.federation, v, client.steps[:half], round_.lr, gradient=pulled)
        close(part(client.after, "ditto.v.", {}), v, 5e-6)
        models.append(train(round_.federation, server, client.steps[half:], round_.lr))
    assert histories == {True, False}  # newcomers and others
    return aggregate(models, round_.p)


def personal_models(federation: Any) -> torch.Tensor:
    kept = federation.engine.client_states
    return torch.stack([torch.from_numpy(federation.engine.value_of(kept[c])["ditto.v"]) for c in sorted(kept)])


def alone(lam: float, **server: Any) -> dict[str, Any]:
    return {"client": [{"ditto": {"lam": lam}}], "rounds": {"participation": 1.0}, **server}


# Without the spring v does not notice that the server does something else. The global track: test_ditto.py.
# At most three float32 steps a client.
HALF = {"server": [{"step_size": {"eta": 0.5}}]}
DITTO = Case(
    "ditto", {"client": [{"ditto": {"lam": LAM, "epochs": 1}}], "local": {"batch_size": 24}}, alone(0.0, **HALF),
    alone(0.01, **HALF), alone(0.0), recompute=recompute, compared=personal_models,
)  # fmt: skip
