"""CCN."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case import Traced
from conftest import simulate, table, tiny
from reference import forward, gradient, inputs, tensors, train
from toy import ToyCohort, noted, planned, toy_server

from raysim.config import ConfigError
from raysim.core.client import ClientMethod, LocalRun
from raysim.methods import CLIENTS
from raysim.methods.ccn import CCN, LatentMean


def weights(latents, sizes=None, **fields) -> list[float]:
    K = len(latents)
    cohort = ToyCohort(toy_server(), [[0.0, 0.0]] * K, sizes or [1] * K, stats={LatentMean(): latents})
    planned(CCN(**fields), cohort)
    return noted(cohort.server, "lambda").tolist()


GOLDEN = [[1, 0], [1, 0], [0, 1]]


def test_golden_numbers():
    for temperature, factor, lam in (
        (1.0, [0.5776812, 0.5776812, 0.8446376], [0.2030773, 0.2030773, 0.5938455]),
        (0.5, [0.5316895, 0.5316895, 0.9366211], [0.1810548, 0.1810548, 0.6378903]),
    ):
        cohort = ToyCohort(toy_server(), stats={LatentMean(): GOLDEN})
        mixture = CCN(temperature).plan(cohort, cohort.server, cohort.by_size())
        assert noted(cohort.server, "similarity").tolist() == [2, 2, 1]
        assert noted(cohort.server, "factor").tolist() == pytest.approx(factor, abs=1e-7)
        assert (mixture.lam / mixture.lam.sum()).tolist() == pytest.approx(lam, abs=1e-7)


def test_cases_in_which_the_base_weights_stay():
    sizes = [1, 2, 5]
    p = [0.125, 0.25, 0.625]
    assert weights([[1, 2]] * 3, sizes) == pytest.approx(p, abs=1e-12)  # identical
    assert weights([[1, 0], [3, 1]], [1, 3]) == pytest.approx([0.25, 0.75], abs=1e-12)  # two: equally alike
    assert weights([[1, 0]], [3]) == [1]  # one: 0/0
    assert weights(GOLDEN, sizes, temperature=1e12) == pytest.approx(p, abs=1e-12)
    assert weights(GOLDEN, sizes) != pytest.approx(p, abs=1e-3)


def test_limit_of_low_temperature():
    """The client most like the others loses everything; nobody gains more than K/(K − 1)."""
    lam = weights([[1, 0], [1, 1], [0, 1]], temperature=1e-3)
    assert lam == pytest.approx([0.5, 0, 0.5], abs=1e-12)


def test_only_directions_count():
    assert weights([[7, 0], [0.1, 0], [0, 30]]) == pytest.approx(weights(GOLDEN), abs=1e-12)


def test_a_zero_latent_resembles_only_itself():
    assert weights([[1, 0], [1, 0], [0, 0]]) == pytest.approx(weights(GOLDEN), abs=1e-12)


def test_many_clients_do_not_overflow():
    K = 300
    assert weights([[1, 1]] * K, temperature=0.1) == pytest.approx([1 / K] * K, abs=1e-12)  # e to the 3000


# Latents, measured again on the traced round.


def traced(folder, bn_stats: str = "average", attack=(), **fields) -> Traced:
    changes = {"local": {"epochs": 2}, "model": {"bn_stats": bn_stats}, "record": {"traces": [3]}, "attack": attack}
    return Traced(folder, 2, simulate(tiny(weighting=[{"ccn": fields}], **changes), folder))


def bare(state: dict) -> dict:
    """The model with a head that hands its input on."""
    return tensors(dict(state)) | {"head.weight": torch.eye(64).double(), "head.bias": torch.zeros(64).double()}


def expected(round_: Traced, latents: list[torch.Tensor]) -> np.ndarray:
    z = torch.stack(latents)
    z = z / z.norm(dim=1, keepdim=True)
    factor = 1 - ((z @ z.T).sum(1) / 0.5).softmax(0).numpy()
    return factor * round_.p / (factor * round_.p).sum()


def samples(round_: Traced, client) -> torch.Tensor:
    return inputs(round_.federation, round_.federation.partition.train[client.id])[0]


@pytest.mark.parametrize("bn_stats", ["average", "local"])
def test_latents_before_training_are_the_global_models(bn_stats, tmp_path):
    """Under a client's own BatchNorm statistics, where those stay with it."""
    round_ = traced(tmp_path, bn_stats, latent_at="before")
    latents = [forward(bare(c.init), samples(round_, c), train=False)[0].mean(0) for c in round_.clients]
    for client in round_.clients if bn_stats == "average" else ():
        assert all(np.array_equal(client.init[name], round_.before[name]) for name in round_.before)
    np.testing.assert_allclose(round_.note("ccn", "lambda"), expected(round_, latents), atol=1e-6)


