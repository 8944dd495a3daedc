"""What users' hooks return or leave: refused where it cannot be used; what they draw: the same wherever they run."""

from __future__ import annotations

import math
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import simulate, table, tiny
from ray import cloudpickle
from runs import local_run
from torch import Tensor, nn
from torchmetrics import SumMetric

from raysim.analysis.instrument import Instrument
from raysim.config import Config, ConfigError
from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.hooks import HookError
from raysim.core.mixture import Mixture
from raysim.core.rng import SERVER, may_draw, seeded, stream_seed
from raysim.core.score import Metric, correct
from raysim.core.server import Downlink, DownlinkRule, ServerStep, Weighting
from raysim.core.task import Classification
from raysim.core.torch_metrics import of_torchmetrics
from raysim.data.own import scheme_of, source_of
from raysim.federation import Federation, MakeEngine, RoundFailed, prepare
from raysim.federation.builder import host_spec, partitioned
from raysim.methods.fedavg import FedAvg
from raysim.methods.fedprox import FedProx
from raysim.models import Inputs
from raysim.registry import REGISTRY
from raysim.store import tables

Name = Callable[..., dict[str, Any]]
FORMS = {"none": None, "vector": torch.zeros(3), "text": "0.1", "constant": torch.zeros(()), "float": 0.5}


@dataclass(frozen=True)
class Client(ClientMethod):
    """One fault at a time: a client method whose hook `fault` returns or leaves what cannot be used."""

    fault: str = ""

    def start(self, run: LocalRun) -> Any:
        if self.fault == "start":
            run.params = run.params * 0.5
        return run.params * 0.5 if self.fault == "start returns" else None

    def begin(self, run: LocalRun) -> Any:
        if self.fault == "begin":
            run.value = run.received.clone()
        return run.received if self.fault == "begin returns" else None

    def for_steps(self, run: LocalRun) -> dict[str, Tensor]:
        return torch.zeros(1) if self.fault == "for_steps" else {"found": torch.zeros(1)}  # type: ignore[return-value]

    def optimizer(self, spec: Any) -> Any:
        return None if self.fault == "optimizer" else spec

    def penalty(self, run: LocalRun, x: Tensor, y: Tensor, z: Tensor, loss: Tensor) -> Any:
        run.for_steps(self)
        name, _, kind = self.fault.partition(" ")
        if self.fault == "penalty of loss":
            return loss * 0
        if self.fault == "penalty of params":
            return (run.params - run.received[: run.layers.P]).square().sum()
        return FORMS[kind] if name == "penalty" else 0.0

    def observe_grad(self, run: LocalRun) -> Any:
        return True if self.fault == "observe_grad returns" else None

    def correct_grad(self, run: LocalRun) -> Any:
        if self.fault == "correct_grad":
            run.grad = run.grad.sign()
        run.grad *= 1
        return run.grad.sign() if self.fault == "correct_grad returns" else None

    def step(self, run: LocalRun, x: Tensor, y: Tensor) -> None:
        super().step(run, x, y)
        if self.fault == "step":
            run.params = run.params - 0.1

    def finish(self, run: LocalRun, upload: Upload) -> Any:
        if self.fault == "finish returns":
            return upload.value
        if self.fault == "finish shape":
            upload.value = upload.value[:1]  # which a subtraction would spread over all parameters
        if self.fault == "finish type":
            upload.value = upload.value.double()
        if self.fault == "finish sent":
            upload.sent = torch.ones(3, dtype=torch.bool)
        if self.fault == "finish scalar":
            upload.scalars["client"] = 0.5  # type: ignore[assignment]
        return None

    def new_state(self, layers: Any) -> Any:
        return [1, 2] if self.fault == "new_state" else None


