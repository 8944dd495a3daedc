"""A whole run, against plain PyTorch and arithmetic on what it wrote: training, aggregation, tables, traces, traffic."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case import UNITS, Traced
from clocks import ManualClock
from conftest import simulate, table, tiny
from reference import partition_of
from safetensors.numpy import load_file

from raysim.config import ConfigError, LocalConfig, load
from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.failures import ClientFailure
from raysim.data.partition import IIDEqual
from raysim.federation import Federation, sample
from raysim.federation.failures import RoundFailed
from raysim.methods import CLIENTS, WEIGHTINGS
from raysim.models import Inputs, build
from raysim.store import tables

SCAFFOLD = {"client": ["scaffold"], "local": {"momentum": 0.0, "weight_decay": 0.0}}
UNIT_NAMES = ["conv1.conv", "conv2.conv", "head"]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Traced]]:
    """All rounds, by default two, of a run with these changes; tests that ask for the same one share it."""
    runs: dict[str, list[Traced]] = {}

    def rounds(changes: dict[str, Any]) -> list[Traced]:
        config = tiny(**{"rounds": {"total": 2}, "record": {"traces": "rounds"}} | changes)
        if (key := repr(config)) not in runs:
            folder = tmp_path_factory.mktemp("traced")
            federation = simulate(config, folder, clock=ManualClock(tick=1))
            runs[key] = [Traced(folder, t, federation) for t in range(federation.server.rounds)]
        return runs[key]

    return rounds


def rows(folder: Path, table: str, t: int | None = None) -> list[dict[str, Any]]:
    found = tables.read(folder, table).to_pylist()
    return [row for row in found if t is None or row["round"] == t]


# ---- local training


def retrained(
    rounds: list[Traced], local: LocalConfig, optimizers: dict[int, torch.optim.Optimizer] | None = None
) -> list[tuple]:
    """Every client of every round trained again by torch's own optimiser on plain modules, beside its traced model.

    With `optimizers`, they are kept by client."""
    federation = rounds[0].federation
    config, data = federation.config, federation.data
    pairs, modules = [], {}
    for round_ in rounds:
        for client in round_.clients:
            if optimizers is None or client.id not in modules:
                module = modules[client.id] = build(config.model.name, Inputs(data.sample_shape, data.num_classes))
                if local.optimizer == "adam":
                    kind, own = torch.optim.Adam, {"betas": local.betas}
                else:
                    kind, own = torch.optim.SGD, {"momentum": local.momentum, "nesterov": local.nesterov}
                optimizer = kind(module.parameters(), 1.0, weight_decay=local.weight_decay, **own)
                if optimizers is not None:
                    optimizers[client.id] = optimizer
            module = modules[client.id]
            optimizer = optimizer if optimizers is None else optimizers[client.id]
            optimizer.param_groups[0]["lr"] = round_.lr
            module.load_state_dict({n: torch.from_numpy(array) for n, array in client.init.items()})
            for step in client.steps:
                x, y = data.transform(torch.from_numpy(data.x[step])), torch.from_numpy(data.y[step])
                optimizer.zero_grad()
                F.cross_entropy(module(x), y).backward()
                if local.grad_clip:
                    torch.nn.utils.clip_grad_norm_(module.parameters(), local.grad_clip)
                optimizer.step()
            pairs.append((client.model, {n: t.numpy().copy() for n, t in module.state_dict().items()}))
    return pairs


def apart(pairs: list[tuple]) -> float:
    """The greatest relative difference of a tensor."""
    return max(np.abs(a[n] - b[n]).max() / max(1.0, np.abs(b[n]).max()) for a, b in pairs for n in a)


def rounding(local: LocalConfig) -> float:
    """What float32 leaves open; Adam divides by the roots of tiny squares, which magnifies it."""
    return 2e-4 if local.optimizer == "adam" else 2e-5


LOCAL = {
    "momentum": {},
    "plain": {"momentum": 0.0, "weight_decay": 0.0},
    "nesterov": {"nesterov": True},
    "adam": {"optimizer": "adam", "momentum": 0.0, "lr": 0.01, "weight_decay": 0.01, "betas": [0.8, 0.9]},
    "clipped": {"grad_clip": 0.3},
    "two epochs": {"epochs": 2},
    "full batches": {"drop_last": True},
}


@pytest.mark.parametrize("name", LOCAL)
def test_local_training_is_torchs(name, traced):
    rounds = traced({"local": LOCAL[name]})
    local = rounds[0].federation.config.local
    for round_ in rounds:
        assert len(round_.clients) == 3
        for client in round_.clients:
            assert all(np.array_equal(client.init[n], round_.before[n]) for n in round_.before)
            mine = round_.federation.partition.train[client.id]
            per_epoch = len(mine) // 8 if local.drop_last and len(mine) >= 8 else -(-len(mine) // 8)
            assert len(client.steps) == local.epochs * per_epoch
            for epoch in range(local.epochs):
                steps = client.steps[epoch * per_epoch : (epoch + 1) * per_epoch]
                drawn = np.concatenate(steps)
                assert set(drawn) <= set(mine)
                assert (
                    len(set(drawn))
                    == len(drawn)
                    == (per_epoch * 8 if local.drop_last and len(mine) >= 8 else len(mine))
                )
                assert all(len(step) == 8 for step in steps[:-1])
    assert apart(retrained(rounds, local)) < rounding(local)
    others = {k: v for k, v in LOCAL.items() if k not in (name, "two epochs", "full batches")}
    if name not in ("two epochs", "full batches"):  # whose steps are in the trace: the near miss is every other setting
        for other in others.values():
            assert apart(retrained(rounds[:1], tiny(local=other).local)) > 1e-3


@pytest.mark.parametrize("optimizer", [{}, LOCAL["adam"]], ids=["sgd", "adam"])
def test_optimizers_that_persist(optimizer, traced):
    """Momentum and step counts survive the overwrite of the weights, also for a client that has paused."""
    changes = {"local": {**optimizer, "state": "persist"}, "rounds": {"total": 5}}
    rounds = traced(changes)
    local = rounds[0].federation.config.local
    taken_part = [client.id for round_ in rounds for client in round_.clients]
    assert len(set(taken_part)) < len(taken_part)
    assert apart(retrained(rounds, local, optimizers={})) < rounding(local)
    assert apart(retrained(rounds, local)) > 1e-3


def test_clients_smaller_than_a_batch_train_on_what_they_have(traced):
    [round_, *_] = traced({"local": {"drop_last": True, "batch_size": 1000}})
    assert [[len(step) for step in c.steps] for c in round_.clients] == [[c.samples] for c in round_.clients]


def test_losses_are_means_over_samples(traced):
    """Of the batches as they were trained on; without movement both epochs have the loss of the model itself."""
    changes = {"local": {"lr": 1e-30, "epochs": 2, "momentum": 0.0}, "model": {"name": "small_cnn"}}
    rounds = traced(changes)
    federation = rounds[0].federation
    folder, data = federation.folder, federation.data
    module = build("small_cnn", Inputs(data.sample_shape, data.num_classes))
    module.load_state_dict({n: torch.from_numpy(a) for n, a in rounds[0].before.items()})
    for t, round_ in enumerate(rounds):
        total = 0.0
        for row in rows(folder, "clients", t):
            mine = federation.partition.train[row["client"]]
            x, y = data.transform(torch.from_numpy(data.x[mine])), torch.from_numpy(data.y[mine])
            loss = F.cross_entropy(module(x), y).item()
            assert row["loss_first"] == pytest.approx(loss, rel=1e-5)
            assert row["loss_last"] == pytest.approx(loss, rel=1e-5)
            total += loss * len(mine) / round_.sizes.sum()
        assert rows(folder, "rounds", t)[0]["train_loss"] == pytest.approx(total, rel=1e-5)


# ---- aggregation and evaluation


def test_fedavg_by_hand(traced):
    """`after` is the mean of the traced models by samples, to the rounding of float32; counters are the largest."""
    for round_ in traced({}):
        p = round_.sizes / round_.sizes.sum()
        for name, tensor in round_.after.items():
            models = np.stack([client.model[name] for client in round_.clients])
            if name.endswith("num_batches_tracked"):
                assert tensor == models.max()
                continue
            mean = np.tensordot(p, models, 1)
            # Terms and sums are rounded once each: three clients, two additions and the server's model.
            assert np.abs(tensor - mean).max() <= 6 * np.finfo(np.float32).eps * max(np.abs(models).max(), 1e-3)
            assert np.abs(tensor - models.mean(0)).max() > 1e-4 or name.endswith("conv.bias")


@pytest.mark.parametrize("bn_stats", ["first", "local"])
def test_statistics_of_the_first_client_or_of_each(bn_stats, traced):
    """`first`: the server's are those of the client with the lowest id. `local`: everybody keeps their own."""
    rounds = traced({"model": {"bn_stats": bn_stats}, "rounds": {"total": 5}})
    names = [n for n in rounds[0].before if n.endswith(STATISTICS)]
    own: dict[int, dict[str, np.ndarray]] = {}
    met_again = 0
    for round_ in rounds:
        kept = round_.clients[0].model if bn_stats == "first" else round_.before
        assert all(np.allclose(round_.after[n], kept[n], rtol=1e-6, atol=1e-7) for n in names)
        for client in round_.clients:
            begins = own.get(client.id, round_.before) if bn_stats == "local" else round_.before
            assert all(np.array_equal(client.init[n], begins[n]) for n in names)
            met_again += client.id in own
            own[client.id] = client.model
    assert met_again
    sent = {row["up_buffers"] for row in rows(rounds[0].federation.folder, "traffic", 1)}
    assert sent == ({0} if bn_stats == "local" else {0, 4 * 50})


