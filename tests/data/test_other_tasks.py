"""Data sets of other tasks than classification: what they hold, and what is wrong with them."""

import numpy as np
import pytest
from conftest import tiny

from raysim.core.task import TASKS
from raysim.data import DataError, Dataset
from raysim.data.sources import Characters, Diabetes, Multilabel, Npz
from raysim.errors import ConfigError


def test_characters_are_windows_and_what_follows(tmp_path):
    """Paragraphs are clients; of eleven characters a length of 3 makes three windows, the third one for the test."""
    (tmp_path / "text.txt").write_text("abcabcabcab\n\n\nxy\n\nccccbbb\n", encoding="utf-8")
    data = Characters("text.txt", length=3, test_every=3).load(tmp_path)
    assert "".join(data.classes) == "\nabcxy"
    shown = ["".join(data.classes[i] for i in row) for row in np.concatenate([data.x, data.y], axis=1)]
    assert shown == ["abcbca", "abcbca", "cccccc", "cbbbbb", "abcbca"]
    assert data.client.tolist() == [0, 0, 1, 1, 0]
    assert data.train_rows == 4
    assert data.vocab == data.outputs == 6
    assert not data.has_classes


def test_sonnets():
    data = Characters().load(None)
    assert np.array_equal(data.x[:, 1:], data.y[:, :-1])
    assert np.unique(data.client).tolist() == list(range(16))
    first = "".join(data.classes[i] for i in data.x[0])
    assert first == "Shall I compare thee to a summer's day?\n"


@pytest.mark.parametrize(
    ("text", "sentence"), [("short\n\ntexts", "no paragraph has more than 40 characters"), (b"\xff", "UTF-8")]
)
def test_texts_that_cannot_be_used(text, sentence, tmp_path):
    (tmp_path / "text.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=sentence):
        Characters("text.txt").load(tmp_path)
    assert "is missing" in Characters("other.txt").check(tmp_path)
    with pytest.raises(ConfigError, match=r"characters\.length: must be a whole number > 0"):
        tiny(data={"name": {"characters": {"length": 0}}})


def test_diabetes_is_in_standard_deviations_of_the_training_rows():
    from sklearn.datasets import load_diabetes

    data = Diabetes().load(None)
    columns = np.column_stack([data.x, data.y])[: data.train_rows].astype(np.float64)
    np.testing.assert_allclose(columns.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(columns.std(0), 1, atol=1e-6)
    raw = load_diabetes(scaled=False)
    is_test = np.arange(442) % 5 == 4
    y = np.concatenate([raw.target[~is_test], raw.target[is_test]])
    assert np.corrcoef(y, data.y[:, 0])[0, 1] == pytest.approx(1)
    assert data.train_rows == 354


def test_multilabel_samples_are_sums_of_prototypes():
    """Without noise the labels explain the samples, and nothing else does."""
    data = Multilabel(300, 50, noise=0).load(None)
    _, residual, rank, _ = np.linalg.lstsq(data.y, data.x, rcond=None)
    assert rank == 8
    assert residual.max() < 1e-6
    assert data.y.mean() == pytest.approx(0.3, abs=0.03)
    with pytest.raises(ConfigError, match=r"multilabel\.share: must be a number > 0 and < 1"):
        tiny(data={"name": {"multilabel": {"share": 1}}})


@pytest.mark.parametrize(
    ("y", "task"),
    [
        (np.array([0.5, -1.0, 2.0]), "regression"),
        (np.array([[5, 1], [2, 3], [4, 5]]), "regression"),
        (np.array([[0, 1], [1, 1], [0, 0]], np.uint8), "multilabel"),
        (np.array([[False, True], [True, True], [False, False]]), "multilabel"),
    ],
)
def test_an_archive_holds_targets_or_labels(y, task, tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.ones((2, 4)), y_train=y[:2], x_test=np.ones((1, 4)), y_test=y[2:])
    data = Npz("a.npz", task).load(tmp_path)
    assert (data.task, data.y.dtype, data.train_rows) == (task, np.float32, 2)
    assert np.array_equal(data.y, y.reshape(3, -1))
    assert TASKS[task].check(data.y, data.outputs) is None
    with pytest.raises(DataError, match=f"{task} has as many outputs as y has columns; leave `classes` out"):
        Npz("a.npz", task, classes=2).load(tmp_path)


@pytest.mark.parametrize(
    ("task", "train", "test", "sentence"),
    [
        ("multilabel", np.array([[0, 2]]), np.array([[0, 1]]), r"y_train is int64 \(1, 2\); multilabel needs 0 and 1 "),
        ("multilabel", np.array([1]), np.array([1]), r"y_train is int64 \(1,\); multilabel needs"),
        ("multilabel", np.array([[0, 1]]), np.array([[0, 1, 1]]), r"y_test is .* n = 1, in the columns of y_train"),
        (
            "regression",
            np.array([0.5]),
            np.array(["a"]),
            r"y_test is <U1 \(1,\); regression needs numbers \[n\] or \[n, F",
        ),
        ("regression", np.ones((1, 2, 2)), np.ones((1, 2, 2)), r"y_train is float64 \(1, 2, 2\); regression"),
        ("regression", np.array([0.5]), None, "holds no y_test"),
        ("regression", np.array([np.inf]), np.array([0.5]), "y_train row 0 holds NaN, infinity or a number beyond"),
        ("classification", np.array([0.5]), np.array([0.5]), r"one a row; for labels or targets set `task`"),
    ],
)
def test_archives_with_wrong_targets_or_labels(task, train, test, sentence, tmp_path):
    arrays = {"x_train": np.ones((1, 4)), "y_train": train, "x_test": np.ones((1, 4))}
    np.savez(tmp_path / "a.npz", **arrays, **({} if test is None else {"y_test": test}))
    with pytest.raises(DataError, match=sentence):
        Npz("a.npz", task).load(tmp_path)


def test_targets_must_be_finite():
    x, y = np.ones((3, 2), np.float32), np.array([[0.0], [np.nan], [1.0]], np.float32)
    with pytest.raises(DataError, match=r"row 1 has label nan, outside finite numbers"):
        Dataset("d", x, y, 2, ("a",), task="regression")
    with pytest.raises(DataError, match=r"row 1 has label 7, outside 0\.\.3"):
        Dataset("d", x, np.array([[0, 1], [2, 7], [0, 0]]), 2, tuple("abcd"), task="next_token")
