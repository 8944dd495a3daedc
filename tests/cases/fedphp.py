import torch
import torch.nn.functional as F
from case import Case, State, Traced
from reference import aggregate, close, forward, gradient_of, part, tensors, train

MU, LAM = 0.9, 0.4


def latents(state, x):
    """The body's output: logits under a head that is the identity."""
    return forward({**state, "head.weight": torch.eye(64).double(), "head.bias": torch.zeros(64).double()}, x, True)[0]


def kernel(a, b):
    squared = ((a[:, None] - b[None]) ** 2).sum(2)
    return sum(torch.exp(-squared / (2 * width)) for width in (10, 15, 20, 50))


def recompute(round_: Traced) -> State:
    """With the batch statistics of either model; μ_t = mu · 2/3 in the third of three rounds."""
    server, models, histories = tensors(round_.before), [], set()
    for client in round_.clients:
        q = part(client.before, "fedphp.q.", {}) or server
        histories.add(q is server)

        def taught(w, x, y, q=q):
            def loss(leaves):
                a, b = latents(leaves, x), latents(q, x)
                mmd = (kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)).mean()
                return (1 - LAM) * F.cross_entropy(forward(leaves, x, True)[0], y) + LAM * mmd

            return gradient_of(w, loss), forward(w, x, True)[1]

        w = train(round_.federation, server, client.steps, round_.lr, gradient=taught)
        mu = MU * 2 / 3
        inherited = part(client.after, "fedphp.q.", {})
        read = [n for n in inherited if not n.endswith("num_batches_tracked")]
        close({n: inherited[n] for n in read}, {n: (1 - mu) * w[n] + mu * q[n] for n in read}, 5e-6)
        models.append(w)
    assert histories == {True, False}  # newcomers and others
    return aggregate(models, round_.p)


# At most three float32 steps a client.
FEDPHP = Case(
    "fedphp", {"client": [{"fedphp": {"mu": MU, "lam": LAM}}], "local": {"batch_size": 24}},
    {"client": [{"fedphp": {"mu": 0.0, "lam": 0.0}}]}, {"client": [{"fedphp": {"mu": 0.0, "lam": 0.01}}]},
    recompute=recompute,
)  # fmt: skip
