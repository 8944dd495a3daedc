"""Federations that learn something else than classes."""

import json
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import simulate, tiny
from reference import partition_of

import raysim
from raysim.analysis import MEASURES
from raysim.analysis.measure import write
from raysim.api.lines import ending
from raysim.api.progress import scores
from raysim.config import ConfigError, load
from raysim.config.shipped import find
from raysim.core.score import Metric
from raysim.core.task import TASKS, Classification
from raysim.data import DataError, Dataset, Proxy, make_partition
from raysim.data.partition import DirichletCounts, IIDEqual, LabelSwap, Pathological
from raysim.data.sources import Characters, Diabetes, Multilabel
from raysim.federation import Federation, host_spec, prepare
from raysim.federation.saved import SavedRun
from raysim.models import MODELS as NETWORKS
from raysim.models.own import builder_of
from raysim.report.groups import compare
from raysim.report.summary import summarise
from raysim.store import tables

CHEAP = {
    "regression": {"name": "diabetes"},
    "multilabel": {"name": {"multilabel": {"samples": 200, "test_samples": 100}}},
    "next_token": {"name": "characters"},
}
MODELS = {
    "regression": {"name": "mlp", "options": {"hidden": [8]}},
    "multilabel": {"name": "mlp", "options": {"hidden": [8]}},
    "next_token": {"name": "char_gru", "options": {"embedding": 8, "hidden": 16}},
}


def small(task: str, **changes):
    data = CHEAP[task] | {"partition": {"iid_equal": {"clients": 4}}} | changes.pop("data", {})
    return tiny(data=data, model=MODELS[task], **changes)


@pytest.mark.parametrize(
    ("name", "changes", "least"),
    [
        ("regression", ["rounds.total=20"], {"r2": 0.4}),  # ordinary least squares has 0.45 on these test rows
        ("multilabel", ["rounds.total=12"], {"f1": 0.9, "label_accuracy": 0.9}),  # guessing every label: 0.46 and 0.3
        # The most frequent character, a space: 0.17.
        ("characters", ["rounds.total=8", "rounds.participation=0.25"], {"token_accuracy": 0.27}),
    ],
)
def test_the_shipped_federations_learn(name, changes, least, tmp_path):
    config = load(find(name), changes)
    federation = Federation(config, tmp_path)
    while (shown := federation.step()) is not None:
        last = shown
    result = federation.finish()
    federation.close()
    for metric, bound in least.items():
        assert last[f"metric.{metric}"] > bound
    headline = federation.spec.task.headline
    values = [v for v in tables.read(tmp_path, "rounds")[f"metric.{headline.name}"].to_pylist() if v is not None]
    assert last["accuracy"] is None
    assert result["headline"] == headline.name
    assert result["final"] == values[-1]
    assert result["best"] == headline.best(values)
    assert json.loads((tmp_path / "result.json").read_text())["headline"] == headline.name


@pytest.mark.parametrize("task", CHEAP)
def test_both_engines_agree(task, tmp_path, warm_ray):
    """Personal models included. Pooled scores of the clients are in the table, and none that is of classes."""
    changes = {"data": {"client_test_frac": 0.25}, "client": ["fedrep"], "evaluate": {"personal": "after_init"}}
    changes |= {"rounds": {"total": 2}}
    changes |= {"local": {"lr": 0.01}}  # a squared error diverges sooner than a cross-entropy
    local = simulate(small(task, **changes), tmp_path / "local")
    ray = simulate(
        small(task, engine={"ray": {"clients_per_actor": 2}}, **changes), tmp_path / "ray", make_engine=warm_ray
    )
    assert local.sha256() == ray.sha256()
    rows = [tables.read(tmp_path / engine, "rounds").to_pylist() for engine in ("local", "ray")]
    scores = [{k: v for k, v in row.items() if k.startswith("metric.") or k == "loss"} for row in rows[0]]
    assert scores == [{k: row[k] for k in scores[0]} for row in rows[1]]
    name = local.spec.task.headline.name
    assert {f"metric.{name}", f"metric.personal_{name}"} <= set(scores[-1])
    assert rows[0][-1]["accuracy"] is rows[0][-1]["personal_accuracy_micro"] is None
    assert (rows[0][-1]["personal_auc"] is not None) == (task == "multilabel")
    assert all(row["correct"] is None for row in tables.read(tmp_path / "local", "personal").to_pylist())


@pytest.mark.parametrize(
    "stack", [["fedprox"], [{"scaffold": {"c_update": "mean_grad"}}], ["moon"], ["fedala"], ["fedphp"]]
)
@pytest.mark.parametrize("task", CHEAP)
def test_client_methods_go_with_every_task(task, stack, tmp_path):
    federation = simulate(small(task, client=stack, rounds={"total": 2}), tmp_path)
    assert set(tables.read(tmp_path, "clients")["status"].to_pylist()) == {"ok"}
    assert federation.server.value.isfinite().all()