OF_CLIENTS = {
    "start": "Client.start has put another tensor in the place of run.params. Nothing else reads it: write into the model's own, "
    "as in run.params.copy_(...).",
    "begin": "Client.begin has put another tensor in the place of run.value. Nothing else reads it: write into",
    "for_steps": "Client.for_steps returned a tensor [1] float32. Return a dict of tensors by name.",
    "optimizer": "Client.optimizer returned None. Return an OptimizerSpec, such as replace(spec, ...).",
    "penalty vector": "Client.penalty returned a tensor [3] float32. Return one number: a float, or a tensor [] such as a mean.",
    "penalty none": "Client.penalty returned None. Return one number",
    "penalty text": "Client.penalty returned a str. Return one number",
    "penalty of params": "Client.penalty returned a number without a gradient, which changes nothing; run.params has none. "
    "Make it of z, loss or run.model.parameters(), or add its gradient to run.grad in correct_grad. "
    "Where there is no term, return 0.0.",
    "penalty constant": "Client.penalty returned a number without a gradient",
    "penalty float": "Client.penalty returned a number without a gradient",
    "start returns": "Client.start returned a tensor [P] float32, which nothing reads. Write into the model's own storage, as in "
    "run.params.copy_(...).",
    "begin returns": "Client.begin returned a tensor [S] float32, which nothing reads. Write into the model's own storage",
    "observe_grad returns": "Client.observe_grad returned a bool, which nothing reads. Write into run.grad",
    "correct_grad returns": "Client.correct_grad returned a tensor [P] float32, which nothing reads. Write into run.grad, as in "
    "run.grad.copy_(...).",
    "finish returns": "Client.finish returned a tensor [S] float32, which nothing reads. Write into upload, as in",
    "correct_grad": "Client.correct_grad has put another tensor in the place of run.grad. Nothing else reads it: write into",
    "step": "Client.step has put another tensor in the place of run.params.",
    "finish shape": "Client.finish left a tensor [1] float32 as upload.value. It must be a tensor [S] float32, as run.value is.",
    "finish type": "Client.finish left a tensor [S] float64 as upload.value. It must be a tensor [S] float32, as run.value is.",
    "finish sent": "Client.finish left a tensor [3] bool as upload.sent. It must be a tensor [S] bool, true for what is sent, or "
    "None.",
    "finish scalar": "Client.finish left a float as upload.scalars['client']. It must be a tensor.",
    "new_state": "Client.new_state has made a state that cannot be saved: cannot pack : list is no tensor, bool, int, float, dict "
    "or dataclass. It must be a dataclass of tensors and numbers, whatever the hooks put into it.",
}


@dataclass(frozen=True)
class Weigher(Weighting):
    fault: str = ""

    def plan(self, cohort: Any, server: Any, prior: Mixture) -> Any:
        K, ones = len(cohort.clients), torch.ones(len(cohort.clients))
        plans: dict[str, Callable[[], Any]] = {
            "none": lambda: None,
            "weights": lambda: ones,
            "nan": lambda: prior.reweighted(ones * nan),
            "inf": lambda: prior.reweighted(ones * inf),
            "zero": lambda: prior.reweighted(ones * 0),
            "negative": lambda: prior.reweighted(torch.tensor([-2.0] + [0.5] * (K - 1))),
            "signed": lambda: prior.reweighted(torch.tensor([-1.0] + [2.0] * (K - 1))),
            "factor": lambda: prior.scaled(torch.tensor(nan)),
            "longer": lambda: Mixture.of(torch.ones(K + 1), prior.layers),
        }
        return plans[self.fault]() if server.t == 1 else prior


