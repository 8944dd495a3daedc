"""The flat optimisers take the steps of torch.optim, in float64."""

import itertools

import pytest
import torch

from raysim.core.optim import SGD, Adam, OptimizerSpec

N, LR = 7, 0.1
GRADIENTS = torch.randn(6, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SGDS = [
    OptimizerSpec(momentum=m, nesterov=n, weight_decay=w)
    for m, n, w in itertools.product((0.0, 0.9), (False, True), (0.0, 0.05))
    if m or not n
]
ADAMS = [
    OptimizerSpec(name, weight_decay=w, betas=b)
    for name in ("adam", "adamw")
    for w in (0.0, 0.05)
    for b in ((0.9, 0.999), (0.5, 0.8))
]


def start() -> torch.Tensor:
    return torch.linspace(-1, 1, N, dtype=torch.float64)


def ours(spec: OptimizerSpec, params: torch.Tensor) -> SGD | Adam:
    return spec.build(params, torch.zeros_like(params), LR)


def theirs(spec: OptimizerSpec, *params: torch.Tensor) -> torch.optim.Optimizer:
    leaves = [torch.nn.Parameter(p) for p in params]
    if spec.name != "sgd":
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[spec.name](
            leaves, LR, betas=spec.betas, weight_decay=spec.weight_decay
        )
    return torch.optim.SGD(leaves, LR, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=spec.weight_decay)


@pytest.mark.parametrize("spec", SGDS + ADAMS, ids=str)
def test_every_step_is_torchs(spec):
    optimizer, reference = ours(spec, start()), theirs(spec, start())
    [leaf] = reference.param_groups[0]["params"]
    for gradient in GRADIENTS:
        optimizer.grad.copy_(gradient)
        optimizer.step()
        leaf.grad = gradient.clone()
        reference.step()
        torch.testing.assert_close(optimizer.params, leaf.detach(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("spec", [SGDS[-1], ADAMS[0], ADAMS[-1]], ids=["sgd", "adam", "adamw"])
def test_parts(spec):
    """A part that is stepped alone has a history of its own, as parameters without a gradient have in torch."""
    optimizer, reference = ours(spec, start()), theirs(spec, start()[:3], start()[3:])
    leaves = reference.param_groups[0]["params"]
    parts = [slice(0, 3), slice(3, N)]
    for part, gradient in zip((0, 0, 1, 0, 1, 1), GRADIENTS, strict=True):
        optimizer.grad.copy_(gradient)
        optimizer.step(parts[part])
        for i, leaf in enumerate(leaves):
            leaf.grad = gradient[parts[i]].clone() if i == part else None
        reference.step()
        torch.testing.assert_close(optimizer.params, torch.cat([p.detach() for p in leaves]), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("spec", SGDS + ADAMS, ids=str)
def test_persisted_state(spec):
    """What is kept and loaded by another optimiser (`local.state: persist`) goes on as if nothing had happened."""
    through = ours(spec, start())
    first = ours(spec, start())
    for gradient in GRADIENTS[:3]:
        for optimizer in (through, first):
            optimizer.grad.copy_(gradient)
            optimizer.step()
    kept = {name: tensor.clone() for name, tensor in first.state().items()}
    second = ours(spec, first.params)
    fresh = ours(spec, first.params.clone())
    second.load(kept)
    for gradient in GRADIENTS[3:]:
        for optimizer in (through, second, fresh):
            optimizer.grad.copy_(gradient)
            optimizer.step()
    assert second.params.equal(through.params)
    forgets = spec.name == "sgd" and not spec.momentum
    assert fresh.params.equal(through.params) == forgets
    assert bool(kept) != forgets


@pytest.mark.parametrize("proximal", [0.0, 0.7])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_normaliser(momentum, nesterov, proximal):
    """FedNova's ‖a‖₁: how often the steps so far have applied a gradient that was 1 throughout (in units of -lr)."""
    spec = OptimizerSpec(momentum=momentum, nesterov=nesterov)
    optimizer = spec.build(torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), LR)
    optimizer.proximal = proximal
    steps = 5
    applied = torch.zeros(steps)
    for i in range(steps):
        # The coefficient of gradient i in the final position: 1 at step i, nothing at the others.
        trial = spec.build(torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), LR)
        for j in range(steps):
            if proximal:
                trial.params.mul_(1 - LR * proximal)  # μ(w − w_g), whose own momentum the paper leaves out
            trial.grad.fill_(float(i == j))
            trial.step()
        applied[i] = -trial.params.item() / LR
    for _ in range(steps):
        optimizer.grad.fill_(1.0)
        optimizer.step()
    assert optimizer.normaliser == pytest.approx(applied.abs().sum().item())