@pytest.mark.parametrize("weighting", [{"hdfl": 1}, {"fedldf": 1}], ids=["before training", "after it"])
def test_statistics_of_the_first_client_that_sends(weighting, traced):
    for round_ in traced({"model": {"bn_stats": "first"}, "weighting": [weighting]}):
        assert all(
            not np.array_equal(round_.after[n], round_.before[n]) for n in round_.before if n.endswith(STATISTICS)
        )


def test_evaluation_of_the_global_model(traced):
    """In eval mode, on the whole test set, in the order of rounds that was asked for."""
    rounds = traced({"rounds": {"total": 4, "evaluate_every": 3}, "evaluate": {"batch_size": 100}})
    data = rounds[0].federation.data
    module = build("tiny_bn_cnn", Inputs(data.sample_shape, data.num_classes)).eval()
    test = slice(data.train_rows, None)
    x, y = data.transform(torch.from_numpy(data.x[test])), torch.from_numpy(data.y[test])
    assert len(y) == 500
    for t, row in enumerate(rows(rounds[0].federation.folder, "rounds")):
        if t in (0, 1):
            assert row["accuracy"] is None
            continue
        module.load_state_dict({n: torch.from_numpy(a) for n, a in rounds[t].after.items()})
        with torch.no_grad():
            logits = module(x)
        assert row["accuracy"] == (logits.argmax(1) == y).sum().item() / 500
        assert row["loss"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)


