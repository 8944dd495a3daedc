"""Clients that train together: the same as one by one, to rounding, and the same bits wherever they train."""

from __future__ import annotations

import json
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from batched import METHODS, assert_same, trained
from conftest import simulate, table, tiny
from models.test_model_behaviour import INPUTS
from sabotage import Fails
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.cli.explain import explain
from raysim.config import ConfigError, check_unchanged
from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.task import Classification
from raysim.engine.base import Call, HostLost
from raysim.engine.local import LocalEngine
from raysim.host.host import ClientHost
from raysim.methods import CLIENTS
from raysim.models import MODELS, Inputs
from raysim.store.atomic import write_json

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")  # where vmap is a loop
EVERYONE = {"rounds": {"participation": 1.0}}  # eight clients


@pytest.mark.parametrize("name", METHODS)
def test_a_method(name: str) -> None:
    assert_same(trained(1, METHODS[name]), trained(4, METHODS[name]))


SETTINGS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": {"name": "adam", "momentum": 0.0}, "model": "mlp"},
    "adam that goes on": {"optimizer": {"name": "adam", "momentum": 0.0}, "model": "mlp", "persist": True},
    "momentum that goes on": {"persist": True, "optimizer": {"nesterov": True}},
    "clipped": {"grad_clip": 0.5},
    "without short batches": {"drop_last": True},
    "own statistics": {"local_buffers": True},
    "contiguous": {"channels_last": False},
    "batches of one": {"batch_size": 1, "sizes": [3, 1, 2], "epochs": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting(name: str) -> None:
    # Adam divides by the gradient, down to its epsilon of 1e-8: where that is all but zero, rounding becomes larger.
    tolerance = 1e-9 if name.startswith("adam") else 1e-11
    assert_same(trained(1, **SETTINGS[name]), trained(4, **SETTINGS[name]), tolerance)


@pytest.mark.parametrize("model", ["fasttext", "text_cnn", "bn_cnn", "lenet", "small_cnn", "amazon_mlp"])
def test_a_model(model: str) -> None:
    setting: dict[str, Any] = {
        "model": model, "inputs": INPUTS[model], "sizes": [5, 3, 6], "rounds": 1, "epochs": 1, "batch_size": 3
    }  # fmt: skip
    assert_same(trained(1, **setting), trained(3, **setting))


class Tokens(nn.Module):
    """Token 0 is padding: its row has no gradient as an embedding, and one as weights of the head, where both are `tied`."""

    def __init__(self, vocab: int, classes: int, tied: str):
        super().__init__()
        self.tied = tied
        self.embedding = nn.Embedding(vocab, 5, padding_idx=0)
        self.head = nn.Linear(5, vocab)
        if tied == "head":
            self.head.weight = self.embedding.weight
        elif tied == "embedding":
            self.embedding.weight = self.head.weight
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        if self.tied == "function":
            z = F.embedding(x, self.head.weight, padding_idx=-len(self.head.weight))
        elif self.tied == "kernel":
            z = torch.embedding(self.head.weight, x, 0)
        else:
            z = self.embedding(x)
        scores: Tensor = self.head(z.tanh().mean(1))
        return scores[:, : self.classes]


@pytest.mark.parametrize("tied", ["head", "embedding", "function", "kernel", "not"])
def test_padding_has_no_gradient_where_it_is_embedded_and_has_one_elsewhere(
    tied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "tokens", lambda inputs: Tokens(inputs.vocab, inputs.classes, tied))
    setting: dict[str, Any] = {
        "model": "tokens", "inputs": Inputs((6,), 4, vocab=7), "sizes": [9, 8, 12], "rounds": 1
    }  # fmt: skip
    assert_same(trained(1, **setting), trained(3, **setting))


class Prototypes(nn.Module):
    """Has no head: no layer makes its outputs."""

    def __init__(self, features: int, classes: int):
        super().__init__()
        self.of_classes = nn.Parameter(torch.linspace(-1, 1, classes * features).view(classes, features))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(x.flatten(1), self.of_classes)


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_a_model_without_a_head(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "prototypes", lambda inputs: Prototypes(math.prod(inputs.shape), inputs.classes))
    assert_same(trained(1, METHODS[method], model="prototypes"), trained(4, METHODS[method], model="prototypes"))


@dataclass(frozen=True)
class Balanced(Classification):
    """Weighs a sample by how many of its batch have its class."""

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        weights = 1 / (y[:, None] == y).sum(1)
        return F.cross_entropy(outputs, y, reduction="none") * weights / weights.sum() * len(y)


def test_losses_of_a_task_see_the_batch_of_one_client() -> None:
    assert_same(trained(1, task=Balanced()), trained(4, task=Balanced()))


def test_losses_of_samples_see_the_batch_of_one_client() -> None:
    stream = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(3, 8, 4, generator=stream), torch.randint(4, (3, 8), generator=stream)
    found = Balanced().samples_of_batches(outputs, y)
    torch.testing.assert_close(
        found, torch.stack([Balanced().losses(*batch) for batch in zip(outputs, y, strict=True)])
    )


class SeveralHosts(LocalEngine):
    """Hosts in this process, of which the second is lost once, after it has trained in round `loss`."""

    count, loss = 3, -1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._all = [self._new_host() for _ in range(self.count)]
        self.nodes = ["local"] * self.count

    def _new_host(self) -> ClientHost:
        host = ClientHost(self.spec, self.data, self.partition)
        host.store = self.state_store.put
        return host

    @property
    def hosts(self) -> Sequence[ClientHost]:
        return self._all

    def call(self, call: Call) -> Any:
        return getattr(self._all[call.host], call.method)(*call.args)

    def fetch(self, calls: Sequence[tuple[int, Any]]) -> list[Any]:
        if len(calls) == 1 and calls[0][0] == 1 and self._all[1].t == self.loss:
            self.loss = -1
            raise HostLost({1})
        return super().fetch(calls)

    def replace(self, lost: HostLost) -> str:
        self._all[1] = self._new_host()
        return "another one begins"


def several_hosts(count: int, loss: int = -1) -> Any:
    """Makes such an engine."""
    kind = type("Hosts", (SeveralHosts,), {"count": count, "loss": loss})
    return lambda config, spec, data, partition, cohort: kind(replace(spec, device="cpu"), data, partition)


@pytest.mark.parametrize("name", ["scaffold", "fedamp"])
def test_how_many_train_together_decides_bits_and_nothing_else_does(name: str, tmp_path: Path) -> None:
    """Neither how many hosts there are, nor the loss of one."""
    changes = {"client": [name], "local": {"momentum": 0.0, "weight_decay": 0.0}, **EVERYONE}
    found = {}
    for what, k, engine in (
        ("once", 3, {}), ("again", 3, {}), ("others", 2, {}), ("alone", 1, {}),
        ("two hosts", 3, {"make_engine": several_hosts(2)}), ("more hosts", 3, {"make_engine": several_hosts(5)}),
        ("a loss", 3, {"make_engine": several_hosts(3, loss=1)}),
    ):  # fmt: skip
        federation = simulate(tiny(**changes, engine={"local": {"batch_clients": k}}), tmp_path / what, **engine)
        found[what] = federation.sha256()
    assert len({found[what] for what in ("once", "again", "two hosts", "more hosts", "a loss")}) == 1
    assert len(set(found.values())) == 3
    assert any("died" in line for line in table(tmp_path / "a loss", "events")["message"])


def test_ray_starts_no_more_actors_than_there_are_groups_and_plays_the_same_bits(tmp_path: Path, warm_ray: Any) -> None:
    local = simulate(tiny(**EVERYONE, engine={"local": {"batch_clients": 3}}), tmp_path / "local")
    engine = {"ray": {"clients_per_actor": 1, "batch_clients": 3}}
    ray = simulate(tiny(**EVERYONE, engine=engine), tmp_path / "ray", make_engine=warm_ray)
    assert len(ray.engine.hosts) == 3
    assert ray.sha256() == local.sha256()


@pytest.mark.parametrize("how", ["diverges", "lacks_memory", "cannot_read"])
def test_a_client_that_tries_again_does_so_with_its_group(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CLIENTS, "fails", Fails)
    monkeypatch.setattr(Fails, "batched", True)
    rounds = {**EVERYONE["rounds"], "on_client_failure": "retry"}
    engine = {"local": {"batch_clients": 3}}
    undisturbed = simulate(tiny(rounds=rounds, engine=engine), tmp_path / "undisturbed")
    fails = {"fails": {"how": how, "client": 4, "times": 1, "folder": str(tmp_path)}}
    federation = simulate(tiny(rounds=rounds, engine=engine, client=[fails]), tmp_path / "failed")
    assert (tmp_path / "failed-0").exists()
    assert federation.sha256() == undisturbed.sha256()


def test_a_client_that_diverges_is_dropped_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLIENTS, "fails", Fails)
    monkeypatch.setattr(Fails, "batched", True)
    models = []
    for k in (1, 3):
        changes = {"client": [{"fails": {"how": "diverges", "client": 4, "t": 1}}], **EVERYONE}
        federation = simulate(tiny(**changes, engine={"local": {"batch_clients": k}}), tmp_path / str(k))
        rows = table(tmp_path / str(k), "clients")
        assert [c for c, status in zip(rows["client"], rows["status"], strict=True) if status != "ok"] == [4, 4]
        models.append(federation.server.value)
    torch.testing.assert_close(*models, rtol=0, atol=1e-4)


