import numpy as np
import torch
import torch.nn.functional as F
from case import Case, State, Traced, TracedClient
from reference import aggregate, drawn, forward, gradient, inputs, part, tensors, train

ETA, FRACTION, THRESHOLD, B = 1.0, 0.8, 0.02, 16
HEAD = ["head.weight", "head.bias"]


def local_start(round_: Traced, client: TracedClient, steps: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """With p = 1: W of the head is learned on the batches of `steps`, which the round's sample of the client makes up, as often
    as the rule says."""
    server, old = tensors(round_.before), part(client.before, "previous.", {})
    if not old:
        assert not steps
        return server
    gap = {n: server[n] - old[n] for n in HEAD}
    W = {n: torch.ones_like(server[n]) for n in HEAD}
    if "fedala.weights" in client.before:
        weight, bias = torch.tensor(client.before["fedala.weights"]).split([W[n].numel() for n in HEAD])
        W = {"head.weight": weight.view_as(W["head.weight"]), "head.bias": bias}
    settled, losses, steps = bool(client.before.get("fedala.settled:scalar", False)), [], list(steps)
    sample = drawn(round_.federation, round_.t, client.id, "ala")[: int(FRACTION * client.samples)]
    per_epoch = -(-len(sample) // B)
    while not losses or not (settled or (len(losses) > 10 and np.std(losses[-10:]) < THRESHOLD)):
        passed = [steps.pop(0) for _ in range(per_epoch)]
        assert np.concatenate(passed).tolist() == sample.tolist()
        for rows in passed:
            mixed = server | {n: old[n] + gap[n] * W[n] for n in HEAD}
            x, y = inputs(round_.federation, rows)
            grads = gradient(mixed, x, y)[0]
            W = {n: (W[n] - ETA * grads[n] * gap[n]).clamp(0, 1) for n in HEAD}
        losses.append(float(F.cross_entropy(forward(mixed, x, True)[0], y)))
    assert not steps
    return server | {n: old[n] + gap[n] * W[n] for n in HEAD}


def recompute(round_: Traced) -> State:
    models, histories = [], set()
    for client in round_.clients:
        epoch = -(-client.samples // B)
        start = local_start(round_, client, client.steps[:-epoch])
        models.append(train(round_.federation, start, client.steps[-epoch:], round_.lr))
        histories.add(("previous.head.bias" in client.before, "fedala.weights" in client.before))
    assert histories == {(False, False), (True, False), (True, True)}  # a newcomer, a first and a second active round
    return aggregate(models, round_.p)


# At most three float32 steps a client; W is learned on a net whose only trained layer is linear, and clipped.
FEDALA = Case(
    "fedala", {"client": [{"fedala": {"eta": ETA, "threshold": THRESHOLD}}], "local": {"batch_size": B}},
    {"client": [{"fedala": {"eta": 0.0}}]}, {"client": [{"fedala": {"eta": 1.0}}]}, recompute=recompute, tolerance=5e-6,
)  # fmt: skip
