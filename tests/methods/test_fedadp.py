"""FedADP."""

import numpy as np
import pytest
import torch
from conftest import table, tiny
from torch import nn
from toy import ToyCohort, applied, toy_server

from raysim.config import ConfigError
from raysim.core.layers import LayerMap
from raysim.federation import prepare
from raysim.methods.fedadp import FedADP, MeanOfSent, Neurons, water_fill
from raysim.models import MODELS
from raysim.models.own import builder_of

# A unit of two neurons (2 weights, bias, norm's weight and bias: 5 parameters each), and a head of 3.
MODEL = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 1))
LAYERS = LayerMap.of(MODEL)


def test_neurons_own_a_row_of_every_tensor_of_their_unit():
    neurons = Neurons.of(LAYERS)
    owner = neurons.expand(torch.arange(3))
    by_name = {s.name: owner[s.start : s.stop].tolist() for s in LAYERS.tensors}
    assert by_name == {
        "0.0.weight": [0, 0, 1, 1], "0.0.bias": [0, 1], "0.1.weight": [0, 1], "0.1.bias": [0, 1],
        "1.weight": [2, 2], "1.bias": [2],  # the head is never pruned
        "0.1.running_mean": [0, 1], "0.1.running_var": [0, 1], "0.1.num_batches_tracked": [2],
    }  # fmt: skip
    assert neurons.parameters.tolist() == [5, 5, 3]


def test_channels_last_weights_have_the_same_neurons():
    conv = nn.Sequential(nn.Conv2d(3, 2, 2, bias=False), nn.Linear(2, 1))
    owners = [Neurons.of(LayerMap.of(conv, channels_last=c)).expand(torch.arange(3)) for c in (False, True)]
    assert owners[0].tolist() == owners[1].tolist() == [0] * 12 + [1] * 12 + [2] * 3


@pytest.mark.parametrize("budget", [0.5, 30, 100, 160, 500])
def test_water_fill(budget):
    ratio, sizes = torch.tensor([0.1, 1.0, 5.0]).double(), torch.tensor([100, 50, 10])
    share = water_fill(ratio, sizes, budget, least=0.02)
    assert ((share >= 0.02) & (share <= 1)).all()
    assert float(share @ sizes.double()) == pytest.approx(min(max(budget, 0.02 * 160), 160))
    free = (share > 0.02) & (share < 1)
    assert (share / ratio)[free].unique().numel() <= 1 or (share / ratio)[free].std() < 1e-12


def chosen(update: list[float], keep: float) -> list[bool]:
    received = torch.ones(LAYERS.P).double()
    return FedADP(keep).choose(received + torch.tensor(update), received, LAYERS, Neurons.of(LAYERS)).tolist()


def test_the_neurons_that_moved_most_are_sent():
    second = [0.1, 0.1, 0, 0.3, 0, 0.1, 0, 0, 0, 0, 9, 9, 9]  # the head does not count
    assert chosen(second, keep=0.5) == [False, True]  # half of 13 are the head's 3 and 3.5 of the unit's 10
    assert chosen(second, keep=1.0) == [True, True]
    assert chosen([0.0] * 13, keep=0.5) == [True, False]  # nothing moved: the first


def cohort(updates) -> ToyCohort:
    value = [1.0] * LAYERS.P + [0.0] * LAYERS.B
    return ToyCohort(toy_server(LAYERS, value), updates, [1, 3], scalars={"fedadp": [[True, False], [True, False]]})


def test_a_neuron_is_averaged_over_those_that_sent_it():
    toy = cohort([[1.0] * LAYERS.S, [2.0] * LAYERS.S])
    toy._scalars["fedadp"] = [[True, False], [False, False]]
    masks = torch.tensor([[True, False, True], [False, False, True]])
    toy.updates *= torch.stack([Neurons.of(LAYERS).expand(mask) for mask in masks])  # what is not sent is as received
    result = {n: v.flatten().tolist() for n, v in LAYERS.unflatten(applied(MeanOfSent(), toy)).items()}
    assert result["0.0.weight"] == pytest.approx([2, 2, 1, 1])  # sent by client 1 alone; by nobody
    assert result["0.1.running_var"] == pytest.approx([1, 0])
    assert result["1.weight"] == pytest.approx([2.75, 2.75])  # 1 + (1 + 3 · 2) / 4


def test_everything_sent_is_fedavg():
    toy = cohort([[1.0] * LAYERS.S, [2.0] * LAYERS.S])
    toy._scalars["fedadp"] = [[True, True]] * 2
    torch.testing.assert_close(applied(MeanOfSent(), toy), toy.reduce(toy.by_size()), rtol=0, atol=1e-12)


def test_bytes_of_values_and_indices(ran):
    """At most the share asked for and one neuron a layer; statistics go with their channel; an index is 4 bytes."""
    federation = ran(client=[{"fedadp": 0.5}])
    layers, traffic = federation.server.layers, table(federation.folder, "traffic")
    params, indices, buffers = (traffic[f"up_{c}"] // 4 for c in ("params", "masks", "buffers"))
    assert (params <= 0.5 * layers.P + 12 + 75).all()  # a channel of conv1, of conv2
    assert (params >= 0.5 * layers.P - 75).all()
    # a channels of the first convolution (9 + 3 parameters), b of the second (72 + 3), and the head: two equations
    a, b = np.linalg.solve([[12, 75], [1, 1]], np.stack([params - 260, indices])).round(6)
    assert (a % 1 == 0).all()
    assert (b % 1 == 0).all()
    assert (buffers == 2 * (a + b) + 2).all()  # mean and variance of each, and two counters
    assert (table(federation.folder, "notes")["value"] < 1).all()


def test_with_fedldf_only_the_kept_part_of_chosen_layers_is_sent(ran):
    federations = ran(client=[{"fedadp": 0.5}], weighting=[{"fedldf": 1}]), ran(client=[{"fedadp": 0.5}])
    both, one = (table(f.folder, "traffic")["up_params"].reshape(3, 3).sum(1) for f in federations)
    assert (both < one / 2).all()


def test_a_model_that_is_all_head_is_refused(monkeypatch):
    linear = builder_of(lambda inputs: nn.Sequential(nn.Flatten(), nn.Linear(64, inputs.classes)))
    monkeypatch.setitem(MODELS, "linear", linear)
    prepare(tiny(model={"name": "linear"}))
    with pytest.raises(ConfigError, match=r"client\.0\.fedadp: prunes .* no trainable layer below its head"):
        prepare(tiny(model={"name": "linear"}, client=["fedadp"]))


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        ([{"fedadp": 0}], "keep is 0"),
        ([{"fedadp": {"keep": 0.1, "least": 0.2}}], "and least 0.2"),
        (["feddyn", "fedadp"], "list it before"),
    ],
)
def test_refusals(client, reason):
    with pytest.raises(ConfigError, match=reason):
        tiny(client=client)


@pytest.mark.parametrize(
    ("stack", "method"),
    [
        *(("weighting", rule) for rule in ("median", {"trimmed_mean": 0.4}, {"multi_krum": {"f": 0}})),
        *(("weighting", law) for law in ("fedlaw", "attentive_law", "adaptive_gws")),
        *(("server", step) for step in ("feddf", "fedbe")),
    ],
    ids=str,
)
def test_what_takes_unsent_neurons_for_still_ones_is_refused(stack, method):
    with pytest.raises(ConfigError, match="but fedadp sends only parts of its model"):
        tiny(client=["fedadp"], data={"proxy": {"samples": 20}}, **{stack: [method]})
