"""What `raysim explain` says, against the configuration itself."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from raysim.cli.explain import ENTRIES, explain
from raysim.config import Config, ConfigError, docs_of, fields_of, from_dict, is_section, to_dict
from raysim.methods import STEPS

GIVEN = {
    "data": {"name": {"synthetic": {}}, "partition": {"iid_equal": {"clients": 2}}},
    "model": {"name": "mlp"},
    "rounds": {"total": 1},
    "local": {"batch_size": 4, "lr": 0.1},
}


def rows(text: str) -> dict[str, str]:
    """Key → what stands behind it, continued lines included."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := re.match(r"  (\S+) +(\S.*)", line):
            key = match[1]
            found[key] = match[2]
        elif found and line.startswith(" "):
            found[key] += " " + line.strip()
    return found


CHOSEN = ("selection", "speed", "up", "down", "latency", "availability")  # entries of catalogues that have a default


def sections(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if path:
        yield path, values
    for key, value in values.items():
        if isinstance(value, dict) and (not path or key == "proxy") and key != "engine":
            yield from sections(value, f"{path}.{key}".lstrip("."))


@pytest.mark.parametrize(("path", "values"), [pytest.param(*s, id=s[0]) for s in sections(to_dict(from_dict(GIVEN)))])
def test_sections_have_all_settings_and_their_defaults(path: str, values: dict[str, Any]) -> None:
    said = rows(explain(path).partition("\n\n")[0])
    assert said.keys() == values.keys()
    given = GIVEN.get(path, {})
    for key, value in values.items():
        if key in CHOSEN:
            [(name, _)] = value.items()
            assert said[key].startswith(f"{name}  ")
        elif isinstance(value, dict) and value and key not in given:
            assert said[key] == f"section `{path}.{key}`"
        elif key in given or (path, key) == ("data.proxy", "samples"):
            assert said[key].startswith("required  ")
        else:
            assert yaml.safe_load(said[key].partition("  ")[0]) == value
    assert explain(path).splitlines()[0] in explain().splitlines()


@pytest.mark.parametrize("kind", ENTRIES)
def test_entries_have_all_their_options(kind: str) -> None:
    for name, cls in ENTRIES[kind].items():
        [said] = [part for part in explain(name).split("\n\n") if part.startswith(f"{name} ({kind})\n")]
        options = {field.name.rstrip("_") for field in dataclasses.fields(cls) if field.init}
        assert options <= rows(said).keys(), name
        assert " ".join(cls.__doc__.split("\n\n")[0].split()) in " ".join(said.split()), name


def test_what_the_source_says_stands_behind_the_options() -> None:
    assert (
        rows(explain("fedlws.per"))["per"].split(" — ")[1]
        == "`layer`: a γ for each layer; `model`: one γ from the norms of the whole model (the paper's Eq. 7)."
    )
    assert "— Factor on the learning rate after every round." in " ".join(explain("local.lr_decay").split())
    assert explain("server.0.fedlws.per") == explain("fedlws.per")  # as a fault names it
    assert explain("engine.ray") == explain("ray")
    assert explain("engine.local").startswith("local (engine)\n")  # and not the section of that name
    assert explain("data.partition.dirichlet_counts.alpha") == explain("dirichlet_counts.alpha")
    assert explain("proxy") == explain("data.proxy")
    assert "so that the set is smaller." in explain("long_tail")
    lines = explain("top_n").splitlines()
    assert lines[0] == "fedldf.top_n (option of this weighting)"


@pytest.mark.parametrize("kind", [kind for kind in ENTRIES if kind not in ("data set", "partition", "sink")])
def test_every_option_has_a_docstring(kind: str) -> None:
    for name, cls in ENTRIES[kind].items():
        assert not {field.name for field in dataclasses.fields(cls) if field.init} - docs_of(cls).keys(), name


def test_every_setting_has_a_docstring() -> None:
    for section in dataclasses.fields(Config):
        cls = fields_of(Config)[section.name][1]
        if is_section(cls):
            assert not {field.name for field in dataclasses.fields(cls)} - docs_of(cls).keys(), section.name


def test_models_and_presets() -> None:
    assert rows(explain("mlp")).keys() >= {"hidden"}
    assert explain("resnet50").startswith("resnet50 (model)\nA classification model of torchvision")
    assert rows(explain("official_000"))["fedlws.tau_clamp"] == "[0.01, 0.2]"


def test_a_method_without_source_has_its_options_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataclasses.make_dataclass("Halve", [("by", float, 0.5)], frozen=True)
    monkeypatch.setitem(STEPS, "halve", made)
    assert rows(explain("halve"))["by"] == "0.5  a number"


def test_an_unknown_name_is_met_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'fedlsw'\. Did you mean 'fedlws'"):
        explain("fedlsw")
    with pytest.raises(ConfigError, match=r"Did you mean 'local\.momentum'"):
        explain("local.momentun")