@pytest.mark.parametrize("method", [{}, {"client": ["fedala"]}], ids=["fedavg", "fedala"])
def test_evaluation_changes_nothing(method, tmp_path):
    """However often, of whatever model, in whatever batches."""
    changes = {**method, "data": {"client_test_frac": 0.25}}
    often = {"total": 2, "evaluate_every": 1}
    settings: dict[str, dict[str, Any]] = {
        "rarely": {"rounds": {"total": 2, "evaluate_every": 2}, "evaluate": {"global": False}},
        "often": {"rounds": often},
        "small batches": {"rounds": often, "evaluate": {"batch_size": 7}},
        "as it starts": {"rounds": often, "evaluate": {"personal": "after_init"}},
        "as those who take part start it": {"rounds": often, "evaluate": {"personal": "before_train"}},
        "as it ends": {"rounds": often, "evaluate": {"personal": "after_train"}},
    }
    hashes = {name: simulate(tiny(**changes, **own), tmp_path / name).sha256() for name, own in settings.items()}
    assert len(set(hashes.values())) == 1, hashes
    micro = {n: [row["personal_accuracy_micro"] for row in rows(tmp_path / n, "rounds")] for n in settings}
    assert None not in [score for name, scores in micro.items() if name.startswith("as ") for score in scores]
    assert set(micro["often"]) == {None}