# ---- one by one all the same


@dataclass(frozen=True)
class Looks(ClientMethod):
    """Says that its clients may train together, and then asks for a number."""

    batched: ClassVar[bool] = True

    def correct_grad(self, run: LocalRun) -> None:
        if run.grad.norm().item() > 1:
            run.grad.mul_(0.5)


@dataclass(frozen=True)
class Asks(ClientMethod):
    """Says that its clients may train together, and then asks which one it is."""

    batched: ClassVar[bool] = True

    def penalty(self, run: LocalRun, x: Tensor, y: Tensor, z: Tensor, loss: Tensor) -> Tensor | float:
        return 0.1 * run.client * loss


def drops(inputs: Inputs) -> nn.Module:
    """A model with dropout."""
    flat = nn.Sequential(nn.Flatten(), nn.Dropout(0.5))
    return nn.Sequential(OrderedDict(flat=flat, head=nn.Linear(math.prod(inputs.shape), inputs.classes)))


class Draws(nn.Module):
    """Draws a number in each forward of training, of a generator that vmap does not see."""

    def __init__(self, inputs: Inputs, draw: Callable[[], float]):
        super().__init__()
        self.draw, self.head = draw, nn.Linear(math.prod(inputs.shape), inputs.classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x.flatten(1))
        return scores * self.draw() if self.training else scores


