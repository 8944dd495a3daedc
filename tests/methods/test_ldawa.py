"""L-DAWA."""

import numpy as np
import pytest
import torch
from case import State, Traced, fedavg, norm
from conftest import simulate, tiny
from toy import TWO_LAYERS, UPDATES, ToyCohort, W, noted, planned, toy_server

from raysim.config import ConfigError
from raysim.methods.ldawa import LDAWA


def result(models, value=W, layers=None, **fields) -> list[float]:
    updates = (torch.tensor(models).double() - torch.tensor(value)).tolist()
    server = toy_server(layers, value) if layers else toy_server(value=value)
    return planned(LDAWA(**{"warmup": 0, **fields}), ToyCohort(server, updates)).tolist()


def test_golden_numbers():
    cohort = ToyCohort(toy_server())
    assert planned(LDAWA(warmup=0), cohort).tolist() == pytest.approx([3.2576147946, 3.6064125423], abs=1e-6)
    cosines = noted(cohort.server, "cosine").flatten().tolist()
    assert cosines == pytest.approx([0.9899494937, 0.9946917939, 0.9429903336], abs=1e-9)


def test_parallel_models_are_averaged_uniformly():
    assert result([[3, 4], [6, 8], [9, 12]]) == pytest.approx([6, 8])
    assert result([W, W, W]) == pytest.approx(W)
    assert result([[3, 4], [6, 8], [9, 12]], base="size") == pytest.approx([6.75, 9])


def test_opposed_and_orthogonal_models():
    assert result([W, [-3, -4], [8, -6]]) == pytest.approx([2, 8 / 3])  # turned round, and not at all


def test_renormalising_divides_by_the_cosines():
    assert result([[3, 4], [6, 8], [8, -6]]) == pytest.approx([3, 4])
    assert result([[3, 4], [6, 8], [8, -6]], renormalize=True) == pytest.approx([4.5, 6])
    assert result([W, [-3, -4], [8, -6]], renormalize=True) == pytest.approx([8 / 3, -2])  # nothing to divide by


def test_a_zero_layer_has_cosine_1():
    """At initialisation BatchNorm's biases are zero, where the released code divides by their norm."""
    assert result([[1, 4], [2, 4], [3, 4]], value=[0.0, 4.0], layers=TWO_LAYERS) == pytest.approx([2, 4])
    assert result([[0, 4]] * 3, layers=TWO_LAYERS) == pytest.approx([0, 4])


def test_layers_have_their_own_cosine():
    models = [[3, -4], [3, 4], [6, 4]]
    assert result(models, layers=TWO_LAYERS) == pytest.approx([4, 4])
    assert result(models, layers=TWO_LAYERS, layer_by="model") != pytest.approx([4, 4], abs=0.1)


def test_warm_up_is_weighted_by_size():
    for t, expected in ((0, [3.25, 3.25]), (2, [3.25, 3.25]), (3, [3.2576147946, 3.6064125423])):
        cohort = ToyCohort(toy_server(t=t), UPDATES)
        assert planned(LDAWA(), cohort).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("upload", [[], [{"top_k": {"fraction": 0.05}}]], ids=["whole", "encoded"])
def test_statistics_may_have_cosines_too(upload, tmp_path):
    """The released code treats every array of the state dict alike, running statistics included. The server sees what arrives."""
    config = tiny(weighting=[{"ldawa": {"warmup": 1, "scale_buffers": True}}], upload=upload, record={"traces": [3]})
    round_ = Traced(tmp_path, 2, simulate(config, tmp_path))

    def released() -> State:
        K, before = len(round_.clients), round_.before
        after = fedavg(round_, np.full(K, 1 / K))
        for name in (n for n in before if before[n].ndim):
            pairs = [(c.model, (c.model[name] * before[name]).sum()) for c in round_.clients]
            cosines = [dot / norm(m, [name]) / norm(before, [name]) for m, dot in pairs]
            after[name] = sum(min(1, cos) * m[name] for cos, (m, _) in zip(cosines, pairs, strict=True)) / K
        return after

    for name, expected in released().items():
        atol = 2e-6 * max(1, np.abs(expected).max())
        np.testing.assert_allclose(round_.after[name], expected, atol=atol, err_msg=name)
    plain = fedavg(round_, np.full(3, 1 / 3))
    assert np.abs(plain["conv1.norm.running_mean"] - round_.after["conv1.norm.running_mean"]).max() > 5e-5


def test_refusals():
    with pytest.raises(ConfigError, match="layer_by: tensor"):
        tiny(weighting=[{"ldawa": {"scale_buffers": True, "layer_by": "unit"}}])
    with pytest.raises(ConfigError, match="base: size"):
        tiny(weighting=["feddisco", "ldawa"])
    with pytest.raises(ConfigError, match=r"what by_size says of the clients\. Set base: size"):
        tiny(weighting=["ldawa"], rounds={"selection": "by_size"})
    tiny(weighting=["feddisco", {"ldawa": {"base": "size"}}])
