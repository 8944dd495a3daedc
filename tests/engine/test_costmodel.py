"""The work that benchmarks/costmodel.py counts is the work that is done, and prices are found again."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import simulate, table, tiny

from raysim.core import tree
from raysim.engine.merging import schedule

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import costmodel
from costmodel import PRICES, Setting


@pytest.mark.parametrize("fan_in", [2, 3])
def test_sums_are_handed_on_as_counted(fan_in, tmp_path, warm_ray):
    """An actor for each of four clients: what their processes serialise is the sums of every level, and the whole."""
    engine = {"ray": {"clients_per_actor": 1, "fan_in": fan_in}}
    config = tiny(rounds={"total": 2, "participation": 0.5}, engine=engine)
    federation = simulate(config, tmp_path, make_engine=warm_ray)
    floats = federation.server.layers.S
    merging = costmodel.merging(Setting(4, 4, floats, fan_in=fan_in, cores=1))
    assert table(tmp_path, "traffic")["transport_up"].sum() == 2 * 4 * floats * (merging.sums + 1)


@pytest.mark.parametrize("hosts", [3, 7, 8])
@pytest.mark.parametrize("cohort", [8, 29, 64])
def test_sums_of_many_clients(hosts, cohort):
    setting = Setting(hosts, cohort, 1, fan_in=3, nodes=2, cores=1)
    runs = setting.runs
    assert [p for run in runs for p in range(*run)] == [*range(cohort)]
    one = tree.Partial(torch.ones(1), (True,))
    held = [dict.fromkeys(tree.cover({*range(*run)}, cohort), one) for run in runs]
    handed = crossing = 0
    nodes = [i * 2 // len(runs) for i in range(len(runs))]
    for groups in schedule(range(len(runs)), [str(n) for n in nodes], 3):
        for root, *others in groups:
            handed += sum(len(held[i]) for i in others)
            crossing += sum(len(held[i]) for i in others if nodes[i] != nodes[root])
            held[root] = tree.merge({n: p for i in (root, *others) for n, p in held[i].items()}, cohort, [1])
    assert list(held[0]) == [(0, cohort)]
    merging = costmodel.merging(setting)
    assert (merging.sums, merging.crossing) == (handed, crossing)  # one link lies between two machines


def test_prices_are_found_again():
    prices = {name: 0.01 * (1 + i) for i, name in enumerate(PRICES)} | {"waiting": 1.0, "wire": 0.0}
    settings = [
        Setting(hosts, hosts * clients, floats, waits=waits, samples=clients, fan_in=fan_in, nodes=nodes, cores=2, link=9.0)
        for hosts in (2, 4, 9) for clients in (1, 3) for floats in (1, 5) for fan_in in (2, 4) for nodes in (1, 2)
        for waits in (0.0, 10.0)
    ]  # fmt: skip
    spent = [{phase: sum(paid.values()) for phase, paid in costmodel.paid_for(s, prices).items()} for s in settings]
    found = costmodel.fit(settings, spent, {"waiting": 1.0, "plan": prices["plan"]})
    assert found == pytest.approx(prices, rel=1e-3, abs=1e-5)
    assert costmodel.seconds(settings[0], found) == pytest.approx(sum(spent[0].values()), rel=1e-4)
