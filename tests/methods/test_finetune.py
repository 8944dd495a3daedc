"""FedAvg-C and FedProx-C."""

import pytest
import torch
from conftest import simulate, tiny
from runs import batches, local_run

from raysim.federation.round import evaluate_personal
from raysim.methods import FedProx
from raysim.methods.finetune import FineTune

TESTS = {"data": {"client_test_frac": 0.25}, "evaluate": {"personal": "after_init"}, "rounds": {"total": 1}}


def test_training_goes_on_from_the_tuned_model_in_its_usual_order():
    tuned, plain = local_run([FineTune(2)]), local_run([])
    for run in (tuned, plain):
        run.stack.start(run)
        run.stack.train(run)
    assert [len(b) for b in batches(tuned, "finetune")] == [8] * 6
    assert torch.equal(torch.cat(batches(tuned, "batches")), torch.cat(batches(plain, "batches")))
    assert tuned.steps == 9


def test_steps_of_tuning_feel_the_proximal_term():
    """FedNova's A of nine steps with η = 0.1 and μ = 2: A ← (1 − ημ) A + 1."""
    run = local_run([FedProx(2.0), FineTune(2)])
    run.stack.start(run)
    run.stack.train(run)
    assert run.optimizer.normaliser == pytest.approx((1 - 0.8**9) / 0.2)


def test_it_is_tuned_before_it_is_tested(tmp_path):
    def tested(epochs):
        federation = simulate(tiny(client=[{"finetune": epochs}], **TESTS), tmp_path / str(epochs))
        return sum(score.loss for score in evaluate_personal(federation.run, 1)[0].values())

    assert len({tested(2), tested(1), tested(0)}) == 3


def test_fedprox_c_is_another_thing(ran):
    stacks = [{"finetune": 1}], [{"fedprox": 0.5}, {"finetune": 1}]
    assert not torch.equal(*(ran(client=stack).server.value for stack in stacks))