def test_latents_of_a_lie(tmp_path):
    """They are those of the model that is sent; what the client has trained stays as it was."""
    round_ = traced(tmp_path, attack=[{"sign_flip": {"fraction": 0.5, "scale": 5.0}}])
    latents = [forward(bare(c.model), samples(round_, c), train=False)[0].mean(0) for c in round_.clients]
    np.testing.assert_allclose(round_.note("ccn", "lambda"), expected(round_, latents), atol=1e-6)


def test_latents_of_the_last_epoch_are_those_trained_on(tmp_path):
    round_ = traced(tmp_path, latent_at="last_epoch")
    latents = []
    for client in round_.clients:
        seen: list[torch.Tensor] = []

        def watched(state, x, y, seen=seen):
            seen.append(forward(bare(state), x, train=True)[0].detach())
            return gradient(state, x, y)

        train(round_.federation, tensors(client.init), client.steps, round_.lr, gradient=watched)
        latents.append(torch.cat(seen[len(seen) // 2 :]).mean(0))  # the second of two epochs
    np.testing.assert_allclose(round_.note("ccn", "lambda"), expected(round_, latents), atol=1e-5)


def test_of_a_client_that_takes_no_step_latents_are_measured_by_a_sweep(monkeypatch, tmp_path):
    @dataclass(frozen=True)
    class Idle(ClientMethod):
        """Trains nothing."""

        def train(self, run: LocalRun) -> None: ...

    monkeypatch.setitem(CLIENTS, "idle", Idle)
    found = {}
    for latent_at in ("last_epoch", "after"):
        simulate(tiny(client=["idle"], weighting=[{"ccn": {"latent_at": latent_at}}]), tmp_path / latent_at)
        notes = table(tmp_path / latent_at, "notes")
        found[latent_at] = notes["value"][notes["name"] == "similarity"]
    assert (found["last_epoch"] == found["after"]).all()


def test_latents_before_their_activation(tmp_path):
    round_ = traced(tmp_path, activation="pre")

    def latent(client) -> torch.Tensor:
        state, x = tensors(client.model), samples(round_, client)
        for layer in ("conv1", "conv2"):
            x = F.conv2d(x, state[f"{layer}.conv.weight"], state[f"{layer}.conv.bias"], padding=1)
            norm = [state[f"{layer}.norm.{s}"] for s in ("running_mean", "running_var", "weight", "bias")]
            x = F.batch_norm(x, *norm)
            x = F.max_pool2d(F.relu(x) if layer == "conv1" else x, 2)
        return x.flatten(1).mean(0)

    np.testing.assert_allclose(
        round_.note("ccn", "lambda"), expected(round_, [latent(c) for c in round_.clients]), atol=1e-6
    )


def test_measuring_leaves_the_training_alone(tmp_path):
    """A sweep in eval mode, before or after training, moves no statistic and draws no number."""
    models = {}
    for name, weighting in {"none": [], "after": ["ccn"], "before": [{"ccn": {"latent_at": "before"}}]}.items():
        config = tiny(weighting=weighting, rounds={"total": 1}, record={"traces": [1]})
        models[name] = Traced(tmp_path / name, 0, simulate(config, tmp_path / name)).clients[0].model
    for name in ("after", "before"):
        assert all((models[name][n] == models["none"][n]).all() for n in models["none"])


def test_refusals():
    with pytest.raises(ConfigError, match="latent_at: after"):
        tiny(weighting=[{"ccn": {"latent_at": "last_epoch", "activation": "pre"}}])
