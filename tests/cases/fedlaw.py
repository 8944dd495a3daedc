import torch
import torch.nn.functional as F
from case import Case, State, Traced, fedavg
from reference import forward, inputs, parameters, tensors

PROXY = {"data": {"proxy": {"samples": 24}}}
SETTING = {"epochs": 3, "batch_size": 16, "halve_every": 2}  # two batches an epoch


def recompute(round_: Traced, moves: str, quad: bool = False) -> State:
    """By autograd through w = γ Σ λ_k w_k in train mode; buffers are averaged with the learned λ."""
    models, p = [tensors(c.model) for c in round_.clients], torch.tensor(round_.p)
    names = parameters(models[0])
    x = torch.full_like(p, len(p) ** -0.5) if quad else p.log()
    s = torch.tensor(1.0 if quad else 0.0, dtype=torch.float64)

    def weights():
        return (x**2 / (x**2).sum(), s**2) if quad else (x.softmax(0), s.exp())

    moved = [t.requires_grad_() for t, name in ((x, "lambda"), (s, "gamma")) if name in moves]
    adam = torch.optim.Adam(moved, lr=0.01, betas=(0.5, 0.999))
    schedule = torch.optim.lr_scheduler.StepLR(adam, step_size=SETTING["halve_every"], gamma=0.5)
    batches = iter(round_.proxy_batches)
    for _ in range(SETTING["epochs"]):
        for _ in range(2):
            images, labels = inputs(round_.federation, next(batches))
            lam, gamma = weights()
            mixed = {n: gamma * sum(w * m[n] for w, m in zip(lam, models, strict=True)) for n in names}
            adam.zero_grad()
            F.cross_entropy(forward({**models[0], **mixed}, images, train=True)[0], labels).backward()
            adam.step()
        schedule.step()
    assert next(batches, None) is None
    lam, gamma = (w.detach().numpy() for w in weights())
    after = fedavg(round_, lam)
    return after | {n: gamma * after[n] for n in names}


def learned(name: str, **settings: object) -> dict:
    return {"weighting": [{name: {**SETTING, **settings}}], **PROXY}


# Adam divides a gradient by its size: an error of 1e-6 in a float32 gradient is one of 1e-8 in a weight.
FEDLAW = Case(
    "fedlaw", learned("fedlaw"), learned("fedlaw", epochs=0), learned("fedlaw", epochs=1), PROXY,
    recompute=lambda r: recompute(r, "lambda gamma"),
)  # fmt: skip
ATTENTIVE = Case(
    "attentive_law", learned("attentive_law", form="quad"), learned("attentive_law", stop_round=0),
    learned("attentive_law", stop_round=1), PROXY, recompute=lambda r: recompute(r, "lambda", quad=True),
)  # fmt: skip
GWS = Case(
    "adaptive_gws", learned("adaptive_gws"), learned("adaptive_gws", epochs=0), learned("adaptive_gws", epochs=1),
    PROXY, recompute=lambda r: recompute(r, "gamma"),
)  # fmt: skip