FINITE = "They must be finite, none negative, one positive. Where the rule gives others, return prior and call "
OF_WEIGHTINGS = {
    "none": "Weigher.plan returned None. Return a Mixture, such as prior.reweighted(weights).",
    "weights": "Weigher.plan returned a tensor [3] float32. Return a Mixture",
    "nan": f"Weigher.plan returned weights that are not finite (NaN or Inf). {FINITE}server.fell_back(self, True).",
    "inf": "Weigher.plan returned weights that are not finite (NaN or Inf).",
    "zero": "Weigher.plan returned weights whose sum is 0.",
    "negative": "Weigher.plan returned weights whose sum is -1.",
    "signed": "Weigher.plan returned weights of which one is -1.",
    "factor": "Weigher.plan returned weights that are not finite (NaN or Inf).",
    "longer": "Weigher.plan returned weights [4]. They must be [3], one for each client.",
}


@dataclass(frozen=True)
class Step(ServerStep):
    fault: str = ""

    def apply(self, target: Tensor, mixture: Mixture, cohort: Any, server: Any) -> Any:
        if server.t == 0:
            return target
        return {"none": None, "params": target[: server.layers.P], "double": target.double()}[self.fault]


OF_STEPS = {
    "none": "Step.apply returned None. Return the new model, a tensor [S] float32 as target is.",
    "params": "Step.apply returned a tensor [P] float32. Return the new model, a tensor [S] float32 as target is.",
    "double": "Step.apply returned a tensor [S] float64. Return the new model, a tensor [S] float32 as target is.",
}


class NoDownlink(DownlinkRule):
    def downlink(self, clients: Any, models: Any, server: Any) -> Downlink:
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class Sends(ClientMethod):
    def downlink_rule(self) -> DownlinkRule:
        return NoDownlink()


@dataclass(frozen=True)
class Eye(Instrument):
    fault: str = ""

    def observe(self, done: Any, population: Any) -> Any:
        return None if self.fault == "none" else [("norm", 1.0)]


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Name:
    """The configuration of a class of this file, under a name that exists while the test runs."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no process but this one can import it

    def name(kind: str, entry: Any, **options: Any) -> dict[str, Any]:
        word = entry.name if kind == "metric" else entry.__name__.lower()
        monkeypatch.setitem(REGISTRY.table(kind), word, entry)
        return {word: options}

    return name


def refusal(config: Any, out: Path, **kwargs: Any) -> str:
    """What ends the run, and is said once: in the error and in the run's table of events."""
    with pytest.raises((HookError, RoundFailed)) as refused:
        simulate(config, out, **kwargs)
    assert str(refused.value) in table(out, "events")["message"]
    assert "Traceback" not in str(refused.value)
    return str(refused.value).replace("[1606]", "[S]").replace("[1556]", "[P]")


@pytest.mark.parametrize("fault", OF_CLIENTS)
def test_a_hook_of_a_client(fault: str, named: Name, tmp_path: Path) -> None:
    said = refusal(tiny(client=[named("client", Client, fault=fault)]), tmp_path)
    first = re.escape("an error in a client's code ends the run.\nclient ") + r"\d, round 1, node local: "
    assert re.match(first + re.escape(OF_CLIENTS[fault]), said), said


def test_hooks_of_a_client_that_are_right(named: Name, tmp_path: Path, ran: Callable[..., Federation]) -> None:
    """`run.grad *= 1` and a penalty of 0.0, or of a tensor [] whose gradient is zero, change nothing."""
    for fault in ("", "penalty of loss"):
        config = tiny(client=[named("client", Client, fault=fault)])
        assert simulate(config, tmp_path / fault).sha256() == ran().sha256()


@pytest.mark.parametrize("fault", OF_WEIGHTINGS)
def test_a_weighting(fault: str, named: Name, tmp_path: Path) -> None:
    said = refusal(tiny(weighting=[named("weighting", Weigher, fault=fault)]), tmp_path)
    assert said.startswith(f"round 2: {OF_WEIGHTINGS[fault]}")


@pytest.mark.parametrize("fault", OF_STEPS)
def test_a_server_step(fault: str, named: Name, tmp_path: Path) -> None:
    said = refusal(tiny(server=[named("server", Step, fault=fault)]), tmp_path)
    assert said == f"round 2: {OF_STEPS[fault]}"


