import numpy as np
from case import Case, State, Traced
from reference import aggregate, close, gradient, part, tensors, train

ALPHA, N = 0.3, 8


def recompute(round_: Traced) -> State:
    """Clients descend F − ⟨g_k, w⟩ + alpha/2 ‖w − w_g‖²; w = mean + h̃ + (1/N) Σ Δ_k."""
    server, models = tensors(round_.before), []
    drift = part(round_.server, "memory.feddyn.", server)
    for client in round_.clients:
        g = part(client.before, "feddyn.g.", server)

        def dynamic(w, x, y, g=g):
            grads, statistics = gradient(w, x, y)
            return {n: d - g[n] + ALPHA * (w[n] - server[n]) for n, d in grads.items()}, statistics

        model = train(round_.federation, server, client.steps, round_.lr, gradient=dynamic)
        close(part(client.after, "feddyn.g.", {}), {n: g[n] - ALPHA * (model[n] - server[n]) for n in g}, 5e-6)
        models.append(model)
    after = aggregate(models, np.full(len(models), 1 / len(models)))
    for n in drift:
        after[n] = after[n] + (drift[n] + sum(m[n] - server[n] for m in models) / N).numpy()
    return after


UNIFORM = {"weighting": [{"fedavg": {"weights": "uniform"}}]}
# At most three float32 steps a client.
FEDDYN = Case(
    "feddyn", {"client": [{"feddyn": {"alpha": ALPHA}}], "local": {"batch_size": 16}},
    {"client": [{"feddyn": {"alpha": 0.0}}]}, {"client": [{"feddyn": {"alpha": 1e-6}}]}, UNIFORM,
    recompute=recompute, tolerance=5e-6,
)  # fmt: skip
