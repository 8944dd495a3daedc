"""What a user adds from outside the package, each in one place. Most kinds are added by the script of
tests/api/test_plugins.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from clocks import ManualClock
from conftest import simulate, table, tiny

import raysim
from raysim.config import ENGINES, EngineConfig, to_dict
from raysim.engine.base import Call, Handle
from raysim.engine.local import LocalEngine
from raysim.federation import Round, RunParts, run_round
from raysim.registry import REGISTRY
from raysim.store.tables import PHASES, TABLES, add_column, add_phase


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "rounds", TABLES["rounds"])
    before = dict(PHASES)
    yield
    PHASES.clear()
    PHASES.update(before)


def test_a_phase_of_the_round_and_a_column_of_a_table(tmp_path: Path, as_before: None) -> None:
    add_phase("rest", "what our round does besides")
    add_column("rounds", "drawn_sum", "int?", "id", "sum of the ids of the clients drawn")

    def ours(run: RunParts, t: int, **options: Any) -> Round:
        done, clock = run_round(run, t, **options), run.spec.clock
        started = clock.now()
        clock.sleep(2.5)
        seconds = done.seconds | {"rest": clock.now() - started}
        return replace(done, seconds=seconds, columns={"drawn_sum": sum(done.drawn)})

    simulate(tiny(), tmp_path / "run", run_round=ours, clock=ManualClock())
    rounds, clients = table(tmp_path / "run", "rounds"), table(tmp_path / "run", "clients")
    assert rounds["seconds_rest"].tolist() == [2.5] * 3
    assert rounds["drawn_sum"].tolist() == [clients["client"][clients["round"] == t].sum() for t in range(3)]
    with pytest.raises(ValueError, match="has a column 'drawn_sum' already"):
        add_column("rounds", "drawn_sum", "int?", "id", "once more")


@dataclass
class Counting(LocalEngine):
    """An engine in this process that counts its calls."""

    calls = 0

    def call(self, call: Call) -> Handle:
        Counting.calls += 1
        return super().call(call)


def test_an_engine(tmp_path: Path) -> None:
    @REGISTRY.add("engine", "counting")
    @dataclass(frozen=True, kw_only=True)
    class CountingConfig(EngineConfig):
        """All clients in this process, with an eye on the calls."""

        state_bytes: int = 1 << 20

        def make(self, config: Any, spec: Any, data: Any, partition: Any, cohort: int) -> Counting:
            return Counting(spec, data, partition, state_bytes=self.state_bytes)

    try:
        run = raysim.run(to_dict(tiny()) | {"engine": {"counting": {"state_bytes": 1000}}}, out=tmp_path / "run")
    finally:
        del ENGINES["counting"]
    assert Counting.calls > 0
    assert run.result["sha256"] == raysim.run(tiny(), out=tmp_path / "local").result["sha256"]