@dataclass(frozen=True)
class Sure(ClientMethod):
    """A client's own model gives class 0 a logit of the learning rate, whatever the sample, and the others 0."""

    def personal(self, run: LocalRun) -> None:
        run.params.zero_()
        run.layers.unflatten(run.params)["head.bias"][0] = run.lr


def test_clients_are_tested_at_the_learning_rate_of_the_round_they_would_begin(tmp_path, monkeypatch):
    monkeypatch.setitem(CLIENTS, "sure", Sure)
    changes = {"data": {"client_test_frac": 0.4}, "evaluate": {"personal": "after_init"}, "client": ["sure"]}
    federation = simulate(tiny(**changes, rounds={"evaluate_every": 1}, local={"lr_decay": 0.5}), tmp_path)
    found = rows(tmp_path, "personal")
    assert [row["round"] for row in found] == [t for t in range(3) for _ in range(8)]
    for row in found:
        lr, labels = 0.1 * 0.5 ** (row["round"] + 1), federation.data.labels[federation.partition.test[row["client"]]]
        loss = np.log(np.exp(lr) + 3) - lr * np.mean(labels == 0)
        assert row["loss"] == pytest.approx(loss, abs=2e-7)


@pytest.mark.parametrize("method", ["fedala", "ditto", "fedphp"])
def test_before_train_is_after_init_of_the_round_before_for_those_who_take_part(method, tmp_path):
    """All clients as each would start the next round, among them those who do."""
    changes = {"data": {"client_test_frac": 0.25}, "client": [method], "rounds": {"total": 4, "evaluate_every": 1}}
    scores = {}
    for when in ("after_init", "before_train"):
        simulate(tiny(**changes, evaluate={"personal": when}), tmp_path / when)
        scores[when] = {(row.pop("round"), row["client"]): row for row in rows(tmp_path / when, "personal")}
    took_part = {(row["round"], row["client"]) for row in rows(tmp_path / "before_train", "clients")}
    assert took_part == scores["before_train"].keys()
    later = {(t, client): row for (t, client), row in scores["before_train"].items() if t}
    assert later == {(t, client): scores["after_init"][t - 1, client] for t, client in later}


def test_sampling_is_the_methods_own_in_nothing(traced):
    """Cohorts, initial model and batches are the seed's: two methods train the same clients on the same rows."""
    plain, scaffold = traced({"local": SCAFFOLD["local"]}), traced(SCAFFOLD)
    for ours, theirs in zip(plain, scaffold, strict=True):
        for a, b in zip(ours.clients, theirs.clients, strict=True):
            assert a.id == b.id
            assert all(map(np.array_equal, a.steps, b.steps))
    assert all(np.array_equal(plain[0].before[n], scaffold[0].before[n]) for n in plain[0].before)
    first = [c.id for r in plain for c in r.clients]
    other = [c.id for r in traced({"seed": 4}) for c in r.clients]
    assert first != other


# ---- empty clients


EMPTY = {"data": {"partition": {"dirichlet_counts": {"alpha": 0.02, "clients": 8}}, "allow_empty_clients": True}}
RARE = {
    **EMPTY,
    "rounds": {"total": 8, "participation": 0.13},
    "seed": 1,
}  # one client a round, and some have no samples


