import numpy as np
from case import Case, State, Traced, TracedClient, fedavg
from reference import forward, inputs, tensors


def recompute(round_: Traced) -> State:
    """From the trained models' latents in eval mode; temperature 0.5."""

    def latent(client: TracedClient) -> np.ndarray:
        x, _ = inputs(round_.federation, round_.federation.partition.train[client.id])
        bare = {**client.model, "head.weight": np.eye(64), "head.bias": np.zeros(64)}  # hands its input on
        return forward(tensors(bare), x, train=False)[0].mean(0).numpy()

    z = np.stack([latent(client) for client in round_.clients])
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    e = np.exp((z @ z.T).sum(1) / 0.5)
    weights = (1 - e / e.sum()) * round_.p
    return fedavg(round_, weights / weights.sum())


CCN = Case(
    "ccn", {"weighting": ["ccn"]}, {"weighting": [{"ccn": {"temperature": 1e9}}]}, {"weighting": ["ccn"]},
    recompute=recompute,
)  # fmt: skip
