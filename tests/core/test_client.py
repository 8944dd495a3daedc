"""What a local run does for its methods."""

from dataclasses import dataclass, replace

import pytest
import torch
from runs import batches, local_run, loss

from raysim.core.client import ClientMethod


def started(methods=(), **settings):
    run = local_run(methods, **settings)
    run.receive()
    return run


def test_a_pass_moves_its_layers_alone():
    for part in ("head", "body"):
        run = started(momentum=0.9, weight_decay=0.1)
        run.fit(only=part)
        still = {"head": "body", "body": "head"}[part]
        assert torch.equal(run.params[run.layers.span(still)], run.received[run.layers.span(still)])
        assert not torch.equal(run.params[run.layers.span(part)], run.received[run.layers.span(part)])


def test_clipping_sees_what_is_trained():
    """The limit holds for the head's gradient where only the head moves, and for all of it else."""
    for part, name in (("head", "head"), ("all", "all")):
        run = started(clip=1e-3, samples=8, lr=1.0)
        run.fit(only=part)
        moved = (run.params - run.received)[run.layers.span(name)]
        assert moved.norm().item() == pytest.approx(1e-3)


def test_other_passes_do_not_reorder_the_training():
    once, twice = started(), started()
    twice.fit(2, purpose="more")
    for run in (once, twice):
        run.fit()
    assert torch.equal(torch.cat(batches(once, "batches")), torch.cat(batches(twice, "batches")))
    assert (once.steps, twice.steps) == (3, 9)


def test_a_step_may_take_several_batches():
    @dataclass(frozen=True)
    class Two(ClientMethod):
        batches_per_step = 2

    run = started([Two()], samples=20)
    run.fit()
    assert [len(rows) for rows in batches(run, "batches")] == [16, 4]


def test_methods_choose_the_optimiser_in_turn():
    @dataclass(frozen=True)
    class Momentum(ClientMethod):
        rho: float

        def optimizer(self, spec):
            return replace(spec, momentum=spec.momentum + self.rho)

    @dataclass(frozen=True)
    class Decay(ClientMethod):
        def optimizer(self, spec):
            return replace(spec, weight_decay=10 * spec.momentum)

    run = started([Momentum(0.2), Decay()], momentum=0.1)
    assert run.optimizer.spec.momentum == pytest.approx(0.3)
    assert run.optimizer.spec.weight_decay == pytest.approx(3.0)


def test_the_bare_gradient_is_the_cross_entropys():
    run = started()
    x, y = run.data.train
    value = run.gradient(x, y, corrected=False)
    leaf = run.params.clone().requires_grad_()
    expected = loss(run, leaf, x, y)
    assert value.item() == pytest.approx(expected.item())
    assert torch.allclose(run.grad, torch.autograd.grad(expected, leaf)[0], atol=1e-15)
    whole = run.grad.clone()
    run.gradient(x, y, stage=1)
    first = run.layers.top(2).start
    assert not run.grad[:first].any()
    assert torch.equal(run.grad[first:], whole[first:])


def test_a_note_has_one_index_beside_client_and_layer():
    run = started()
    run.note(ClientMethod(), "kept", torch.zeros(2, 3), "layer", "epoch")
    with pytest.raises(ValueError, match="note 'lost': its axes are client, row, column"):
        run.note(ClientMethod(), "lost", torch.zeros(2, 3), "row", "column")
    assert [note.name for note in run.notes] == ["kept"]