def test_empty_clients_are_skipped(traced):
    changes = {**EMPTY, "rounds": {"total": 4, "participation": 0.7}, "seed": 1}
    rounds = traced(changes)
    sizes, folder = rounds[0].federation.partition.sizes, rounds[0].federation.folder
    skipped = 0
    for t, round_ in enumerate(rounds):
        found = rows(folder, "clients", t)
        assert len(found) == 5
        for row in found:
            empty = sizes[row["client"]] == 0
            assert (row["status"] == "has no training samples") == empty
            assert (row["weight"] is None) == empty
            skipped += empty
        assert [c.id for c in round_.clients] == [r["client"] for r in found if sizes[r["client"]]]
        assert sum(r["weight"] or 0 for r in found) == pytest.approx(1)
        assert rows(folder, "rounds", t)[0]["clients_ok"] == len(round_.clients)
    assert skipped


def test_cohort_of_empty_clients_leaves_the_model_as_it_is(traced):
    """And the run goes on."""
    rounds = traced(RARE)
    nobody = [r for r in rounds if not r.clients]
    assert 0 < len(nobody) < 8
    assert all(np.array_equal(r.before[n], r.after[n]) for r in nobody for n in r.before)


def test_a_round_of_empty_clients_does_not_lose_the_one_before(traced):
    """Nothing is trained in it, which is when the round before is written down; and no checkpoint writes it either."""
    federation = traced(RARE)[0].federation
    assert federation.config.rounds.checkpoint_every > 8
    folder = federation.folder
    drawn = [client for t in range(8) for client in sample(1, t, 8, 1)]
    trained = sum(federation.partition.sizes[client] > 0 for client in drawn)
    assert 0 < trained < 8
    assert [row["round"] for row in rows(folder, "rounds")] == list(range(8))
    assert [row["client"] for row in rows(folder, "clients")] == drawn
    whole_model = 4 * federation.server.layers.S
    result = json.loads((folder / "result.json").read_text())
    assert (result["bytes_up"], result["bytes_down"]) == (trained * whole_model, trained * whole_model)


@pytest.mark.parametrize("method", [{"scaffold": {"c_update": "mean_grad"}}, {"feddyn": {"adaptive_alpha": True}}])
def test_empty_clients_do_not_count_among_all(method, monkeypatch, tmp_path):
    """What is averaged over all clients is averaged over those that can take part."""

    def split(self, data, rows, rng):
        return [*np.array_split(rows, 4), *[rows[:0]] * (self.clients - 4)]

    monkeypatch.setattr(IIDEqual, "split", split)

    def trained(clients):
        data = {"partition": {"iid_equal": {"clients": clients}}, "allow_empty_clients": True}
        rounds = {"total": 2, "participation": 1.0}
        return simulate(tiny(data=data, client=[method], rounds=rounds), tmp_path / str(clients)).server.value

    assert torch.equal(trained(4), trained(8))


def test_empty_clients_are_refused_unless_allowed(tmp_path):
    data = {k: v for k, v in EMPTY["data"].items() if k != "allow_empty_clients"}
    with pytest.raises(ConfigError, match="clients have no training samples"):
        Federation(tiny(data=data, seed=1), tmp_path)


# ---- clients that fail, or begin, without training


@dataclass(frozen=True)
class Picky(ClientMethod):
    """Client 2 cannot begin. With `everyone`, clients begin that are not drawn as well."""

    everyone: bool = False

    def start(self, run: LocalRun) -> None:
        if run.client == 2:
            raise ClientFailure("its labels make no sense")
        run.receive()

    def starts_everyone(self) -> bool:
        return self.everyone


def test_a_test_that_fails_before_training_belongs_to_its_round(monkeypatch, tmp_path):
    monkeypatch.setitem(CLIENTS, "picky", Picky)
    asked = {"rounds": {"total": 1, "participation": 1.0}, "data": {"client_test_frac": 0.25}}
    simulate(tiny(client=["picky"], evaluate={"personal": "before_train"}, **asked), tmp_path)
    assert table(tmp_path, "events")["message"][0].startswith("client 2, round 1, test of its own model, node ")


