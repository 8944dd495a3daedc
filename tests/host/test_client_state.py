"""What a client keeps between rounds: names at the boundary, and methods that are called like the simulator's entries."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from conftest import simulate, table, tiny
from torch import Tensor

from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.methods import CLIENTS

# A previous model, personal layers, the clients' own running statistics, and an optimiser that goes on.
EVERYTHING: dict[str, Any] = {
    "client": ["moon", "fedrep"], "model": {"bn_stats": "local"}, "local": {"state": "persist"},
    "rounds": {"total": 4, "participation": 0.5},
}  # fmt: skip


@dataclass
class Rounds:
    momentum: Tensor  # as the simulator calls an optimiser's array


class CountsRounds(ClientMethod):
    """Counts the rounds a client has taken part in."""

    def new_state(self, layers: Any) -> Rounds:
        return Rounds(torch.zeros(1))

    def finish(self, run: LocalRun, upload: Upload) -> None:
        run.state(self).momentum.add_(1)


@pytest.mark.parametrize("name", ["Previous", "Personal", "Buffers", "Optimizer", "Counts"])
def test_a_method_may_be_called_like_what_the_simulator_keeps(name, tmp_path, monkeypatch):
    method = dataclass(frozen=True)(type(name, (CountsRounds,), {"__doc__": "Counts.", "__module__": __name__}))
    monkeypatch.setitem(CLIENTS, name.lower(), method)
    plain = simulate(tiny(**EVERYTHING), tmp_path / "plain")
    federation = simulate(tiny(**EVERYTHING | {"client": [*EVERYTHING["client"], name.lower()]}), tmp_path / "counted")
    assert set(table(tmp_path / "counted", "clients")["status"]) == {"ok"}
    assert torch.equal(federation.server.value, plain.server.value)
    rounds = Counter(table(tmp_path / "counted", "clients")["client"].tolist())
    assert max(rounds.values()) > 1
    for client, taken in rounds.items():
        mine, theirs = (engine.value_of(engine.client_states[client]) for engine in (federation.engine, plain.engine))
        assert set(theirs) == {"previous", "personal", "buffers", "optimizer.momentum"}
        for entry, array in theirs.items():
            assert np.array_equal(mine[entry], array), entry
        (own,) = set(mine) - set(theirs)
        assert own == ("counts.momentum" if name == "Counts" else f"{name.lower()}~.momentum")
        assert mine[own].tolist() == [taken]
