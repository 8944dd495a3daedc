"""Every method has a setting in which it is FedAvg (or another exact answer), and one close to it in which it is not."""

import numpy as np
import pytest
import torch
from case import Case, cases
from conftest import play, tiny

CASES = cases()


def final(case: Case, changes: dict, folder) -> torch.Tensor:
    return case.compared(play(tiny(**changes), folder))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_collapses(case: Case, tmp_path):
    expected = final(case, case.equals, tmp_path / "equals").numpy()
    exact = final(case, case.exact, tmp_path / "exact").numpy()
    near = final(case, case.near_miss, tmp_path / "near").numpy()
    # A plan's rounding may move a parameter by two units in the last place of the largest term, three times.
    scale = np.spacing(np.abs(expected).max().astype(np.float32))
    assert np.abs(exact - expected).max() <= 8 * scale
    assert np.abs(near - expected).max() > 1e4 * scale
