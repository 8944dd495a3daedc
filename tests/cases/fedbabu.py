from case import Case, State, Traced
from reference import aggregate, parameters, tensors, train


def recompute(round_: Traced) -> State:
    """Clients train all but the last linear layer; the mean is by size, and the head stays."""
    server = tensors(round_.before)
    body = [n for n in parameters(server) if not n.startswith("head.")]
    models = [train(round_.federation, server, c.steps, round_.lr, only=body) for c in round_.clients]
    head = {n: round_.before[n] for n in round_.before if n.startswith("head.")}
    return aggregate(models, round_.p) | head


# Without head epochs FedRep's head stays as it was drawn, too. At most three float32 steps a client.
FEDBABU = Case(
    "fedbabu", {"client": ["fedbabu"], "local": {"batch_size": 16}}, {"client": ["fedbabu"]}, {"client": []},
    {"client": [{"fedrep": {"head_epochs": 0}}]}, recompute=recompute, tolerance=5e-6,
)  # fmt: skip
