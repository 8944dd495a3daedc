from case import Case, State, Traced
from reference import aggregate, gradient, tensors, train

ALPHA = 0.2


def recompute(round_: Traced) -> State:
    """Θ' = θ − alpha ∇L(θ; first half of 2B samples), then the gradient of the second half at θ'."""
    server = tensors(round_.before)

    def first_order(w, x, y):
        half = len(y) // 2
        inner, statistics = gradient(w, x[:half], y[:half])
        adapted = {**w, **statistics, **{n: w[n] - ALPHA * g for n, g in inner.items()}}
        return gradient(adapted, x[-half:], y[-half:])

    models = [train(round_.federation, server, c.steps, round_.lr, gradient=first_order) for c in round_.clients]
    return aggregate(models, round_.p)


# beta = 0 moves nothing, as a learning rate below rounding does not: a net without BatchNorm stays as it was drawn.
STILL = {"model": {"name": "small_cnn"}}
# At most three float32 steps of two gradients each.
PERFEDAVG = Case(
    "perfedavg", {"client": [{"perfedavg": {"alpha": ALPHA}}]}, {"client": [{"perfedavg": {"beta": 0.0}}], **STILL},
    {"client": [{"perfedavg": {"beta": 1e-3}}], **STILL}, {"local": {"lr": 1e-30, "weight_decay": 0.0}, **STILL},
    recompute=recompute, tolerance=5e-6,
)  # fmt: skip
