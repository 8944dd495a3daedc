"""Presets are configurations: sections, and fields of the methods that a file lists."""

import re

import numpy as np
import pytest
from toy import ToyCohort, noted, planned, toy_server

from raysim.config import from_dict, load
from raysim.config.shipped import find
from raysim.core.client import ClientStack
from raysim.core.layers import LayerMap
from raysim.data import Dataset, make_partition
from raysim.data.partition import DirichletCounts, IIDEqual
from raysim.methods.feddisco import FedDisco
from raysim.methods.feddyn import FedDyn
from raysim.methods.fedlws import FedLWS
from raysim.models import Inputs, build
from raysim.sweep.table import read_table


def resolved(preset: str, **changes):
    raw = {
        "preset": preset,
        "data": {"name": "synthetic", "partition": {"dirichlet_counts": 0.1}},
        "model": {"name": "tiny_bn_cnn"},
        "rounds": {"total": 2},
        "local": {"lr": 0.08, "batch_size": 32},
        "weighting": ["feddisco"],
        "server": ["fedlws"],
        "engine": "local",
    }
    for key, value in changes.items():
        raw[key] = {**raw[key], **value} if isinstance(value, dict) else value
    return from_dict(raw)


def test_official_000():
    config = resolved("official_000", local={"lr": 0.08, "batch_size": 128})
    assert config.server == (FedLWS(0.03, tau_clamp=(0.01, 0.2), lws_stats="all", shrink_buffers=True),)
    assert config.weighting == (FedDisco(0.1, 0.1),)
    assert config.model.layer_by == "bias_group"
    assert config.data.client_val_frac == 0.3
    assert config.data.partition == DirichletCounts(0.1)
    assert config.local.state == "persist"


def test_official_000_trains_in_batches_of_128():
    raw = {
        "preset": "official_000",
        "data": {"name": "synthetic", "partition": {"dirichlet_counts": 0.1}},
        "model": {"name": "tiny_bn_cnn"},
        "rounds": {"total": 1},
        "local": {"lr": 0.1},
    }
    config = from_dict(raw)
    assert config.local.batch_size == 128
    assert config.server == ()  # a preset lists no method


def test_official_000_has_the_eight_layers_of_a_vit():
    """The embedding and the first block, five blocks, the norm of the head and its linear map."""
    config = resolved("official_000", data={"name": {"synthetic": {"shape": [3, 32, 32]}}}, model={"name": "vit"})
    layers = LayerMap.of(build("vit", Inputs((3, 32, 32), 10)), config.model.layer_by, config.model.blocks)
    members = [{s.name for s, g in zip(layers.tensors, layers.groups, strict=True) if g == at} for at in range(8)]
    assert layers.L == 8
    assert {name.split(".")[0] for name in members[0]} == {"embed", "block0"}
    for at in range(1, 6):
        parts = ("attention.norm", "mlp.norm", "attention.out", "mlp.inner", "mlp.outer")
        biases = [f"block{at}.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
        assert members[at] == {*biases, f"block{at}.attention.qkv.weight"}
    assert members[6:] == [{"block5.norm.weight", "block5.norm.bias"}, {"head.weight", "head.bias"}]
    assert resolved("official_000").model.blocks == ()


@pytest.mark.parametrize("preset", ["official_000", "paper"])
def test_table_12_finds_the_convolutions_of_a_resnet20(preset):
    """19 in a row and 2 on shortcuts, whichever way layers are named; the head is none."""
    config = load(find("fedlws/table12"), [f"preset={preset}", "data.name=synthetic"])
    pattern = read_table(find("fedlws/table12")).headings()["convolutions"]["layers"]
    names = LayerMap.of(build("resnet20", Inputs((3, 32, 32), 10)), config.model.layer_by).names
    assert [bool(re.search(pattern, name)) for name in names] == [True] * 21 + [False]


def test_paper_is_the_equations():
    config = resolved("paper")
    assert config.server == (FedLWS(0.1),)
    assert config.weighting == (FedDisco(),)
    assert config.model.layer_by == "unit"
    assert (config.data.client_val_frac, config.local.state) == (0.0, "reset")


@pytest.mark.parametrize("preset", ["raysim", "paper", "official_000"])
@pytest.mark.parametrize("alpha", [0.1, 100.0])
def test_feddisco_weighs_clients_at_every_heterogeneity(preset, alpha):
    """Divided by their sum, the KL values cannot make all of K terms negative: Σ_k (p_k − a D_k + b) = 1 − a + b K."""
    y = np.arange(5000) % 10
    data = Dataset("labels", np.zeros((5000, 1), np.float32), y, 5000, tuple("0123456789"))
    labels = make_partition(data, DirichletCounts(alpha, min_size=1), seed=8).label_counts(data)
    cohort = ToyCohort(toy_server(labels=labels.tolist()), [[0.0, 0.0]] * 20, labels.sum(1))
    planned(resolved(preset).weighting[0], cohort)
    assert noted(cohort.server, "fell_back").item() == 0


@pytest.mark.parametrize("preset", ["official_000", "paper"])
def test_the_file_wins(preset):
    config = resolved(
        preset, data={"client_val_frac": 0.2, "partition": {"iid_equal": {"clients": 5}}}, model={"layer_by": "tensor"},
        server=[{"fedlws": {"beta": 0.5, "tau_clamp": None}}],
    )  # fmt: skip
    assert config.data.partition == IIDEqual(clients=5)  # another scheme replaces the preset's
    assert config.data.client_val_frac == 0.2
    assert config.model.layer_by == "tensor"
    assert (config.server[0].beta, config.server[0].tau_clamp) == (0.5, None)


def test_official_003_weighs_feddyns_clients_by_size():
    """Also in the table of FedLAW's, whose FedDyn takes no weighting."""
    row = ["weighting=[]", "model.bn_stats=average", "client=[{feddyn: {alpha: 0.01}}]"]
    config = load(find("fedlaw/table3"), ["preset=official_003", *row])
    assert config.client == (FedDyn(0.01, unsquared=True, weights="size"),)
    assert ClientStack(config.client).base_weights == "size"
    assert ClientStack((FedDyn(),)).base_weights == "uniform"
