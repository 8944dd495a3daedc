import torch
import torch.nn.functional as F
from case import Case, State, Traced
from reference import aggregate, forward, gradient_of, part, tensors, train

MU, TAU = 2.0, 0.5


def latents(state, x):
    """The body's output: logits under a head that is the identity."""
    return forward({**state, "head.weight": torch.eye(64).double(), "head.bias": torch.zeros(64).double()}, x, True)[0]


def cosine(a, b):
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


def recompute(round_: Traced) -> State:
    """With the batch statistics of each of the three models."""
    server, models = tensors(round_.before), []
    for client in round_.clients:
        previous = part(client.before, "previous.", {})

        def contrastive(w, x, y, previous=previous):
            def loss(leaves):
                z = latents(leaves, x)
                to_global, to_previous = (torch.exp(cosine(z, latents(v, x)) / TAU) for v in (server, previous))
                contrast = -torch.log(to_global / (to_global + to_previous)).mean()
                return F.cross_entropy(forward(leaves, x, True)[0], y) + MU * contrast

            return gradient_of(w, loss), forward(w, x, True)[1]

        models.append(train(round_.federation, server, client.steps, round_.lr, gradient=contrastive))
    return aggregate(models, round_.p)


# At most three float32 steps a client.
MOON = Case(
    "moon", {"client": [{"moon": {"mu": MU, "tau": TAU}}], "local": {"batch_size": 16}},
    {"client": [{"moon": {"mu": 0.0}}]}, {"client": [{"moon": {"mu": 0.1}}]}, recompute=recompute, tolerance=5e-6,
)  # fmt: skip
