"""What holds for every method, shown by its case. All properties look at one local run, which is traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from case import Case, Traced, cases
from conftest import simulate, tiny
from test_engines import outcome
from test_hashes import known

from raysim.federation import Federation, MakeEngine

CASES = cases()
TRACED = {"record": {"traces": "rounds"}}
SEEDS = {"feddyn": 4}  # With 3, an activation is within rounding of 0: on which side depends on the type of CPU.


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_case(
    case: Case, subtests: pytest.Subtests, ran: Callable[..., Federation], warm_ray: MakeEngine, tmp_path: Path
) -> None:
    whole = simulate(tiny(**case.changes, **TRACED), tmp_path / "local")
    with subtests.test("the third round is recomputed"):
        recomputed(case, whole, tmp_path / "seeded")
    with subtests.test("its bits are known"):
        assert whole.sha256() == known(case.method)
    with subtests.test("Ray's bits are those of one process"):
        on_ray = tiny(**case.changes, engine={"ray": {"clients_per_actor": -(-whole.cohort_size // 2)}})
        assert outcome(simulate(on_ray, tmp_path / "ray", make_engine=warm_ray)) == outcome(whole)
    with subtests.test("a resumed run ends with the bits of one that was not interrupted"):
        resumed(case, whole, tmp_path / "parts")
    with subtests.test("it collapses"):
        collapses(case, ran)


def recomputed(case: Case, whole: Federation, folder: Path) -> None:
    """The third round again, in float64 from the traced files."""
    assert case.recompute is not None
    federation = (
        simulate(tiny(seed=SEEDS[case.method], **case.changes, **TRACED), folder) if case.method in SEEDS else whole
    )
    round_ = Traced(federation.folder, 2, federation)
    assert len(round_.clients) == federation.cohort_size
    expected = case.recompute(round_)
    assert expected.keys() == round_.after.keys()
    for name, tensor in expected.items():
        error = np.abs(tensor - round_.after[name]).max()
        assert error <= case.tolerance * max(1.0, np.abs(tensor).max()), name


def resumed(case: Case, whole: Federation, folder: Path) -> None:
    """From the checkpoint after two rounds: the process that comes back knows nothing else."""
    config = tiny(**{**case.changes, "rounds": {**case.changes.get("rounds", {}), "checkpoint_every": 1}})
    begun = Federation(config, folder)
    begun.step()
    begun.step()
    begun.close()
    assert begun.sha256() != whole.sha256()
    assert simulate(config, folder, resume=True).sha256() == whole.sha256()


def collapses(case: Case, ran: Callable[..., Federation]) -> None:
    """There is a setting in which the method is FedAvg (or another exact answer), and one close to it in which it is not."""
    settings = case.equals, case.exact, case.near_miss
    expected, exact, near = (case.compared(ran(**changes)).numpy() for changes in settings)
    # A plan's rounding may move a parameter by two units in the last place of the largest term, three times.
    scale = np.spacing(np.abs(expected).max().astype(np.float32))
    assert np.abs(exact - expected).max() <= 8 * scale
    assert np.abs(near - expected).max() > 1e4 * scale