@pytest.mark.parametrize(
    "changes", [{"weighting": [{"fedlaw": {"epochs": 5}}]}, {"server": ["server_ft"]}, {"weighting": ["ccn"]}], ids=str
)
@pytest.mark.parametrize("task", CHEAP)
def test_learning_on_the_server_uses_the_task(task, changes, tmp_path):
    federation = simulate(small(task, data={"proxy": {"samples": 20}}, rounds={"total": 2}, **changes), tmp_path)
    assert federation.server.value.isfinite().all()


HELD_OUT = {"client_test_frac": 0.25, "client_val_frac": 0.2, "proxy": {"samples": 30, "from": "train"}}


@pytest.mark.parametrize(
    "partition",
    [
        {"dirichlet_longtail": {"clients": 4, "alpha": 100.0, "rho": 10.0}},
        {"label_swap": {"clients": 4, "fraction": 1.0}},
        {"pathological": {"clients": 4}},
    ],
)
@pytest.mark.parametrize("held_out", [{}, HELD_OUT])
def test_balanced_weights_give_every_class_the_same_say_among_the_samples_that_train(partition, held_out):
    """What a class weighs, summed over the samples of all clients, is n / C: of those alone, as their clients see them."""
    config = tiny(data={"partition": partition, **held_out}, local={"class_weights": "balanced"})
    data, held = prepare(config)
    say = dict.fromkeys(range(4), 0.0)
    weights = host_spec(config, data, held).settings.class_weights
    for client in range(held.clients):
        for row in held.train[client]:
            label = data.y[row] if held.label_map is None else held.label_map[client, data.y[row]]
            say[label] += weights[label]
    assert [*say.values()] == pytest.approx([len(held.train.rows) / 4] * 4)


def test_a_class_that_no_client_trains_on_weighs_nothing():
    config = tiny(local={"class_weights": "balanced"})
    data, held = prepare(config)
    kept = replace(held, train=held.train.where(data.y[held.train.rows] != 2))
    weights = host_spec(config, data, kept).settings.class_weights
    assert weights[2] == 0
    assert sum(weights[data.y[row]] for row in kept.train.rows) == pytest.approx(len(kept.train.rows))


@pytest.mark.parametrize("changes", [{"server": ["feddf"]}, {"server": ["fedbe"]}, {"weighting": ["feddisco"]}])
def test_methods_of_classes_are_refused(changes, tmp_path):
    config = small("regression", data={"proxy": {"samples": 20}}, **changes)
    with pytest.raises(ConfigError, match="needs one class for each sample, which diabetes does not have"):
        Federation(config, tmp_path)


@pytest.mark.parametrize("source", [Diabetes(), Multilabel(20, 5), Characters()])
def test_partitions_by_class_are_refused_with_a_way_out(source):
    data = source.load(None)
    for scheme in (DirichletCounts(0.5, 4), Pathological(2, 4), LabelSwap(0.5, 4)):
        with pytest.raises(DataError, match=r"no single class for every sample.*choose iid_equal, quantity_skew or"):
            make_partition(data, scheme, seed=0)
    part = make_partition(data, IIDEqual(4), seed=0, proxy=Proxy(5))
    assert part.label_counts(data).tolist() == [[size] for size in part.sizes]
    assert len(part.proxy) == 5
    assert part.to_table(data)["label"].to_pylist() == [0] * len(data.y)  # those of nobody as well
    assert partition_of(part.to_table(data)).sha256() == part.sha256()


@pytest.mark.parametrize(
    ("task", "model", "sentence"),
    [
        ("next_token", {"name": "text_cnn"}, r"model.name: its outputs \[1, 57\] do not fit labels \[1, 40\]"),
        ("regression", {"name": "mlp"}, "data.task: classification needs labels"),
    ],
)
def test_what_does_not_fit_the_task_is_refused(task, model, sentence, tmp_path):
    data = CHEAP[task] | {"partition": {"iid_equal": {"clients": 4}}}
    named = {"task": "classification"} if task == "regression" else {}
    with pytest.raises(ConfigError, match=sentence):
        Federation(tiny(data=data | named, model=model), tmp_path)


class Made(NamedTuple):
    logits: torch.Tensor
    places: torch.Tensor
    extra: torch.Tensor


class Several(torch.nn.Module):
    """Its outputs have names; beside them stand integers, and one number of the whole batch."""

    def __init__(self, inputs):
        super().__init__()
        self.body, self.head = torch.nn.Linear(64, 6), torch.nn.Linear(6, inputs.classes)

    def forward(self, x):
        z = self.body(x.flatten(1)).tanh()
        return Made(self.head(z), z.argmax(1), z.square().mean())


