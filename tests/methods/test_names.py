"""A method has one name: what it is registered under."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import MakeEngine, simulate, table, tiny
from ray import cloudpickle
from torch import Tensor

from raysim.core.client import ClientMethod, LocalRun, Upload
from raysim.core.cohort import Cohort
from raysim.core.layers import LayerMap
from raysim.core.mixture import Mixture
from raysim.core.server import Server, ServerStep
from raysim.federation import Federation
from raysim.methods import CLIENTS, STEPS
from raysim.methods.server_ft import ServerFT
from raysim.registry import REGISTRY


@dataclass
class Count:
    rounds: int = 0


@dataclass(frozen=True)
class Counts(ClientMethod):
    """Counts a client's rounds, some at a time."""

    by: int = 1

    def new_state(self, layers: LayerMap) -> Count:
        return Count()

    def finish(self, run: LocalRun, upload: Upload) -> None:
        run.state(self).rounds += self.by
        run.note(self, "count", torch.tensor(float(run.state(self).rounds)))


@dataclass(frozen=True)
class COUNTS(Counts):
    """The same under a name that differs in case alone."""


@dataclass(frozen=True)
class Tally(ServerStep):
    """Counts the server's rounds, some at a time."""

    by: int = 1

    def apply(self, target: Tensor, mixture: Mixture, cohort: Cohort, server: Server) -> Tensor:
        server.memory[self] = server.memory.get(self, 0) + self.by
        server.note(self, "tally", torch.tensor(float(server.memory[self])))
        return target


@dataclass(frozen=True)
class TALLY(Tally):
    """The same under a name that differs in case alone."""


@pytest.fixture
def named() -> Iterator[None]:
    added = {"client": {"one": Counts, "ten": COUNTS}, "server": {"first": Tally, "second": TALLY}}
    for kind, entries in added.items():
        for name, entry in entries.items():
            REGISTRY.register(kind, name, entry)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    for kind, entries in added.items():
        for name in entries:
            del REGISTRY.table(kind)[name]


def test_names_are_those_of_configurations(named: None) -> None:
    assert {entry().name for entry in (Counts, COUNTS)} == {"one", "ten"}
    for name in ("server_ft", "step_size", "fedavgm"):
        assert STEPS[name]().name == name
    assert CLIENTS["feddyn"]().server_steps()[0].name == "feddyn"  # they share what the server remembers
    copy = pickle.loads(pickle.dumps(Tally(3)))
    del REGISTRY.table("server")["first"]
    try:
        assert (copy.name, copy, Tally(3).name) == (
            "first",
            Tally(3),
            "tally",
        )  # in a process that does not know the name
    finally:
        REGISTRY.register("server", "first", Tally)


def test_classes_whose_names_differ_in_case_alone(named: None, tmp_path: Path, warm_ray: MakeEngine) -> None:
    changes = {"client": ["one", {"ten": {"by": 10}}], "server": ["first", {"second": {"by": 10}}]}
    local = simulate(tiny(**changes, engine="local"), tmp_path / "local")
    notes = table(tmp_path / "local", "notes")
    values = {
        (method, name): sorted(notes["value"][(notes["method"] == method) & (notes["name"] == name)].tolist())
        for method, name in set(zip(notes["method"], notes["name"], strict=True))
    }
    assert values["first", "tally"] == [1, 2, 3]
    assert values["second", "tally"] == [10, 20, 30]
    assert values["ten", "count"] == [10 * count for count in values["one", "count"]]
    assert len(values["one", "count"]) == 9
    config = tiny(**changes, engine={"ray": {"clients_per_actor": 2}})
    assert simulate(config, tmp_path / "ray", make_engine=warm_ray).sha256() == local.sha256()


def test_a_field_called_name_is_refused() -> None:
    @dataclass(frozen=True)
    class Titled(ServerStep):
        name: str = "x"  # type: ignore[misc]

    with pytest.raises(
        ValueError, match="Titled has a field `name`, but that is what it is registered under, here 'titled'"
    ):
        REGISTRY.add("server")(Titled)


def test_what_the_server_remembered_under_the_name_of_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(
        server=[{"server_ft": {"server_ft_official": True, "batch_size": 8}}],
        data={"proxy": {"samples": 16}}, rounds={"total": 4, "checkpoint_every": 2},
    )  # fmt: skip
    whole = simulate(config, tmp_path / "whole").sha256()
    monkeypatch.setattr(ServerFT, "name", "serverft")
    before = Federation(config, tmp_path / "run")
    assert [before.step() is not None for _ in range(2)] == [True, True]
    before.close()
    monkeypatch.undo()
    assert "name" not in vars(ServerFT)
    assert simulate(config, tmp_path / "run", resume=True).sha256() == whole