def test_a_rule_of_the_downlink_and_an_instrument(named: Name, tmp_path: Path) -> None:
    assert refusal(tiny(client=[named("client", Sends)]), tmp_path / "sends") == (
        "round 1: NoDownlink.downlink returned None. Return a Downlink."
    )
    for fault, made in {"none": "None", "pair": "a tuple"}.items():
        config = tiny(record={"instruments": [named("instrument", Eye, fault=fault)]})
        way = "Yield notes, as in yield self.note(name, value)"
        assert refusal(config, tmp_path / fault) == f"round 1: Eye.observe returned {made}. {way}."


def off(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) != y).float()


METRICS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": lambda outputs, y: off(outputs, y).mean(),
    "classes": lambda outputs, y: outputs.softmax(1),
    "nothing": lambda outputs, y: None,
    "column": lambda outputs, y: off(outputs, y)[:, None],
}
OF_METRICS = {
    "mean": "metric mean made a tensor [] float32 of 2 samples. Return a tensor [2], one number for each, and no mean.",
    "classes": "metric classes made a tensor [2, 4] float32 of 2 samples. Return a tensor [2], one number for each, and no mean.",
    "nothing": "metric nothing made None of 2 samples. Return a tensor [2], one number for each, and no mean.",
    "column": "metric column made a tensor [2, 1] float32 of 2 samples.",
}


def late(outputs: Tensor, y: Tensor) -> Tensor:
    """A mean of many samples, but right for the two on which a model is tried before a run."""
    return off(outputs, y) if len(y) == 2 else off(outputs, y).mean()


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_refused_before_anything_starts(name: str, named: Name) -> None:
    named("metric", Metric.mean(name, METRICS[name]))
    with pytest.raises(ConfigError, match=re.escape(f"evaluate.metrics: {OF_METRICS[name]}")):
        prepare(tiny(evaluate={"metrics": [name]}))


def test_a_metric_that_goes_wrong_later(named: Name, tmp_path: Path) -> None:
    named("metric", Metric.mean("late", late))
    said = refusal(tiny(evaluate={"metrics": ["late"]}), tmp_path / "global")
    assert re.fullmatch(r"metric late made a tensor \[\] float32 of (\d+) samples. Return a tensor \[\1\], .*", said), (
        said
    )
    personal = {"metrics": ["late"], "global": False, "personal": "after_train"}
    said = refusal(tiny(evaluate=personal, data={"client_test_frac": 0.5}), tmp_path / "personal")
    assert re.match(
        r"an error in a client's code ends the run.\nclient \d, round 3, node local: metric late made", said
    ), said


def test_numbers_of_a_metric_are_added_whatever_holds_them() -> None:
    outputs, y = torch.eye(4)[[0, 1, 2, 2]], torch.tensor([0, 1, 2, 3])
    for per_sample in (off, lambda *of: off(*of).numpy(), lambda *of: off(*of).tolist(), lambda *of: off(*of) > 0):
        task = Classification().with_metrics([Metric.mean("wrong", per_sample)])
        assert task.values(task.score(outputs, y))["wrong"] == 0.25
    with pytest.raises(HookError, match=r"metric pair made a str as one of its sums. Return numbers"):
        Classification().with_metrics([Metric("pair", lambda *of: (off(*of), "four"))]).score(outputs, y)


def moved(outputs: Tensor, y: Tensor) -> Tensor:
    """Right, but it leaves other outputs to those after it."""
    return off(outputs.sub_(outputs.amax(1, keepdim=True)), y)


def relabelled(outputs: Tensor, y: Tensor) -> Tensor:
    return (y.clamp_(max=1) == 0).float()


