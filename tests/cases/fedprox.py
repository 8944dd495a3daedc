from case import Case, State, Traced
from reference import aggregate, gradient, tensors, train

MU = 0.5


def recompute(round_: Traced) -> State:
    """Grad += mu (w − w_g) before momentum and weight decay."""
    server = tensors(round_.before)

    def proximal(w, x, y):
        grads, statistics = gradient(w, x, y)
        return {n: g + MU * (w[n] - server[n]) for n, g in grads.items()}, statistics

    models = [train(round_.federation, server, c.steps, round_.lr, gradient=proximal) for c in round_.clients]
    return aggregate(models, round_.p)


# At most three float32 steps a client: the error of a step grows by at most a few in the next.
FEDPROX = Case(
    "fedprox", {"client": [{"fedprox": {"mu": MU}}], "local": {"batch_size": 16}},
    {"client": [{"fedprox": {"mu": 0.0}}]}, {"client": [{"fedprox": {"mu": 0.01}}]},
    recompute=recompute, tolerance=5e-6,
)  # fmt: skip
