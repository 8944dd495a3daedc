from hashlib import blake2b

import numpy as np
import torch
from case import UNITS, Case, State, Traced
from reference import aggregate, gradient, inputs, part, tensors

TAU, DECAY, RATE = 2.0, 0.9, 3.0
MODEL, CHOICE = 1, 1


def unit_of(name: str) -> int:
    """A running statistic belongs to the layer of its norm."""
    return list(UNITS).index(name.partition(".")[0])


def compose(weights: torch.Tensor, received: dict, local: dict) -> dict:
    return {n: (received if weights[unit_of(n), 0] >= weights[unit_of(n), 1] else local)[n] for n in received}


def recompute(round_: Traced) -> State:
    """Batches in turn for the weights, in the copy each layer was taken from, and for the logits."""
    config, server, models = round_.federation.config, tensors(round_.before), []
    tau, taken = TAU * DECAY**2, set()
    for client in round_.clients:
        logits = torch.tensor(client.before.get("partialfed.logits", np.zeros((3, 2))))
        copies, velocity = [dict(server), part(client.before, "previous.", {}) or dict(server)], {}
        # The stream of a purpose is seeded by its name: seed/round/client/purpose.
        key = blake2b(f"{config.seed}/2/{client.id}/partialfed".encode(), digest_size=8)
        stream = torch.Generator().manual_seed(int.from_bytes(key.digest(), "big") >> 1)
        for i, rows in enumerate(client.steps):
            noise = -torch.empty(3, 2).double().exponential_(generator=stream).log()
            soft = torch.softmax((logits + noise) / tau, 1)
            taken |= set((soft[:, 0] >= soft[:, 1]).tolist())
            model = compose(soft, *copies)
            grads, statistics = gradient(model, *inputs(round_.federation, rows))
            if i % (MODEL + CHOICE) < MODEL:
                for n, g in grads.items():
                    step = g + config.local.weight_decay * model[n]
                    velocity[n] = config.local.momentum * velocity[n] + step if n in velocity else step
                    model[n] = model[n] - round_.lr * velocity[n]
            else:
                slopes = torch.zeros(3, 2).double()  # of the loss in the choices a_l, through the hard ones
                for n, g in grads.items():
                    slopes[unit_of(n)] += torch.stack([(g * copy[n]).sum() for copy in copies])
                jacobian = torch.diag_embed(soft) - soft[:, :, None] * soft[:, None, :]
                logits = logits - RATE / tau * (jacobian @ slopes[:, :, None])[:, :, 0]
            model |= statistics
            chosen = compose(soft, dict.fromkeys(server, 0), dict.fromkeys(server, 1))
            for n, which in chosen.items():
                copies[which][n] = model[n]
        np.testing.assert_allclose(client.after["partialfed.logits"], logits, rtol=0, atol=2e-5)
        models.append(compose(logits, *copies))
    assert taken == {True, False}
    return aggregate(models, round_.p)


# At most three float32 steps a client.
SETTING = {
    "tau": TAU, "tau_decay": DECAY, "choice_lr": RATE, "model_batches": MODEL, "choice_batches": CHOICE,
}  # fmt: skip
PARTIALFED = Case(
    "partialfed",
    {"client": [{"partialfed": SETTING}], "local": {"batch_size": 16}, "rounds": {"participation": 0.75}},
    {"client": [{"partialfed": {"logits": [1e6, 0.0], "choice_batches": 0}}]},
    {"client": [{"partialfed": {"logits": [1e6, 0.0], "model_batches": 1, "choice_batches": 1}}]},
    recompute=recompute,
)  # fmt: skip