def draws_torch_alone() -> float:
    """Torch's next number where no two clients step together, as vmap refuses it elsewhere."""
    return float(torch.rand(()))


@dataclass(frozen=True)
class Blurs(ClientMethod):
    """Sends numbers that it draws after training."""

    batched: ClassVar[bool] = True

    def finish(self, run: LocalRun, upload: Upload) -> None:
        upload.value = upload.value + random.random() + np.random.rand() + torch.rand(len(upload.value))


def test_draws_after_the_steps_are_each_clients_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLIENTS, "blurs", Blurs)
    changes = {"client": ["blurs"], "rounds": {"total": 1, "participation": 1.0}}
    models = [
        simulate(tiny(**changes, engine={"local": {"batch_clients": k}}), tmp_path / str(k)).server.value
        for k in (1, 4)
    ]
    torch.testing.assert_close(*models, rtol=0, atol=1e-5)


def test_draws_of_torch_in_steps_of_one_client_each_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "draws", lambda inputs: Draws(inputs, draws_torch_alone))
    changes = {"model": {"name": "draws"}, "local": {"batch_size": 1000}}  # no two have as many samples
    together = simulate(tiny(**changes, engine={"local": {"batch_clients": 3}}), tmp_path / "together")
    [line] = [line for line in table(tmp_path / "together", "events")["message"] if "one by one" in line]
    assert "RuntimeError: a step draws from torch" in line
    assert together.sha256() == simulate(tiny(**changes), tmp_path / "alone").sha256()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"client": ["ditto"]}, "ditto cannot train several at once"),
        ({"model": {"name": "drops"}}, "each has its own random numbers for dropout (flat.1)"),
        ({"weighting": ["ccn"]}, "LatentMean watches the batches of one client"),
        ({"local": {"accumulate": 2}}, "a step takes several passes (local.accumulate)"),
        ({"client": ["looks"]}, "RuntimeError: vmap: It looks like you're calling .item()"),
        (
            {"model": {"name": "draws"}},
            "RuntimeError: a step draws from random, of which each client has its own numbers",
        ),
        ({"model": {"name": "draws_numpy"}}, "RuntimeError: a step draws from np.random"),
        ({"client": ["asks"]}, "AttributeError: 'StepView' object has no attribute 'client'"),
    ],
)
def test_what_cannot_train_together_trains_one_by_one_and_says_so_once(
    changes: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in (Looks, Asks):
        monkeypatch.setitem(CLIENTS, method.__name__.lower(), method)
    monkeypatch.setitem(MODELS, "drops", drops)
    monkeypatch.setitem(MODELS, "draws", lambda inputs: Draws(inputs, random.random))
    monkeypatch.setitem(MODELS, "draws_numpy", lambda inputs: Draws(inputs, np.random.rand))
    together = simulate(tiny(**changes, engine={"local": {"batch_clients": 3}}), tmp_path / "together")
    told = [line for line in table(tmp_path / "together", "events")["message"] if "one by one" in line]
    assert len(told) == 1
    assert f"the engine's batch_clients is 3, but clients train one by one: {why}" in told[0]
    assert together.sha256() == simulate(tiny(**changes), tmp_path / "alone").sha256()


# ---- the setting


def test_a_run_goes_on_with_as_many_together_as_it_began(tmp_path: Path) -> None:
    simulate(tiny(rounds={"total": 1}, engine={"local": {"batch_clients": 2}}), tmp_path)
    with pytest.raises(ConfigError, match=r"engine.batch_clients was 2 when the run began"):
        check_unchanged(tiny(), tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["settings"]["engine"]["batch_clients"]  # written before there was the setting
    write_json(tmp_path / "manifest.json", manifest)
    check_unchanged(tiny(), tmp_path)
    with pytest.raises(ConfigError, match=r"engine.batch_clients was 1 when the run began"):
        check_unchanged(tiny(engine={"local": {"batch_clients": 2}}), tmp_path)


def test_the_setting_is_explained_and_checked() -> None:
    assert "on CPUs 1 is as fast or faster" in " ".join(explain("engine.batch_clients").split())
    with pytest.raises(ConfigError, match="batch_clients"):
        tiny(engine={"local": {"batch_clients": 0}})
