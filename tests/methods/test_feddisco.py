"""FedDisco."""

import math

import numpy as np
import pytest
import torch
from conftest import simulate, table, tiny
from toy import ToyCohort, noted, planned, toy_server

from raysim.api.lines import ending
from raysim.config import ConfigError
from raysim.methods.feddisco import FedDisco
from raysim.store.documents import read_result

LABELS = [[2, 2], [4, 0], [2, 6]]  # sizes 4, 4, 8


def weights(labels=LABELS, **fields) -> tuple[list[float], list[float]]:
    """λ and discrepancies."""
    cohort = ToyCohort(toy_server(labels=labels), sizes=[sum(row) for row in labels])
    planned(FedDisco(**fields), cohort)
    return noted(cohort.server, "lambda").tolist(), noted(cohort.server, "discrepancy").tolist()


def test_golden_numbers():
    lam, kl = weights(normalize_kl=False)
    assert kl == pytest.approx([0, 0.6931472, 0.1308120], abs=1e-7)
    assert lam == pytest.approx([0.3941351, 0.0038585, 0.6020064], abs=1e-7)
    lam, kl = weights()
    assert kl == pytest.approx([0, 0.8412397, 0.1587603], abs=1e-7)
    assert lam == pytest.approx([0.4020124, 0, 0.5979876], abs=1e-7)
    assert lam[1] == 0


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("l2", [0, math.sqrt(0.5), math.sqrt(0.125)]),
        ("l1", [0, 1, 0.5]),
        ("cosine", [0, 1 - math.sqrt(0.5), 1 - 1 / math.sqrt(1.25)]),
    ],
)
def test_other_metrics(metric, expected):
    lam, distance = weights(metric=metric, a=0.1)
    assert distance == pytest.approx(expected, abs=1e-12)
    plain = np.array([0.25, 0.25, 0.5]) - 0.1 * np.array(expected) + 0.1
    assert lam == pytest.approx(plain / plain.sum(), abs=1e-12)


def test_the_target_may_be_known():
    _, kl = weights(target=(0.25, 0.75), normalize_kl=False)
    expected = [0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), math.log(1 / 0.25), 0]
    assert kl == pytest.approx(expected, abs=1e-12)


def test_limits():
    assert weights(a=0, b=0)[0] == [0.25, 0.25, 0.5]
    assert weights(a=0.01, b=0)[0] != [0.25, 0.25, 0.5]
    assert weights(b=1e12)[0] == pytest.approx([1 / 3] * 3)
    assert weights([[3, 1], [1, 3], [3, 1]])[0] == pytest.approx([1 / 3] * 3)  # equal sizes, equally far from uniform
    assert weights([[2, 2], [3, 3], [1, 1]])[0] == pytest.approx(np.array([4 / 12, 6 / 12, 2 / 12]) / 1.3 + 0.1 / 1.3)


def test_where_no_weight_is_positive_p_stays():
    cohort = ToyCohort(toy_server(labels=[[4, 0], [0, 4], [8, 0]]), sizes=[4, 4, 8])
    result = planned(FedDisco(a=5, normalize_kl=False), cohort)
    assert torch.equal(result, cohort.reduce(cohort.by_size()))
    assert noted(cohort.server, "fell_back").item() == 1


def test_the_end_of_a_run_says_how_often_a_method_fell_back(tmp_path):
    for normalize_kl in (False, True):
        method = {"feddisco": {"a": 5.0, "b": 0.0, "normalize_kl": normalize_kl}}
        simulate(tiny(weighting=[method], rounds={"total": 4}), tmp_path / str(normalize_kl))
    always, sometimes = (read_result(tmp_path / name) | {"folder": tmp_path} for name in ("False", "True"))
    assert always["fell_back"] == {"feddisco": {"times": 4, "of": 4}}
    assert "\nfell back  feddisco 4 of 4 times; `raysim explain feddisco` says what it does then" in ending(always)
    share = table(tmp_path / "True", "notes")
    times = share["value"][share["name"] == "fell_back"].sum()
    assert sometimes["fell_back"] == ({"feddisco": {"times": times, "of": 4}} if times else {})
    assert ("fell back" in ending(sometimes)) == bool(times)


def test_label_counts_are_sent_once(tmp_path):
    simulate(tiny(weighting=["feddisco"], rounds={"total": 5}), tmp_path)
    traffic = table(tmp_path, "traffic")
    first = np.zeros(len(traffic["client"]), bool)
    first[np.unique(traffic["client"], return_index=True)[1]] = True
    assert (traffic["up_scalars"] == np.where(first, 4 * 4, 0)).all()
    assert not first.all()


@pytest.mark.parametrize("target", [[0.5, 0.5, 0.5], [1.0, 0.0], []])
def test_a_target_is_a_distribution_over_all_classes(target):
    with pytest.raises(ConfigError, match="positive shares"):
        tiny(weighting=[{"feddisco": {"target": target}}])
