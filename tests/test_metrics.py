"""Metrics that are no means of samples: own ones, and those of torchmetrics."""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import simulate, table, tiny
from ray.cloudpickle import register_pickle_by_value, unregister_pickle_by_value
from reference import inputs
from sklearn.metrics import confusion_matrix, f1_score
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MaxMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MultilabelF1Score,
)
from torchmetrics.regression import MeanSquaredError

import raysim
from raysim.config import ConfigError
from raysim.core.hooks import HookError
from raysim.core.score import Metric, Score, scores_of
from raysim.core.task import TASKS
from raysim.core.torch_metrics import of_torchmetrics
from raysim.federation import Federation
from raysim.plugins import registered
from raysim.registry import REGISTRY

C = 4  # classes of `tiny`


def mean_over_classes(counts: Tensor) -> Tensor:
    right, false, missed = counts
    occurs = right + false + missed > 0
    return (2 * right / (2 * right + false + missed))[occurs].mean()


def counts(outputs: Tensor, y: Tensor) -> Tensor:
    """Of each class how many are found, false and missed [3, C]."""
    given, true = (F.one_hot(of, C).bool() for of in (outputs.argmax(1), y))
    return torch.stack([(given & true).sum(0), (given & ~true).sum(0), (~given & true).sum(0)])


