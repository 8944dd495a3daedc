import numpy as np
import torch.nn.functional as F
from case import Case, State, Traced
from cases.fedamp import LOCAL
from reference import aggregate, forward, inputs, parameters, part, tensors, train

MODELS = 4


def recompute(round_: Traced) -> State:
    """Of the models sent, what each gains on the validation samples over θ_i^old, per distance."""
    bank = {i: tensors(model) for i, model in round_.bank.items()}
    N = len(round_.federation.server.population.sizes)
    Q, models, histories = np.eye(N), [], set()
    Q.flat[round_.server["memory.fedfomo.keys"].astype(int)] = round_.server["memory.fedfomo.values"]
    for client in round_.clients:
        x, y = inputs(round_.federation, round_.federation.partition.val[client.id])
        start, scores = tensors(round_.before), np.zeros(len(Q))
        if old := part(client.before, "fedfomo.value.", {}):
            names = parameters(old)
            sent = sorted(sorted(bank), key=lambda i: -Q[client.id, i])[:MODELS]

            def loss(model, x=x, y=y):
                return float(F.cross_entropy(forward(model, x, False)[0], y))

            for i in sent:
                distance = float(sum(((bank[i][n] - old[n]) ** 2).sum() for n in names).sqrt())
                scores[i] = (loss(old) - loss(bank[i])) / (distance + 1e-5)
            b = np.maximum(scores, 0)
            histories.add((b > 0).sum())
            start = bank[client.id]
            if b.sum() > 0:
                start = tensors(aggregate(list(bank.values()), [b[i] / b.sum() for i in bank]))
        np.testing.assert_allclose(client.upload["fedfomo"], scores, rtol=1e-4, atol=2e-6)
        models.append(train(round_.federation, start, client.steps, round_.lr))
    assert len(histories) > 1  # clients that several models help, and others
    return aggregate(models, round_.p) | counters(round_)


def counters(round_: Traced) -> State:
    """How often statistics were updated: mixed models mix these too, which nothing reads."""
    names = [n for n in round_.before if n.endswith("num_batches_tracked")]
    return {n: np.max([c.model[n] for c in round_.clients], axis=0) for n in names}


# At most three float32 steps a client, from a mixture whose weights are quotients of small differences.
FEDFOMO = Case(
    "fedfomo",
    {"client": [{"fedfomo": {"models": MODELS}}], "data": {"client_val_frac": 0.25}, "rounds": {"participation": 0.75},
     "local": {"batch_size": 16}},
    LOCAL, {**LOCAL, "client": [{"fedfomo": {"models": 2}}]},
    {**LOCAL, "client": [{"fedamp": {"alpha": 1e-30, "lam": 0.0}}]}, recompute=recompute,
)  # fmt: skip
