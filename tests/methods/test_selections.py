"""Who takes part in a round."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from case import Traced, fedavg
from conftest import table
from torch import nn
from toy import toy_server

from raysim.core.layers import LayerMap
from raysim.core.selection import Selection
from raysim.core.server import RoundScratch
from raysim.methods import SELECTIONS
from raysim.methods.by_size import BySize
from raysim.methods.poisson import Poisson
from raysim.methods.round_robin import RoundRobin


class Unasked:
    """Clients that are there, take no time, and are not asked."""

    def __init__(self, clients: int):
        self.here = np.arange(clients)

    def seconds(self, clients: Sequence[int]) -> np.ndarray:
        return np.zeros(len(clients))

    def losses(self, clients: Sequence[int], batch: bool = False) -> np.ndarray:
        raise AssertionError


def cohorts(selection: Selection, sizes: list[int], participation: float, rounds: int) -> list[Any]:
    server = toy_server(LayerMap.of(nn.Linear(1, 1, bias=False)), [0.0], labels=[[n] for n in sizes])
    made = []
    for t in range(rounds):
        server.scratch = RoundScratch(t)
        made.append(selection.select(server, participation, Unasked(len(sizes))))
    return made


def test_round_robin() -> None:
    """Each pass has all ten clients once, four a round and the last two; its order is new."""
    made = [asked.clients for asked in cohorts(RoundRobin(), [5] * 10, 0.4, 30)]
    for turn in range(10):
        ones = made[3 * turn : 3 * turn + 3]
        assert sorted(sum(ones, ())) == [*range(10)]
        assert [len(clients) for clients in ones] == [4, 4, 2]
    assert len(set(made[::3])) > 5


def test_poisson() -> None:
    """Each client with probability 0.3, on its own, given that there is one: within four standard deviations of it."""
    made = [asked.clients for asked in cohorts(Poisson(), [5] * 10, 0.3, 2000)]
    counts = Counter(sum(made, ()))
    p = 0.3 / (1 - 0.7**10)
    spread = 4 * (2000 * p * (1 - p)) ** 0.5
    assert all(abs(counts[client] - 2000 * p) < spread for client in range(10))
    sizes = Counter(map(len, made))
    assert sizes[0] == 0
    one = 10 * 0.3 * 0.7**9 / (1 - 0.7**10)
    assert abs(sizes[1] - 2000 * one) < 4 * (2000 * one * (1 - one)) ** 0.5


def test_by_size() -> None:
    """The number of draws follows the samples; none without any is drawn."""
    sizes = [10, 20, 0, 70]
    made = cohorts(BySize(), sizes, 0.5, 4000)
    assert all(sum(asked.times) == 2 for asked in made)
    drawn = sum((Counter(dict(zip(asked.clients, asked.times, strict=True))) for asked in made), Counter())
    for client, size in enumerate(sizes):
        p = size / 100
        assert abs(drawn[client] - 8000 * p) <= 4 * (8000 * p * (1 - p)) ** 0.5


def test_drawn_twice_counts_twice(ran: Any) -> None:
    run = ran(rounds={"selection": "by_size", "participation": 1.0}, record={"traces": "rounds"})
    seen = 0
    for t in range(3):
        server = toy_server(
            run.server.layers, np.zeros(run.server.layers.S), labels=[[n] for n in run.partition.sizes.tolist()]
        )
        server.seed, server.scratch = run.server.seed, RoundScratch(t)
        times = np.array(BySize().select(server, 1.0, Unasked(len(run.partition.sizes))).times)
        round_ = Traced(run.folder, t, run)
        assert len(times) == len(round_.clients) < 8
        for name, tensor in fedavg(round_, times / times.sum()).items():
            np.testing.assert_allclose(round_.after[name], tensor, atol=2e-6)
        seen += int((times > 1).sum())
    assert seen


@pytest.mark.parametrize("name", [*SELECTIONS])
def test_same_clients_on_any_engine(name: str, tmp_path: Any, warm_ray: Any) -> None:
    from conftest import simulate, tiny

    changes = {"rounds": {"participation": 0.5, "selection": name}, "clock": {"latency": 1, "speed": 20}}
    if name == "fedbuff":
        changes["rounds"]["selection"] = {"fedbuff": 3}
    local = simulate(tiny(**changes), tmp_path / "local")
    ray = simulate(tiny(**changes, engine={"ray": {"clients_per_actor": 2}}), tmp_path / "ray", make_engine=warm_ray)
    assert ray.sha256() == local.sha256()
    assert (
        table(tmp_path / "ray", "clients")["client"].tolist() == table(tmp_path / "local", "clients")["client"].tolist()
    )