@pytest.mark.parametrize(("everyone", "doing"), [(False, "test of its own model"), (True, "its initialisation")])
def test_a_client_that_fails_where_it_does_not_train_is_left_out(everyone, doing, monkeypatch, tmp_path):
    monkeypatch.setitem(CLIENTS, "picky", Picky)
    assert 2 not in sample(3, 0, 8, 3)
    changes = {
        "client": [{"picky": {"everyone": everyone}}],
        "data": {"client_test_frac": 0.25},
        "evaluate": {"personal": None if everyone else "after_init"},
    }
    simulate(tiny(**changes, rounds={"total": 1}), tmp_path / "drop")
    [message] = table(tmp_path / "drop", "events")["message"].tolist()
    assert message.startswith(f"client 2, round 1, {doing}, node ")
    assert message.endswith("ClientFailure: its labels make no sense")
    if not everyone:
        assert table(tmp_path / "drop", "personal")["client"].tolist() == [0, 1, 3, 4, 5, 6, 7]
    with pytest.raises(RoundFailed, match=f"client 2, round 1, {doing}"):
        simulate(tiny(**changes, rounds={"total": 1, "on_client_failure": "stop"}), tmp_path / "stop")


def test_clients_that_only_begin_are_sent_the_model(tmp_path):
    """ALA of all clients, of whom three train: each downloads the whole model, the three upload theirs."""
    federation = simulate(tiny(client=[{"fedala": {"clients": "all"}}], rounds={"total": 2}), tmp_path)
    model = 4 * federation.server.layers.S
    rounds = table(tmp_path, "rounds")
    assert rounds["bytes_down"].tolist() == [8 * model] * 2
    assert rounds["bytes_up"].tolist() == [3 * model] * 2
    traffic = table(tmp_path, "traffic")
    assert sorted(traffic["client"][traffic["round"] == 0].tolist()) == [*range(8)]
    assert (traffic["up_params"] > 0).sum() == 2 * 3


class OwnStep(ClientMethod):
    """Its step tells nobody the loss."""

    def step(self, run: LocalRun, x: torch.Tensor, y: torch.Tensor) -> None:
        run.params.mul_(0.9)


def test_a_step_of_a_methods_own_need_not_report_a_loss(monkeypatch, tmp_path):
    monkeypatch.setitem(CLIENTS, "own", OwnStep)
    federation = simulate(tiny(client=["own"], rounds={"total": 1}), tmp_path)
    assert table(tmp_path, "clients")["status"].tolist() == ["ok"] * 3
    assert np.isnan(table(tmp_path, "clients")["loss_last"]).all()
    assert federation.server.value.isfinite().all()


# ---- what is written


