"""Scores of models on samples."""

import math
import statistics

import pytest
import torch
from conftest import simulate, tiny

from raysim.core.score import Score, micro_auc
from raysim.core.task import Classification
from raysim.engine.evaluation import evaluate
from raysim.federation import Federation
from raysim.federation.round import evaluate_personal
from raysim.federation.scores import personal_scores
from raysim.store import tables


def test_auc_counts_won_pairs():
    """Four (sample, class) pairs: the true ones score .9 and .4, the false ones .1 and .4: 3.5 of 4 comparisons won."""
    scores = torch.tensor([[0.9, 0.1], [0.4, 0.4]])
    true = torch.tensor([[True, False], [True, False]])
    assert micro_auc(scores, true) == pytest.approx(3.5 / 4)
    assert math.isnan(micro_auc(torch.empty(0, 2), torch.empty(0, 2, dtype=torch.bool)))


def test_auc_is_sklearns(subtests):
    from sklearn.metrics import roc_auc_score  # it takes seconds to import
    from sklearn.preprocessing import label_binarize

    for seed in range(3):
        with subtests.test(seed=seed):
            stream = torch.Generator().manual_seed(seed)
            scores = torch.randn(50, 4, generator=stream).mul(3).round().softmax(1)  # with ties
            y = torch.randint(4, (50,), generator=stream)
            true = label_binarize(y, classes=range(4))
            expected = roc_auc_score(true, scores, average="micro")
            assert micro_auc(scores, torch.from_numpy(true) > 0) == pytest.approx(expected, abs=1e-12)


def test_a_score_is_of_probabilities():
    logits, y = torch.tensor([[2.0, 0.0], [0.0, 1.0], [5.0, 4.0]]), torch.tensor([0, 1, 1])
    task = Classification()
    score = task.score(logits, y)
    assert (score.correct, score.samples) == (2, 3)
    assert score.loss == pytest.approx(math.log1p(math.exp(-2)) + math.log1p(math.exp(-1)) + math.log1p(math.exp(1)))
    assert task.values(score) == {"accuracy": 2 / 3}
    assert task.auc(logits, y) == micro_auc(logits.softmax(1), torch.tensor([[1, 0], [0, 1], [0, 1]]) > 0)


def test_scores_of_clients_are_recorded(tmp_path):
    """Of all of them or of a sample; the AUC of a round is the mean by samples, as in the code of FedALA's authors."""
    changes = {"data": {"client_test_frac": 0.25}, "client": ["fedrep"]}
    simulate(tiny(evaluate={"personal": "after_init"}, **changes), tmp_path / "all")
    *_, last = tables.read(tmp_path / "all", "rounds").to_pylist()
    rows = tables.read(tmp_path / "all", "personal").to_pylist()
    assert [row["client"] for row in rows] == list(range(8))
    total = sum(row["samples"] for row in rows)
    assert last["personal_auc"] == pytest.approx(sum(row["auc"] * row["samples"] for row in rows) / total)
    assert last["personal_accuracy_micro"] == pytest.approx(sum(row["correct"] for row in rows) / total)
    simulate(tiny(evaluate={"personal": "after_init", "clients": 3}, **changes), tmp_path / "sample")
    sampled = tables.read(tmp_path / "sample", "personal").to_pylist()
    assert len(sampled) == 3
    by_client = {row["client"]: row for row in rows}
    assert all(row == by_client[row["client"]] for row in sampled)


def test_accuracies_of_clients():
    """Twenty clients with one sample more each, of which they get one wrong; a client without samples does not count."""
    scores = {k: Score(k + 1, 0.0, {"accuracy": (k, k + 1)}, k / 20) for k in range(20)} | {20: Score(0, 0.0)}
    found = personal_scores(scores, Classification())
    shares = [k / (k + 1) for k in range(20)]
    assert found["personal_accuracy_micro"] == pytest.approx(190 / 210)
    assert found["personal_accuracy_macro"] == pytest.approx(statistics.mean(shares))
    assert found["personal_accuracy_std"] == pytest.approx(statistics.pstdev(shares))
    assert found["personal_accuracy_worst10"] == pytest.approx((0 + 1 / 2) / 2)
    assert found["personal_auc"] == pytest.approx(sum(k / 20 * (k + 1) for k in range(20)) / 210)
    assert personal_scores({20: scores[20]}, Classification()) == {}


def test_evaluations_are_shared_by_the_hosts(tmp_path, warm_ray):
    """Of the global model by samples, of the clients' own by clients; the driver adds up numbers."""
    config = tiny(
        data={"client_test_frac": 0.25}, client=["fedala"], evaluate={"personal": "after_init", "batch_size": 16},
        engine={"ray": {"clients_per_actor": 1}},
    )  # fmt: skip
    federation = Federation(config, tmp_path, make_engine=warm_ray)
    asked, real = [], federation.engine.call

    def call(one):
        asked.append((one.method, one.host))
        return real(one)

    federation.engine.call = call
    federation.step()
    evaluate_personal(federation.run, 1)
    evaluate(federation.engine, federation.partition.server_test, t=0)
    federation.close()
    for method in ("personal", "evaluate"):
        assert sorted(host for name, host in asked if name == method) == [0, 1, 2]
