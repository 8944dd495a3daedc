"""Names: raysim's own, a script's, and those of installed packages."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from raysim import registry
from raysim.core.client import ClientMethod
from raysim.core.server import ServerStep
from raysim.registry import KINDS, NameTaken, Registry, name_in


@dataclass(frozen=True)
class SignSGD(ClientMethod):
    """A client method of somebody else's."""


@dataclass(frozen=True)
class Halve(ServerStep):
    """A server step of somebody else's."""


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Entry points of installed packages; tests fill the list."""
    found: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: [point for point in found if point.group == group])
    return found


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, plugins: list[EntryPoint]) -> Registry:
    """A registry without raysim's own entries."""
    monkeypatch.setattr(registry, "KINDS", {kind: registry.Kind(None, KINDS[kind].group) for kind in KINDS})
    return Registry()


def test_own_code_registers_classes(names: Registry) -> None:
    assert names.add("client")(SignSGD) is SignSGD
    names.register("server", "half", Halve)
    assert dict(names.table("client")) == {"signsgd": SignSGD}
    assert name_in(names.table("server"), Halve()) == "half"
    assert "half" not in names.table("client")
    with pytest.raises(ValueError, match="there is no kind 'clients'; there are client, weighting,"):
        names.register("clients", "signsgd", SignSGD)


def test_a_name_has_one_owner(names: Registry) -> None:
    names.register("client", "mine", SignSGD)
    names.register("client", "mine", SignSGD)  # a notebook cell that is run again
    with pytest.raises(NameTaken, match=r"client 'mine' of \S+Halve has the name of that of \S+SignSGD"):
        names.register("client", "mine", Halve)


def test_a_method_is_registered_under_its_role(names: Registry) -> None:
    with pytest.raises(
        TypeError, match=r"SignSGD has the role 'client'\. Register it under 'client', not under 'server'"
    ):
        names.add("server")(SignSGD)
    assert not names.table("server")


def test_installed_packages_register_by_entry_points(names: Registry, plugins: list[EntryPoint]) -> None:
    plugins += [
        EntryPoint("signsgd", f"{__name__}:SignSGD", "raysim.methods"),
        EntryPoint("halve", f"{__name__}:Halve", "raysim.methods"),
    ]
    assert dict(names.table("server")) == {"halve": Halve}  # a method says itself on which side it stands
    assert names.table("client")["signsgd"] is SignSGD


@pytest.mark.parametrize("value", ["nowhere:Method", f"{__name__}:Missing", "pathlib:Path"])
def test_a_broken_plugin_costs_a_warning(names: Registry, plugins: list[EntryPoint], value: str) -> None:
    plugins += [EntryPoint("bad", value, "raysim.methods"), EntryPoint("halve", f"{__name__}:Halve", "raysim.methods")]
    with pytest.warns(UserWarning, match=rf"the plugin bad = {value} of an installed package is left out"):
        assert set(names.table("server")) == {"halve"}


def test_a_plugin_does_not_take_a_name_that_is_there(names: Registry, plugins: list[EntryPoint]) -> None:
    names.register("client", "signsgd", SignSGD)
    plugins.append(EntryPoint("signsgd", f"{__name__}:OtherSGD", "raysim.methods"))
    setattr(sys.modules[__name__], "OtherSGD", type("OtherSGD", (SignSGD,), {}))  # noqa: B010
    with pytest.warns(UserWarning, match="has the name of that of"):
        entries = dict(names.table("client"))
    assert entries == {"signsgd": SignSGD}


def test_nothing_is_imported_before_a_name_is_looked_up() -> None:
    code = (
        "import sys, raysim.registry as r; heavy = {'torch', 'ray', 'numpy'} & set(sys.modules);"
        "print(sorted(heavy), 'fedala' in r.REGISTRY.table('client'), 'iid_equal' in r.REGISTRY.table('partition'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[] True True\n", result.stderr


def test_the_command_line_says_what_it_can_do_without_loading_anything_heavy() -> None:
    code = (
        "import sys; from raysim.cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print('heavy:', sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.endswith("heavy: []\n"), result.stderr