def test_tables_are_complete_and_agree(traced):
    changes = {**SCAFFOLD, "server": ["fedlws"], "rounds": {"total": 4, "checkpoint_every": 3}}
    rounds = traced(changes)
    federation = rounds[0].federation
    folder = federation.folder
    K, T = 3, 4
    drawn = [[client.id for client in round_.clients] for round_ in rounds]

    table = rows(folder, "rounds")
    assert [row["round"] for row in table] == list(range(T))
    assert all((row["clients_ok"], row["clients_failed"]) == (K, 0) for row in table)
    walls = [row["wall"] for row in table]
    assert walls == sorted(walls)
    for row in table:
        phases = [row[f"seconds_{phase}"] for phase in ("train", "plan", "reduce", "server")]
        assert min(phases) > 0 and sum(phases) < row["seconds"]

    for t, round_ in enumerate(rounds):
        clients = rows(folder, "clients", t)
        assert [row["client"] for row in clients] == drawn[t] == sorted(drawn[t])
        for row, client in zip(clients, round_.clients, strict=True):
            assert row["samples"] == client.samples
            assert row["steps"] == len(client.steps)
            assert row["weight"] == pytest.approx(1 / K)  # SCAFFOLD counts clients, not samples
            assert (row["status"], row["host"], row["node"]) == ("ok", 0, "local")
            assert 0 < row["seconds"] < table[t]["seconds_train"]

        layers = rows(folder, "layers", t)
        assert [row["name"] for row in layers] == UNIT_NAMES
        for row, names in zip(layers, UNITS.values(), strict=True):
            after, before = ([r[n] for n in names] for r in (round_.after, round_.before))
            assert row["parameters"] == sum(a.size for a in after)
            assert row["norm"] == pytest.approx(np.sqrt(sum((a**2).sum() for a in after)), rel=1e-6)
            moved = np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(after, before, strict=True)))
            assert row["update_norm"] == pytest.approx(moved, rel=1e-5)
        notes = {(n["name"], n["layer"]): n["value"] for n in rows(folder, "notes", t) if n["method"] == "fedlws"}
        assert [row["fedlws.gamma"] for row in layers] == [notes["gamma", name] for name in UNIT_NAMES]

        traffic = rows(folder, "traffic", t)
        assert [row["client"] for row in traffic] == drawn[t]
        for way in ("up", "down"):
            assert table[t][f"bytes_{way}"] == sum(v for r in traffic for c, v in r.items() if c.startswith(f"{way}_"))
        assert all(r["bytes"] == sum(v for c, v in r.items() if c.startswith(("up_", "down_"))) for r in traffic)

        timeline = rows(folder, "timeline", t)
        assert {"train", "reduce"} <= {row["phase"] for row in timeline}
        assert all(row["start"] <= row["stop"] <= table[t]["wall"] for row in timeline)

    partition = tables.read(folder, "partition")
    assert partition_of(partition).sha256() == federation.partition.sha256()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["seed"] == federation.config.seed
    assert manifest["partition_sha256"] == federation.partition.sha256()
    assert manifest["parameters"] == sum(row["parameters"] for row in rows(folder, "layers", 0))
    assert load(folder / "config.yaml") == federation.config
    result = json.loads((folder / "result.json").read_text())
    accuracies = [row["accuracy"] for row in table if row["accuracy"] is not None]
    assert (result["final"], result["best"]) == (accuracies[-1], max(accuracies))
    assert result["last10"] == pytest.approx(np.mean(accuracies))
    assert result["sha256"] == federation.sha256()

    final = load_file(folder / "model.safetensors")
    assert all(np.array_equal(final[n], tensor) for n, tensor in rounds[-1].after.items())


def test_trace_is_one_story(traced):
    """Each round begins where the last ended; a client's state is what it left, however long ago."""
    rounds = traced({**SCAFFOLD, "rounds": {"total": 5}})
    for ours, following in pairwise(rounds):
        assert all(np.array_equal(ours.after[n], following.before[n]) for n in ours.before)
    states: dict[int, dict[str, np.ndarray]] = {}
    for round_ in rounds:
        for client in round_.clients:
            if client.id in states:
                assert all(np.array_equal(client.before[n], states[client.id][n]) for n in states[client.id])
            else:
                assert client.before == {}
            states[client.id] = client.after
            # What a client sends is how its control moved (SCAFFOLD, option II).
            for name, control in client.after.items():
                moved = control - client.before.get(name, 0)
                sent = client.upload[name.replace("scaffold.c.", "scaffold.")]
                assert np.abs(moved - sent).max() <= 1e-6 * max(1, np.abs(control).max())
    assert any(len(r.clients[0].before) for r in rounds)


def test_only_the_asked_rounds_are_traced(tmp_path):
    simulate(tiny(record={"traces": [2]}, rounds={"total": 2}), tmp_path / "one")
    assert [folder.name for folder in (tmp_path / "one" / "traces").iterdir()] == ["round-0002"]
    simulate(tiny(rounds={"total": 2}), tmp_path / "none")
    assert not (tmp_path / "none" / "traces").exists()


# ---- traffic

P, L = 1556, 3  # of the tiny net for four classes: two convolutions with their norms, the head
B = 50  # means and variances of 8 and 16 channels, two counters


