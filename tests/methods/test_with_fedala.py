"""ALA beside the methods that train in a way of their own."""

import pytest
import torch
from quadratics import Quadratics, quadratics
from test_fedala import QUICK, SMALL
from toy import vector

from raysim.core.client import ClientMethod, LocalRun
from raysim.methods.ditto import Ditto
from raysim.methods.fedamp import FedAMP
from raysim.methods.partialfed import PartialFed
from raysim.methods.pfedme import pFedMe

BASES = {
    "fedprox": {"mu": 0.1}, "perfedavg": {}, "fedrep": {"head_epochs": 1}, "pfedme": {"lam": 5.0}, "ditto": {},
    "fedamp": {"init": "cloud", "alpha": 1.0, "sigma": 2.0}, "fedphp": {},
    "partialfed": {"model_batches": 2, "choice_batches": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_composes(name, ran):
    """ALA changes where the base starts, from a client's second round on, and the base what ALA starts from. Without a
    rate ALA leaves the base as it is, to the bit."""

    def value(*client):
        rounds = {"participation": 1.0 if name == "fedamp" else 0.75}
        return ran(client=[*client], **{**SMALL, "rounds": {**SMALL["rounds"], **rounds}}).server.value

    base, ala = {name: BASES[name]}, {"fedala": QUICK}
    both, alone = value(ala, base), value(base)
    assert torch.equal(both, value(base, ala))
    assert torch.equal(alone, value(base, {"fedala": {"eta": 0.0}}))
    assert not torch.equal(both, alone)
    assert torch.equal(both, value(ala)) == (name == "ditto")  # what Ditto sends is its global track


class Mix(ClientMethod):
    """Stands in for ALA: half of the received, half of the previous model."""

    def start(self, run: LocalRun) -> None:
        run.params.copy_((run.received + run.previous) / 2)


def trained(method: ClientMethod) -> tuple[LocalRun, float]:
    """Received 6, previous 2: the mix is 4; a step of 0.1 on ½ w²."""
    federation = Quadratics([Mix(), method], [[1.0]], [[0.0]])
    federation.states[0].previous = vector([2.0])
    run = federation.run(0, [6.0])
    return run, federation.visit(run).value.item()


@quadratics()
def test_what_starts_at_the_mix():
    run, w = trained(Ditto(lam=3.0, epochs=1))
    assert w == pytest.approx(4.0 - 0.1 * 4.0)
    assert run.state(Ditto()).v.item() == pytest.approx(4.0 - 0.1 * 4.0)  # and the mix is the spring's centre

    run, w = trained(pFedMe(eta=0.1, lam=3.0, inner_steps=1, mu=0.0))
    theta = 4.0 - 0.1 * 4.0
    assert run.state(pFedMe()).theta.item() == pytest.approx(theta)
    assert w == pytest.approx(4.0 - 0.1 * 3.0 * (4.0 - theta))

    run, w = trained(FedAMP(alpha=1.0, lam=3.0, init="cloud"))
    assert w == pytest.approx(4.0 - 0.1 * (4.0 + 3.0 * (4.0 - 6.0)))  # the attraction is to u_i itself

    run, w = trained(PartialFed(logits=(1e6, 0.0)))
    assert w == pytest.approx(4.0 - 0.1 * 4.0)  # its global side is the mix
