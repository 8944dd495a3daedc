from case import Case, State, Traced
from reference import aggregate, close, part, tensors, train

RHO = 0.8


def recompute(round_: Traced) -> State:
    """D ← rho d + ∇F from the global d; the server averages w_k and d_k with the same weights."""
    server, models = tensors(round_.before), []
    for client in round_.clients:
        velocity = part(round_.server, "shared.sgdm.", server)
        models.append(train(round_.federation, server, client.steps, round_.lr, velocity=velocity, momentum=RHO))
        close(part(client.upload, "sgdm.", {}), velocity, 5e-6)
    return aggregate(models, round_.p)


PLAIN = {"momentum": 0.0}
# At most three float32 steps a client.
SGDM = Case(
    "sgdm", {"client": [{"sgdm": {"reading": "mfl", "rho": RHO}}], "local": {**PLAIN, "batch_size": 16}},
    {"client": [{"sgdm": {"reading": "mfl", "rho": 0.0}}], "local": PLAIN},
    {"client": [{"sgdm": {"reading": "mfl", "rho": 0.01}}], "local": PLAIN}, {"local": PLAIN},
    recompute=recompute, tolerance=5e-6,
)  # fmt: skip