@pytest.mark.parametrize("metric", [moved, relabelled])
def test_a_metric_that_changes_what_others_read_is_refused(metric: Callable[..., Tensor], named: Name) -> None:
    named("metric", Metric.mean("moved", metric))
    with pytest.raises(
        ConfigError, match=r"evaluate.metrics: metric moved changes the outputs or labels .* outputs.clone()"
    ):
        prepare(tiny(evaluate={"metrics": ["moved"]}))


def test_a_task_that_changes_what_metrics_read_is_refused() -> None:
    class Moves(Classification):
        def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
            return super().losses(outputs.mul_(2), y)

    outputs, y = torch.eye(4), torch.arange(4)
    with pytest.raises(HookError, match=r"Moves\.losses changes the outputs or labels"):
        Moves().total_loss(outputs, y)


def test_a_loss_is_that_of_the_outputs_whatever_a_metric_does() -> None:
    """What it writes through NumPy, torch does not notice."""

    def written(outputs: Tensor, y: Tensor) -> Tensor:
        outputs.numpy()[:] = 0
        return off(outputs, y)

    outputs, y = torch.eye(4), torch.arange(4)
    tallied = Classification().with_metrics([Metric.mean("written", written)]).score(outputs.clone(), y)
    assert (
        tallied.loss
        == Classification().total_loss(outputs, y).item()
        != Classification().total_loss(0 * outputs, y).item()
    )


def test_outputs_of_inference_mode_are_scored() -> None:
    with torch.inference_mode():
        outputs = torch.eye(4) + 0
    assert Classification().values(Classification().score(outputs, torch.arange(4))) == {"accuracy": 1.0}


@dataclass(frozen=True)
class MeanLoss(Classification):
    """Its losses are one mean, which an evaluation would divide by the number of samples again."""

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        return super().losses(outputs, y).mean()