def matrix(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.bincount(y * C + outputs.argmax(1), minlength=C * C).view(C, C)


def worst_recall(confused: Tensor) -> float:
    recall = confused.diagonal() / confused.sum(1)
    return float(recall[~recall.isnan()].min())


class WorstRecall(MulticlassConfusionMatrix):
    def compute(self) -> Tensor:
        confused = super().compute()
        return (confused.diagonal() / confused.sum(1)).nan_to_num(1.0).min()


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = [(kind, name) for kind, name, *_ in REGISTRY.own()]
    yield
    for kind, name, *_ in REGISTRY.own():
        if (kind, name) not in before:
            del REGISTRY.table(kind)[name]


EVERY = {"rounds": {"evaluate_every": 1, "total": 2}, "data": {"client_test_frac": 0.3}}
PERSONAL = {"personal": "after_init"}


def predicted(federation: Federation, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Outputs and labels of the last global model."""
    model, layers = federation.spec.network()
    model.load_state_dict(layers.state_dict(federation.server.value))
    x, y = inputs(federation, rows)
    with torch.no_grad():
        return model.eval()(x.float()), y


@pytest.fixture
def travelling() -> Iterator[None]:
    """Functions of this file reach actors as those of a script do."""
    register_pickle_by_value(sys.modules[__name__])
    yield
    unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.usefixtures("travelling")
def test_on_both_engines_and_however_samples_are_batched(tmp_path: Path, warm_ray: Any) -> None:
    """Without a personal method a client's own model is the global one: all clients' test samples together, then, are
    what scikit-learn and torchmetrics have in one piece."""
    raysim.metric(value=mean_over_classes)(counts)
    given = {
        "f1": MulticlassF1Score(C, average="macro"),
        "auroc": MulticlassAUROC(C, thresholds=50),
        "worst": WorstRecall(C),
        "own_worst": Metric("confusion", matrix, worst_recall),
    }
    names = ["counts", *(registered("metric", metric, name) for name, metric in given.items())]
    config = {**EVERY, "evaluate": {**PERSONAL, "metrics": names, "batch_size": 16}}
    ray = {"engine": {"ray": {"clients_per_actor": 1}}}
    local = simulate(tiny(**config), tmp_path / "local")
    simulate(tiny(**config, **ray), tmp_path / "ray", make_engine=warm_ray)
    simulate(tiny(**{**config, "evaluate": {**config["evaluate"], "batch_size": 7}}), tmp_path / "batches")
    columns = [f"metric.{whose}{name}" for whose in ("", "personal_") for name in names]
    rows = [table(tmp_path / folder, "rounds") for folder in ("local", "ray", "batches")]
    for column in columns:
        assert np.isfinite(rows[0][column]).all()
        np.testing.assert_array_equal(rows[0][column], rows[1][column], column)
        np.testing.assert_array_equal(rows[0][column], rows[2][column], column)
    for whose, samples in (("", local.partition.server_test), ("personal_", local.partition.test.rows)):
        outputs, y = predicted(local, samples)
        given = outputs.argmax(1)
        f1 = f1_score(y, given, average="macro")
        confused = confusion_matrix(y, given)
        recall = min((confused.diagonal() / confused.sum(1).clip(1))[confused.sum(1) > 0])
        auroc = MulticlassAUROC(C, thresholds=50)(outputs.softmax(1), y)
        expected = {"counts": f1, "f1": f1, "worst": recall, "own_worst": recall, "auroc": float(auroc)}
        last = {name: rows[0][f"metric.{whose}{name}"][-1] for name in names}
        assert last == pytest.approx(expected, abs=1e-6)


def test_own_models_are_scored_on_all_their_samples_together(tmp_path: Path) -> None:
    """The sums of clients with heads of their own: of right and all samples they make the micro accuracy."""
    hits = Metric("hits", lambda outputs, y: torch.stack([(outputs.argmax(1) == y).sum(), torch.tensor(len(y))]))
    evaluate = {**PERSONAL, "metrics": [registered("metric", hits)]}
    simulate(tiny(**EVERY, client=["fedrep"], evaluate=evaluate), tmp_path)
    rounds = table(tmp_path, "rounds")
    np.testing.assert_array_equal(rounds["metric.personal_hits"], rounds["personal_accuracy_micro"])
    personal = table(tmp_path, "personal")
    assert len(set(personal["correct"] / personal["samples"])) > 1


def test_sums_have_any_form() -> None:
    """Numbers stay numbers, tensors become float64; what they are in stays too. Confusion matrices add up."""
    stream = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(30, C, generator=stream), torch.randint(C, (30,), generator=stream)
    forms = {
        "tensor": matrix,
        "mapping": lambda outputs, y: {"confused": matrix(outputs, y), "seen": len(y), "first": outputs[:, 0].sum()},
        "pair": lambda outputs, y: [matrix(outputs, y).double(), y.sum()],
        "number": lambda outputs, y: len(y),
    }
    task = replace(TASKS["classification"], metrics=tuple(Metric(name, sums) for name, sums in forms.items()))
    tallies = [task.tally(outputs[i : i + 8], y[i : i + 8]) for i in range(0, 30, 8)]
    sums = Score.total(scores_of(tallies)).sums
    expected = torch.tensor(confusion_matrix(y, outputs.argmax(1), labels=range(C))).double()
    for found in (sums["tensor"], sums["mapping"]["confused"], sums["pair"][0]):
        assert torch.equal(found, expected) and found.dtype == torch.float64
    assert (sums["number"], sums["mapping"]["seen"], sums["pair"][1]) == (30, 30, y.sum().item())
    assert sums["mapping"]["first"] == pytest.approx(outputs[:, 0].sum().item(), rel=1e-6)
    part = scores_of(tallies)[0].sums["pair"][0]
    assert part.untyped_storage().nbytes() == C * C * 8  # what is sent of it, and no more


def test_sums_of_several_shapes_are_refused() -> None:
    of_batch = Metric("shaky", lambda outputs, y: torch.bincount(y))
    task = replace(TASKS["classification"], metrics=(of_batch,))
    scores = scores_of([task.tally(torch.zeros(2, C), torch.tensor(y)) for y in ([0, 1], [0, 3])])
    with pytest.raises(HookError, match=r"'shaky' has sums \[2\] of one batch and \[4\] of another.*minlength=C"):
        Score.total(scores)
    assert "did you" not in pickle.loads(pickle.dumps(HookError("one"))).args


@pytest.mark.parametrize(
    ("name", "metric"), [("multilabel", MultilabelF1Score(C)), ("regression", MeanSquaredError(num_outputs=C))], ids=str
)
def test_torchmetrics_of_other_tasks(name: str, metric: Any) -> None:
    stream = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(20, C, generator=stream), (torch.rand(20, C, generator=stream) < 0.4).float()
    made = of_torchmetrics(metric, "it")
    task = replace(TASKS[name], metrics=(replace(made, value=lambda sums: float(made.value(sums).mean())),))
    whole = Score.total([task.score(outputs[part], y[part]) for part in (slice(0, 3), slice(3, None))])
    mine = (outputs.sigmoid(), y.long()) if name == "multilabel" else (outputs, y)
    assert task.values(whole)["it"] == pytest.approx(float(metric(*mine).mean()))


def test_logits_are_never_taken_for_probabilities() -> None:
    """torchmetrics takes outputs within [0, 1] for probabilities, which those of a small batch may be by chance."""
    outputs, y = torch.tensor([[0.9, 0.1], [0.2, 0.8], [3.0, 0.0], [0.6, 0.9]]), torch.tensor([0, 1, 0, 0])
    made = of_torchmetrics(MulticlassAUROC(2, thresholds=20), "auroc")
    task = replace(TASKS["classification"], metrics=(made,))
    whole = task.values(task.score(outputs, y))
    assert task.values(Score.total([task.score(outputs[i : i + 1], y[i : i + 1]) for i in range(4)])) == whole
    assert whole["auroc"] == pytest.approx(float(MulticlassAUROC(2, thresholds=20)(outputs.softmax(1), y)))


def test_an_object_of_torchmetrics_stays_as_it_is() -> None:
    metric = MulticlassF1Score(C)
    made = of_torchmetrics(metric, "f1")
    task = replace(TASKS["classification"], metrics=(made,))
    task.values(task.score(torch.eye(C), torch.arange(C)))
    assert metric.update_count == 0 and not metric.tp.any()
    sent = pickle.loads(pickle.dumps(made))
    assert sent.of(sent.sums(torch.eye(C), torch.arange(C))) == 1.0


BASE: dict[str, Any] = {
    "data": {"name": "digits", "partition": {"iid_equal": {"clients": 4}}}, "model": {"name": "mlp"},
    "rounds": {"total": 1}, "local": {"batch_size": 16, "lr": 0.1}, "engine": "local",
}  # fmt: skip


def digits_f1(outputs: Tensor, y: Tensor) -> Tensor:
    given, true = (F.one_hot(of, 10).bool() for of in (outputs.argmax(1), y))
    return torch.stack([(given & true).sum(0), (given & ~true).sum(0), (~given & true).sum(0)])


def test_objects_in_a_run(tmp_path: Path) -> None:
    """By their class in lower case, or by the user's key. A decorated function given as an object is what it was."""
    raysim.metric(value=mean_over_classes)(digits_f1)
    raysim.metric(higher_is_better=False)(doubt)
    f1, recall = MulticlassF1Score(10, average="macro"), MulticlassAccuracy(10, average="macro")
    run = raysim.run(BASE, metrics=[f1, digits_f1, doubt], out=tmp_path / "list")
    assert run.config["evaluate"]["metrics"] == ["multiclassf1score", "digits_f1", "doubt"]
    rounds = run["rounds"].to_pandas()
    assert rounds["metric.multiclassf1score"][0] == pytest.approx(rounds["metric.digits_f1"][0], abs=1e-6)
    assert not REGISTRY.table("metric")["doubt"].higher_is_better
    assert {"metric:digits_f1", "metric:multiclassf1score"} <= set(run.figures)
    run = raysim.run(BASE, metrics={"f1": f1, "recall": recall, "g1": digits_f1}, out=tmp_path / "mapping")
    again = run["rounds"].to_pandas()
    assert again["metric.f1"][0] == rounds["metric.multiclassf1score"][0] != again["metric.recall"][0]


def test_one_metric_needs_no_list() -> None:
    for given, name in {doubt: "doubt", "doubt": "doubt", MulticlassF1Score(10): "multiclassf1score"}.items():
        assert raysim.read_config(BASE, metrics=given).evaluate.metrics == (name,)


def doubt(outputs: Tensor, y: Tensor) -> Tensor:
    return 1 - outputs.softmax(1).amax(1)


REFUSED: dict[str, tuple[Any, str]] = {
    "every sample": ([MulticlassAUROC(10)], r"MulticlassAUROC keeps every sample.*thresholds=200"),
    "no sum": ([MaxMetric()], r"MaxMetric has a state 'max_value' that is not a sum.*raysim\.Metric"),
    "of others": ([MulticlassF1Score(10) + MulticlassAccuracy(10)], "CompositionalMetric has no states of its own"),
    "a class": ([MulticlassF1Score], "the class MulticlassF1Score is no metric. Give .* an object of torchmetrics"),
    "a name under another": ({"f1": "doubt"}, "'doubt' is no metric"),
    "one name": (
        [MulticlassF1Score(10, average="micro"), MulticlassF1Score(10)],
        "'multiclassf1score' is listed twice",
    ),
    "the task's": ({"accuracy": MulticlassF1Score(10)}, r'two scores .accuracy..*metrics=\{"my_accuracy"'),
    "a matrix": (
        [MulticlassConfusionMatrix(10)],
        r"tensor \[10, 10\] \w+, and a score is one number.*`compute` of a sub",
    ),
    "classes": ({"few": MulticlassF1Score(3)}, "few cannot score two training samples"),
    "nothing": (
        [Metric("none", lambda outputs, y: len(y), lambda n: None)],
        "'none' is None, and a score is one",
    ),
    "text": ([Metric("text", lambda outputs, y: len(y), lambda n: "0.5")], "'text' is a str, and a score is one"),
    "two": (
        [Metric("two", lambda outputs, y: len(y), lambda n: torch.ones(2))],
        r"'two' is a tensor \[2\] float32, and a score is one",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_add_up_is_refused_before_the_start(case: str, tmp_path: Path) -> None:
    given, words = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"(?s)evaluate\.metrics: .*{words}"):
        raysim.run(BASE, metrics=given, out=tmp_path / "run")
    assert not (tmp_path / "run" / "rounds").exists()


OWN_MODELS = BASE | {"evaluate": {"personal": "after_train"}, "data": BASE["data"] | {"client_test_frac": 0.3}}


@pytest.mark.parametrize("names", [("f", "personal_f"), ("personal_accuracy_worst10",), ("personal_auc",)], ids=str)
def test_no_score_has_the_name_of_one_of_the_clients_own_models(names: tuple[str, ...], tmp_path: Path) -> None:
    metrics = dict.fromkeys(names, doubt)
    with pytest.raises(
        ConfigError, match=rf'evaluate\.metrics: \'{names[-1]}\' is .* metrics={{"my_{names[-1]}": ...}}'
    ):
        raysim.run(OWN_MODELS, metrics=metrics, out=tmp_path / "run")


def test_names_that_nothing_else_has_are_taken(tmp_path: Path) -> None:
    metrics = {"personal_f": doubt, "personal_accuracy": doubt}
    with raysim.stream(OWN_MODELS, metrics=metrics, out=tmp_path / "run") as rounds:
        [scored] = [{*round.metrics} & {*metrics} for round in rounds]
    assert scored == {*metrics}


def test_a_score_that_divides_by_zero_is_nan(tmp_path: Path) -> None:
    """Whatever numbers the sums are; tensors do so by themselves."""
    metric = Metric("gone", lambda outputs, y: (len(y), 0), lambda sums: sums[0] / sums[1])
    run = raysim.run(BASE, metrics=[metric], out=tmp_path / "run")
    assert run["events"]["message"].to_pylist() == ["metric.gone is NaN"]
    assert math.isnan(run["rounds"]["metric.gone"][0].as_py())


def test_a_value_that_fails_is_refused_by_name(tmp_path: Path) -> None:
    metric = Metric("worse", lambda outputs, y: (len(y), 0), lambda sums: sums["hits"])
    with pytest.raises(
        ConfigError, match=r"evaluate\.metrics: worse cannot score two training samples \(TypeError: tuple"
    ):
        raysim.run(BASE, metrics=[metric], out=tmp_path / "run")


def top(k: int, least: float = 0.0) -> Any:
    def hit(outputs: Tensor, y: Tensor, *, least: float = least) -> Tensor:
        return (outputs.topk(k).indices == y[:, None]).any(1) & (outputs.amax(1) > least)

    return hit


@dataclass
class Above:
    least: float

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.amax(1) > self.least


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "an object of torchmetrics": (MulticlassF1Score(10), MulticlassF1Score(10, average="micro"), "average = 'micro'"),
    "what is closed over": (top(1), top(5), "k = 5"),
    "a default": (top(1), top(1, 0.5), "least = 0.5"),
    "a partial": (partial(F.nll_loss, ignore_index=1), partial(F.nll_loss, ignore_index=2), "ignore_index = 2"),
    "a field": (Above(0.5), Above(0.25), "least = 0.25"),
    "a method": (Above(0.5).__call__, Above(0.25).__call__, "least = 0.25"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_a_metric_was_given_defines_it(case: str) -> None:
    was, now, value = OTHERS[case]
    [named] = raysim.read_config(BASE, metrics={"f": was}).evaluate.metrics
    before, again = (REGISTRY.table("metric").definition(named) for _ in range(2))
    raysim.read_config(BASE, metrics={"f": now})
    after = REGISTRY.table("metric").definition(named)
    assert before and after and before.text and after.text
    assert before == again != after
    assert f"# given: {value}\n" in after.text and value not in before.text.split("# given", 1)[-1]


def test_a_run_does_not_go_on_with_another_score_under_a_name(tmp_path: Path) -> None:
    raysim.run(BASE, metrics=[MulticlassF1Score(10, average="macro")], out=tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"(?s)the metric 'multiclassf1score' .*has changed.*-# given: average = 'macro'"
    ):
        raysim.resume(tmp_path / "run", rounds__total=2, metrics=[MulticlassF1Score(10, average="micro")])
    run = raysim.resume(tmp_path / "run", rounds__total=2, metrics=[MulticlassF1Score(10, average="macro")])
    assert run["rounds"].num_rows == 2


def test_what_changes_while_it_is_used_is_no_other_metric() -> None:
    """What counts is with what it was registered."""
    above = Above(0.5)
    [named] = raysim.read_config(BASE, metrics={"f": above}).evaluate.metrics
    before = REGISTRY.table("metric").definition(named)
    above.least = 0.25
    assert REGISTRY.table("metric").definition(named) == before


def test_what_two_samples_do_not_tell_is_no_fault(tmp_path: Path) -> None:
    """A value that divides by what two samples have none of."""
    metric = Metric("odd", lambda outputs, y: (y.sum(), (y == 9).sum()), lambda sums: sums[0] / sums[1])
    run = raysim.run(BASE, metrics=[metric], out=tmp_path / "run")
    assert math.isfinite(run["rounds"]["metric.odd"][0].as_py())


def test_a_value_that_goes_wrong_later_is_named(tmp_path: Path) -> None:
    """It is right for two samples. The driver calls it, so the run ends with the metric's name, and says so in its events."""
    metric = Metric("late", lambda outputs, y: len(y), lambda n: 0.5 if n == 2 else [n])
    with pytest.raises(HookError, match="the value of the metric 'late' is a list, and a score is one number"):
        raysim.run(BASE, metrics=[metric], out=tmp_path / "run")
    messages = table(tmp_path / "run", "events")["message"]
    assert any("metric 'late' is a list" in message for message in messages)


def test_a_value_that_is_undefined_is_reported_once(tmp_path: Path) -> None:
    metric = Metric("gone", lambda outputs, y: len(y), lambda n: math.nan)
    run = raysim.run(BASE | {"rounds": {"total": 3, "evaluate_every": 1}}, metrics=[metric], out=tmp_path / "run")
    assert run["events"]["message"].to_pylist() == ["metric.gone is NaN"]
    assert all(math.isnan(value) for value in run["rounds"]["metric.gone"].to_pylist())
