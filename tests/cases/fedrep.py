import torch
from case import Case, State, Traced
from reference import aggregate, parameters, tensors, train


def recompute(round_: Traced) -> State:
    """An epoch of the client's own head on the frozen body, one of the body under it; that is sent."""
    server, models = tensors(round_.before), []
    body = [n for n in parameters(server) if not n.startswith("head.")]
    head = ["head.weight", "head.bias"]
    for client in round_.clients:
        start = dict(server)
        if "personal" in client.before:
            weight, bias = torch.tensor(client.before["personal"]).split([server[n].numel() for n in head])
            start |= {"head.weight": weight.view_as(server["head.weight"]), "head.bias": bias}
        half = len(client.steps) // 2
        personal = train(round_.federation, start, client.steps[:half], round_.lr, only=head)
        models.append(train(round_.federation, personal, client.steps[half:], round_.lr, only=body))
    return aggregate(models, round_.p) | {n: round_.before[n] for n in head}


# FedBABU is FedRep whose head is never trained. At most two float32 steps of the head and two of the body.
FEDREP = Case(
    "fedrep", {"client": [{"fedrep": {"head_epochs": 1}}], "local": {"batch_size": 24}},
    {"client": [{"fedrep": {"head_epochs": 0}}]}, {"client": [{"fedrep": {"head_epochs": 1}}]}, {"client": ["fedbabu"]},
    recompute=recompute, tolerance=5e-6,
)  # fmt: skip