def test_losses_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY.table("task"), "meanloss", MeanLoss())
    message = (
        "data.task: MeanLoss.losses made a tensor [] float32 of 2 samples. Return a tensor [2], one number for each"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare(tiny(data={"task": "meanloss"}))


def test_faults_on_ray(named: Name, subtests: Any, tmp_path: Path, warm_ray: MakeEngine) -> None:
    """The same sentences as in this process."""
    named("metric", Metric.mean("late", late))
    changes: dict[str, dict[str, Any]] = {
        "client": {"client": [named("client", Client, fault="penalty vector")]},
        "weighting": {"weighting": [named("weighting", Weigher, fault="nan")]},
        "server": {"server": [named("server", Step, fault="none")]},
        "metric": {"evaluate": {"metrics": ["late"]}},
    }
    for name, change in changes.items():
        with subtests.test(name):
            local = refusal(tiny(**change), tmp_path / f"{name} local")
            ray = {"engine": {"ray": {"clients_per_actor": 3}}}
            on_ray = refusal(tiny(**change, **ray), tmp_path / f"{name} ray", make_engine=warm_ray)
            assert re.sub("node [0-9a-z]+", "node", on_ray) == re.sub("node [0-9a-z]+", "node", local)


# What is there before a hook.


@dataclass(frozen=True)
class Nothing(ClientMethod):
    """A `start` that does nothing: what was received is there already."""

    def start(self, run: LocalRun) -> None:
        pass


@dataclass(frozen=True)
class Own(Nothing):
    """Its own test of a client loads nothing either."""

    def personal(self, run: LocalRun) -> None:
        pass


@pytest.mark.parametrize(
    "changes", [{}, {"model": {"bn_stats": "local"}}, {"client": ["fedbabu"]}], ids=["plain", "buffers", "body"]
)
def test_training_begins_at_what_was_received(
    changes: dict[str, Any], named: Name, tmp_path: Path, ran: Callable[..., Federation]
) -> None:
    evaluated = {"data": {"client_test_frac": 0.3}, "evaluate": {"personal": "after_init", "global": False}}
    plain = ran(**changes, **evaluated)
    for method in (Nothing,) if "client" in changes else (Nothing, Own):  # FedBABU has a `personal` of its own
        client = [*changes.get("client", []), named("client", method)]
        mine = simulate(tiny(**(changes | {"client": client}), **evaluated), tmp_path / method.__name__)
        assert mine.sha256() == plain.sha256()
        scores = [table(one.folder, "rounds")["personal_accuracy_macro"] for one in (mine, plain)]
        assert np.array_equal(*scores, equal_nan=True)
        assert np.isfinite(scores[0][-1])


def test_the_received_model_is_loaded_before_the_first_hook() -> None:
    run = local_run([Nothing()], received=torch.arange(80.0, dtype=torch.float64)[: local_run([]).layers.S])
    assert torch.equal(run.value, run.received)


# What hooks draw.


def drawn() -> list[float]:
    """A number of each global generator."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_seeded_generators() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with seeded(2**40 + 5):
        expected = random.Random(2**40 + 5).random(), np.random.RandomState(2**40 + 5 & 0xFFFFFFFF).rand()
        assert drawn() == [*expected, float(torch.rand((), generator=torch.Generator().manual_seed(2**40 + 5)))]
        with pytest.raises(ZeroDivisionError), seeded(1):
            raise ZeroDivisionError
        assert random.random() != expected[0]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_whose_code_may_draw(named: Name) -> None:
    for ours in (FedAvg(), FedProx(), Classification(), correct, Metric.mean("right", correct).sums):
        assert not may_draw(ours)
    its = of_torchmetrics(Rolled(), "again")
    for users in (Draws(), Client, dice, Metric.mean("dice", dice).sums, partial(dice), its.sums, its.value):
        assert may_draw(users)
    named("metric", Metric.mean("dice", dice))
    named("model", Dithered)
    for changes in ({"evaluate": {"metrics": ["dice"]}}, {"model": {"name": "dithered"}}, {}):
        config = tiny(**changes)
        assert host_spec(config, *partitioned(config)).draws_globally == bool(changes)


@dataclass(frozen=True)
class Draws(ClientMethod):
    """Every hook of a client moves the model by a little that is drawn."""

    def start(self, run: LocalRun) -> None:
        self._move(run)

    def begin(self, run: LocalRun) -> None:
        self._move(run)

    def penalty(self, run: LocalRun, x: Tensor, y: Tensor, z: Tensor, loss: Tensor) -> Tensor:
        return loss * sum(drawn())

    def correct_grad(self, run: LocalRun) -> None:
        run.grad *= 1 + sum(drawn()) / 8

    def finish(self, run: LocalRun, upload: Upload) -> None:
        self._move(run)
        upload.scalars["drawn"] = torch.tensor(sum(drawn()))

    def personal(self, run: LocalRun) -> None:
        self._move(run)

    def _move(self, run: LocalRun) -> None:
        run.params.add_(sum(drawn()) / 100)


@dataclass(frozen=True)
class DrawsWeights(Weighting):
    plans_early: ClassVar[bool] = True

    def plan(self, cohort: Any, server: Any, prior: Mixture) -> Mixture:
        lam = torch.tensor([1 + sum(drawn()) for _ in cohort.clients])
        server.note(self, "lam", lam, "client")
        return prior.reweighted(lam)


@dataclass(frozen=True)
class DrawsStep(ServerStep):
    reads_models: ClassVar[bool] = False

    def prepare(self, server: Any) -> None:
        server.memory["drawsstep"] = sum(drawn())

    def apply(self, target: Tensor, mixture: Mixture, cohort: Any, server: Any) -> Tensor:
        server.note(self, "drawn", torch.tensor(drawn(), dtype=torch.float64), "generator")
        noise = cohort.each(noise_of).sum(0) if self.reads_models else 0.0
        return target * (1 + sum(drawn()) / 1000 + server.memory["drawsstep"] / 1000 + noise)


@dataclass(frozen=True)
class DrawsOfModels(DrawsStep):
    reads_models: ClassVar[bool] = True


def noise_of(update: Tensor, layers: Any) -> Tensor:
    return torch.tensor(sum(drawn()) / 1000)


@dataclass(frozen=True)
class DrawsNotes(Instrument):
    def observe(self, done: Any, population: Any) -> Iterator[Any]:
        yield self.note("drawn", torch.tensor(drawn()), "generator")


class Dithered(nn.Module):
    """A model with noise on its samples, in training and in tests, and a constant that no state_dict has."""

    def __init__(self, inputs: Inputs):
        super().__init__()
        self.places = [random.gauss(0, 1), float(np.random.randn())]
        self.out = nn.Linear(math.prod(inputs.shape), inputs.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1) + sum(self.places) / 10 + np.random.rand() / 10 + torch.rand(()) / 10)


def dice(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.tensor([sum(drawn()) for _ in y])


def rolled(total: float) -> Tensor:
    """A score of no sums: what it draws."""
    return torch.tensor(drawn(), dtype=torch.float64).sum()


class Rolled(SumMetric):
    """Of torchmetrics, and draws where it computes."""

    def update(self, outputs: Tensor, y: Tensor) -> None:
        super().update(len(y))

    def compute(self) -> Tensor:
        return rolled(0.0)


def cloud(samples: int = 240) -> Any:
    x = np.random.randn(samples, 8).astype(np.float32) + random.random()
    y = (x.sum(1) > torch.randn(samples).numpy()).astype(np.int64)
    return (x[40:], y[40:]), (x[:40], y[:40])


def shuffled(labels: np.ndarray, rng: np.random.RandomState, clients: int = 8) -> list[np.ndarray]:
    order = np.random.permutation(len(labels))
    random.shuffle(order)
    return np.array_split(order[torch.randperm(len(order)).numpy()], clients)


@pytest.fixture
def lucky(named: Name) -> Callable[..., Config]:
    """A configuration in which all that a user may write draws from the global generators."""
    classes = {"client": Draws, "weighting": DrawsWeights, "instrument": DrawsNotes}
    own = {kind: [named(kind, entry)] for kind, entry in classes.items()}
    named("dataset", source_of(cloud))
    named("partition", scheme_of(shuffled))
    named("model", Dithered)
    named("metric", Metric.mean("dice", dice))
    named("metric", Metric("rolled", lambda outputs, y: len(y), rolled))
    named("metric", of_torchmetrics(Rolled(), "again"))

    def configured(step: type[ServerStep] = DrawsStep, **changes: Any) -> Config:
        return tiny(
            **{
                "data": {"name": "cloud", "partition": "shuffled", "client_test_frac": 0.3}, "model": {"name": "dithered"},
                "client": own["client"], "weighting": own["weighting"], "server": [named("server", step)],
                "record": {"instruments": own["instrument"]}, "rounds": {"evaluate_every": 1},
                "evaluate": {"metrics": ["dice", "rolled", "again"], "personal": "after_train", "batch_size": 7}, **changes,
            }
        )  # fmt: skip

    return configured


DRAWN = ["metric.dice", "metric.rolled", "metric.again", "metric.personal_rolled"]


def outcome(federation: Federation) -> dict[str, Any]:
    """The hash of a run, and all that hooks have drawn."""
    rounds = tables.read(federation.folder, "rounds")
    return {
        "sha256": federation.sha256(),
        "data": federation.data.sha256(),
        "samples": [federation.partition.train[client].tolist() for client in range(8)],
        "rounds": rounds.select(["loss", *DRAWN, "personal_accuracy_micro", "train_loss"]).to_pylist(),
        "notes": tables.read(federation.folder, "notes").to_pylist(),
    }


@pytest.mark.parametrize("step", [DrawsStep, DrawsOfModels])
def test_what_hooks_draw_belongs_to_the_run(
    step: type[ServerStep], lucky: Callable[..., Config], subtests: Any, tmp_path: Path, warm_ray: MakeEngine
) -> None:
    first = simulate(lucky(step), tmp_path / "first")
    expected = outcome(first)
    assert not np.isnan([list(row.values()) for row in expected["rounds"]]).any()
    assert len({row[column] for row in expected["rounds"] for column in DRAWN}) == 3 * len(DRAWN)
    for column, purpose in {"rolled": "metric rolled", "personal_rolled": "metric rolled personal"}.items():
        with seeded(stream_seed(3, 1, SERVER, purpose)):
            assert expected["rounds"][1][f"metric.{column}"] == sum(drawn())
    mine = [
        note["value"] for note in expected["notes"] if note["method"] == step.__name__.lower() and note["round"] == 1
    ]
    stream = stream_seed(3, 1, SERVER, f"apply 0 {step.__name__.lower()}")
    assert mine[:2] == [random.Random(stream).random(), np.random.RandomState(stream & 0xFFFFFFFF).rand()]

    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    before = random.getstate()
    with subtests.test("again, in a process that has drawn"):
        assert outcome(simulate(lucky(step), tmp_path / "again")) == expected
        assert random.getstate() == before
    with subtests.test("another seed"):
        other = outcome(simulate(lucky(step, seed=4), tmp_path / "other"))
        assert not any(other[key] == expected[key] for key in expected)
    with subtests.test("resumed"):
        stopped = Federation(lucky(step), tmp_path / "resumed")
        stopped.step()
        stopped.checkpoint()
        stopped.close()
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        assert outcome(simulate(lucky(step), tmp_path / "resumed", resume=True)) == expected
    for hosts, clients in {"1 host": 3, "3 hosts": 1}.items():
        with subtests.test(hosts):
            config = lucky(step, engine={"ray": {"clients_per_actor": clients}})
            assert outcome(simulate(config, tmp_path / hosts, make_engine=warm_ray)) == expected


@dataclass(frozen=True)
class DrawsTogether(ClientMethod):
    """Clients train together; what is before and after their steps draws."""

    batched: ClassVar[bool] = True

    def begin(self, run: LocalRun) -> None:
        run.params.add_(sum(drawn()) / 100)

    def finish(self, run: LocalRun, upload: Upload) -> None:
        run.params.add_(sum(drawn()) / 100)


def test_clients_that_train_together_draw(named: Name, subtests: Any, tmp_path: Path, warm_ray: MakeEngine) -> None:
    changes = {"client": [named("client", DrawsTogether)], "rounds": {"participation": 0.5}}
    expected = simulate(tiny(**changes, engine={"local": {"batch_clients": 2}}), tmp_path / "local").sha256()
    for hosts, clients in {"1 host": 4, "2 hosts": 2}.items():
        with subtests.test(hosts):
            config = tiny(**changes, engine={"ray": {"clients_per_actor": clients, "batch_clients": 2}})
            assert simulate(config, tmp_path / hosts, make_engine=warm_ray).sha256() == expected


def test_a_method_that_overrides_no_hook_is_said_where_it_is_written() -> None:
    """As where its hook is misspelt: it would be FedAvg under another name. A helper beside a hook may be called anything."""
    with pytest.warns(
        UserWarning, match="^Misspelt overrides no hook: raysim does not call correct_gradient. Did you mean"
    ) as said:

        class Misspelt(ClientMethod):
            def correct_gradient(self, run: LocalRun) -> None: ...

    assert said[0].filename == __file__ and "correct_grad?" in str(said[0].message)
    with warnings.catch_warnings(action="error"):

        class Right(ClientMethod):
            def correct_grad(self, run: LocalRun) -> None:
                self.correct_gradient(run)

            def correct_gradient(self, run: LocalRun) -> None: ...


def test_an_upload_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="valeu"):
        Upload(torch.zeros(1)).valeu = torch.zeros(1)  # type: ignore[attr-defined]