@pytest.mark.parametrize("top_n", [1, 2, 3])
def test_traffic_of_fedldf(top_n, tmp_path):
    """n·P parameters, L divergences a client, and masks of L bits; statistics travel with their layers."""
    simulate(tiny(weighting=[{"fedldf": {"top_n": top_n}}], rounds={"total": 2}), tmp_path)
    K = 3
    for t in range(2):
        total = {c: sum(row[c] or 0 for row in rows(tmp_path, "traffic", t)) for c in rows(tmp_path, "traffic", t)[0]}
        up, masks = total["up_params"] + total["up_scalars"], total["down_masks"]
        assert up + masks == top_n * P * 4 + K * L * 4 + K * 1
        assert total["up_buffers"] == top_n * B * 4
        assert (total["up_vectors"], total["up_masks"]) == (0, 0)
        assert (total["down_params"], total["down_buffers"]) == (K * P * 4, K * B * 4)


@dataclass(frozen=True)
class Late(ClientMethod):
    """Client 5 fails in the first round."""

    def finish(self, run: LocalRun, upload: Upload) -> None:
        if (run.t, run.client) == (0, 5):
            raise ClientFailure("too late")


@pytest.mark.parametrize(
    "weighting",
    [["feddisco"], ["feddisco", "ccn"], [{"hdfl": 2}, "ccn"], [{"random_layer": 2}, "feddisco", "fednova"]],
    ids=str,
)
def test_a_plan_begun_before_training_is_begun_anew_where_a_client_fails(weighting, monkeypatch, tmp_path):
    """As if it had been made after training: model, notes, and the label counts that clients send once."""
    monkeypatch.setitem(CLIENTS, "late", Late)
    config = tiny(client=["late"], weighting=weighting, rounds={"total": 2, "participation": 1.0})
    hashes = [simulate(config, tmp_path / "before").sha256()]
    for method in WEIGHTINGS.values():
        monkeypatch.setattr(method, "plans_early", False)
    hashes += [simulate(config, tmp_path / "after").sha256()]
    assert hashes[0] == hashes[1]
    assert table(tmp_path / "before", "rounds")["clients_failed"].tolist() == [1, 0]
    for name in ("notes", "traffic"):
        before, after = (tables.read(tmp_path / when, name).to_pydict() for when in ("before", "after"))
        for column in before.keys() - {"transport_up"}:
            assert before[column] == after[column], (name, column)


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"record": {"instruments": ["objective"]}}, 0),  # an observer's
        ({"weighting": [{"ldawa": {"warmup": 0}}]}, 0),  # the server has the models
        ({"server": [{"fedlws": {"tau_stat": "rms"}}]}, 0),
        ({"weighting": ["ccn"], "record": {"instruments": ["objective"]}}, 64),  # latents
    ],
    ids=str,
)
def test_of_what_clients_measure_the_methods_messages_are_traffic(changes, numbers, tmp_path):
    simulate(tiny(**changes, rounds={"total": 2}), tmp_path)
    assert (table(tmp_path, "traffic")["up_scalars"] == 4 * numbers).all()


@pytest.mark.parametrize(
    ("changes", "vectors"), [({}, 0), ({"weighting": [{"fedldf": {"top_n": 1}}]}, 0), (SCAFFOLD, P)],
    ids=["fedavg", "fedldf", "scaffold"],
)  # fmt: skip
def test_transport_is_what_was_sent(changes, vectors, tmp_path, warm_ray):
    """With an actor for each client: the bytes that left the actors' processes are those that the ledger says."""
    engine = {"ray": {"clients_per_actor": 1, "fan_in": 8}}
    federation = simulate(tiny(**changes, engine=engine, rounds={"total": 2}), tmp_path, make_engine=warm_ray)
    assert len(federation.engine.hosts) == 3
    for t in range(2):
        assert len({row["host"] for row in rows(tmp_path, "clients", t)}) == 3
        first, *others = rows(tmp_path, "traffic", t)
        for row in others:
            assert row["transport_up"] == row["up_params"] + row["up_buffers"] + row["up_vectors"]
            assert row["up_vectors"] == 4 * vectors
        # The first one's process adds the others' to its own, and sends the sum: every layer once.
        assert first["transport_up"] == 4 * (P + B + vectors)