@dataclass(frozen=True)
class Named(Classification):
    metrics: tuple[Metric, ...] = (Metric.mean("right", lambda made, y: (made.logits.argmax(1) == y).float()),)

    def losses(self, made, y):
        assert not made.places.is_floating_point()
        return F.cross_entropy(made.logits, y, reduction="none") + made.extra


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_outputs_of_a_structure_keep_it_everywhere(precision, monkeypatch, tmp_path):
    """Tests of a client's own model, too: in one batch, or of several, of which each has its number."""
    monkeypatch.setitem(TASKS, "named", Named())
    monkeypatch.setitem(NETWORKS, "several", builder_of(Several))
    changes = {"data": {"client_test_frac": 0.4, "task": "named"}, "local": {"precision": precision}, "engine": "local"}
    for batch in (512, 3):
        evaluate = {"personal": "after_train", "batch_size": batch}
        simulate(tiny(**changes, model={"name": "several"}, evaluate=evaluate), tmp_path / str(batch))
    one, several = (tables.read(tmp_path / str(batch), "personal").to_pydict() for batch in (512, 3))
    assert one["samples"] == several["samples"] and max(one["samples"]) > 3
    assert one["loss"] != several["loss"]  # of other batches
    right = [tables.read(tmp_path / str(batch), "rounds")["metric.personal_right"][-1].as_py() for batch in (512, 3)]
    assert 0 < right[0] == pytest.approx(right[1])


def test_unknown_tasks_and_metrics_are_refused():
    with pytest.raises(ConfigError, match=r"data.task: there is no task 'regresion'. Did you mean 'regression'"):
        small("regression", data={"task": "regresion"})
    with pytest.raises(ConfigError, match=r"evaluate.metrics: there is no metric 'mae'"):
        small("regression", evaluate={"metrics": ["mae"]})


def test_a_run_without_metrics_is_judged_by_nothing(tmp_path):
    """Only its loss is known."""
    data = Dataset(
        "d", np.eye(4, 5, dtype=np.float32), np.arange(4) % 2, 3, ("a", "b"), task=Classification(metrics=())
    )
    part = make_partition(data, IIDEqual(3), seed=0)
    config = tiny(data={"partition": {"iid_equal": {"clients": 3}}}, model=MODELS["regression"], rounds={"total": 1})
    federation = Federation(config, tmp_path, partitioned=(data, part))
    shown = federation.step()
    assert shown["headline"] is shown["accuracy"] is None
    assert math.isfinite(shown["loss"])
    federation.close()


def test_a_report_and_a_stream_of_a_regression(tmp_path):
    changes = {"name": "numbers", "engine": "local", "rounds": {"total": 2}, "local": {"batch_size": 16, "lr": 0.03}}
    data = {"data": {"name": "diabetes", "partition": {"iid_equal": {"clients": 4}}}, "model": MODELS["regression"]}
    own = {"data": data["data"] | {"client_test_frac": 0.2}, "evaluate": {"personal": "after_init"}}
    rounds = list(raysim.stream(changes | data | own, out=tmp_path / "run"))
    assert all(round.headline == "rmse" and round.score == round.metrics["rmse"] > 0 for round in rounds)
    run = raysim.load(tmp_path / "run")
    own = [round.metrics["personal_rmse"] for round in rounds]
    assert run.result["personal"] | {"auc": None} == {
        "final": own[-1], "best": min(own), "last10": pytest.approx(sum(own) / 2), "evaluations": 2,
        "macro": None, "std": None, "worst10": None, "auc": None,
    }  # fmt: skip
    assert f"personal  final {own[-1]:.4f}" in ending(run.result | {"folder": "run"})
    assert f"personal  {own[-1]:.4f}" in " ".join(scores(rounds[-1]))
    run.figure("metric:rmse")
    assert run.figure("loss").axes[0].get_ylabel() == "test loss (squared error)"
    write("rescaling", MEASURES["rescaling"](points=3), SavedRun(tmp_path / "run"))
    run = raysim.load(tmp_path / "run")  # which has no accuracy, and lists no figure that it cannot draw
    assert [name for name in run.figures if name.startswith(("rescaling", "accuracy", "clients"))] == ["rescaling:loss"]
    summary = summarise(compare([run]))
    assert summary.sentence == ""  # it knows accuracies alone
    shown = dict(zip(*summary.scores, strict=True))
    assert shown["final rmse"] == f"{rounds[-1].score:.4f}"
    assert not any("%" in heading for heading in shown)
