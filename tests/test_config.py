"""Configurations: every fault at once, nothing converted silently, and the resolved file means the same run."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysim import config as configuration
from raysim.config import (
    PRESETS,
    STACKS,
    Config,
    ConfigError,
    DataConfig,
    LocalConfig,
    ModelConfig,
    RoundsConfig,
    check,
    fingerprint,
    from_dict,
    load,
    to_dict,
    to_yaml,
)
from raysim.core.client import ClientMethod
from raysim.core.facts import RunFacts
from raysim.core.method import Needs
from raysim.core.server import DownlinkRule, ServerStep, Weighting
from raysim.data.partition import IIDEqual
from raysim.data.sources import Digits

CONFIGS = Path(__file__).parent.parent / "configs"

PLAIN = """
data: {name: digits, partition: {dirichlet_counts: {alpha: 0.3, clients: 100}}}
model: {name: small_cnn}
rounds: {total: 20, participation: 0.1}
local: {batch_size: 8, lr: 0.1}
engine: local
"""


@dataclass(frozen=True)
class Starter(ClientMethod):
    """Owns the hook start."""

    eta: float = 1.0

    def start(self, run: Any) -> None: ...


@dataclass(frozen=True)
class OtherStarter(Starter):
    """Owns it as well."""

    def start(self, run: Any) -> None: ...


@dataclass(frozen=True)
class Learner(Weighting):
    """Learns weights on proxy data."""

    epochs: int
    stage: ClassVar[str] = "rescale"
    needs: ClassVar[Needs] = Needs(proxy=True)

    def check(self, facts: RunFacts) -> str | None:
        return "must run as long as the federation." if self.epochs < facts.rounds else None


@dataclass(frozen=True)
class OtherLearner(Learner):
    """Another."""


@dataclass(frozen=True)
class Shrink(ServerStep):
    """A step with every kind of field."""

    beta: float = 0.1
    clamp: tuple[float, float] | None = None


@pytest.fixture(autouse=True)
def toy_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods of our own, so that the catalogue may grow without touching these tests."""
    for stack, name, cls in (
        ("client", "starter", Starter),
        ("client", "other_starter", OtherStarter),
        ("weighting", "learner", Learner),
        ("weighting", "other_learner", OtherLearner),
        ("server", "shrink", Shrink),
    ):
        monkeypatch.setitem(STACKS[stack].entries, name, cls)  # type: ignore[index]
    monkeypatch.delenv("RAYSIM_DATA", raising=False)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def plain(**changes: Any) -> dict[str, Any]:
    """PLAIN with sections extended: plain(local={"lr": 1})."""
    raw = yaml.safe_load(PLAIN)
    for key, value in changes.items():
        raw[key] = {**raw[key], **value} if isinstance(value, dict) and key in raw and key != "engine" else value
    return raw


def faults_of(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_dict(raw, "run.yaml")
    assert all(line.startswith("run.yaml: ") for line in caught.value.faults)
    return [line.removeprefix("run.yaml: ") for line in caught.value.faults]


def test_all_faults_are_reported_at_once_each_with_path_value_and_nearest_word(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        preset: papr
        data: {name: digts, partition: {dirichlet_counts: {alpha: 0.3, clents: 100}}}
        model: {name: smal_cnn}
        rounds: {total: "10"}
        local: {batch_size: 8.5, lr: fast, optimizer: SGDD, betas: [0.9]}
        client: [starter, other_starter, shrink]
        weighting: [{learner: 30}]
        server:
        - {shrink: {betaa: 0.2}}
        - {shrink: , beta: 0.1}
        evaluate: {personal: after}
        engine: {ray: {fan_in: 1}}
        recrd: {}
        """,
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    expected = {
        "preset": "'papr'. Did you mean 'paper'?",
        "recrd": "unknown field (set to {}). Did you mean 'record'?",
        "data.name": "no data set 'digts'. Did you mean 'digits'?",
        "data.partition.dirichlet_counts.clents": "unknown field (set to 100). Did you mean 'clients'? It takes alpha,",
        "rounds.total": "must be a whole number > 0, but is '10' (text).",
        "local.batch_size": "must be a whole number > 0, but is 8.5.",
        "local.lr": "must be a number > 0, but is 'fast'.",
        "local.optimizer": "must be sgd, adam or adamw, but is 'SGDD'. Did you mean 'sgd'?",
        "local.betas": "a list [a number >= 0 and < 1, a number >= 0 and < 1], but is [0.9].",
        "client.2": "no client method 'shrink'. It belongs under 'server'.",
        "server.0.shrink.betaa": "unknown field (set to 0.2). Did you mean 'beta'? It takes beta, clamp.",
        "server.1": "Fields go one level deeper: server.1.shrink.beta=0.1.",
        "evaluate.personal": "must be after_init, before_train, after_train or null, but is 'after'. Did you mean 'after",
        "engine.ray.fan_in": "must be a whole number >= 2, but is 1.",
    }
    found = dict(line.removeprefix(f"{path}: ").split(": ", 1) for line in caught.value.faults)
    assert found.keys() == expected.keys()
    assert not [(path, found[path]) for path, part in expected.items() if part not in found[path]]


def test_faults_of_several_settings_are_reported_at_once_when_each_can_be_read():
    changes = {"model": {"name": "smal_cnn"}, "client": ["starter", "other_starter"], "weighting": [{"learner": 30}]}
    assert faults_of(plain(**changes)) == [
        "model.name: there is no model 'smal_cnn'. Did you mean 'small_cnn'? `raysim list models` shows all.",
        "client: 'starter' and 'other_starter' both own the hook 'start'; a stack can have one.",
        "weighting.0: learner learns on proxy data, but data.proxy.samples is 0.",
    ]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"rounds": {"participation": 10}},
            "rounds.participation: 10 asks for a cohort of 1000 clients of the federatio",
        ),
        ({"local": {"lr": True}}, "local.lr: must be a number > 0, but is true."),
        ({"local": {"lr": "0.1"}}, "local.lr: must be a number > 0, but is '0.1' (text)."),
        ({"local": {"lr": float("nan")}}, "local.lr: must be a number > 0, but is .nan."),
        ({"local": {"epochs": 1.0}}, "local.epochs: must be a whole number > 0, but is 1.0."),
        ({"client": [{"ditto": {"epochs": -1}}]}, "client.0.ditto.epochs: must be a whole number >= 0, but is -1."),
        ({"client": [{"pfedme": {"beta": -1.0}}]}, "client.0.pfedme.beta: must be a number >= 0, but is -1.0."),
        (
            {"client": [{"partialfed": {"tau_decay": 0.0}}]},
            "client.0.partialfed.tau_decay: must be a number > 0, but is 0.0.",
        ),
        ({"local": {"epochs": "1e1"}}, "local.epochs: must be a whole number > 0, but is '1e1'."),
        ({"local": {"drop_last": 1}}, "local.drop_last: must be true or false, but is 1."),
        ({"local": {"momentum": 0.9, "optimizer": "adam"}}, "local.momentum: 0.9 belongs to sgd; adam has betas."),
        ({"local": {"momentum": 0.9, "optimizer": "adamw"}}, "local.momentum: 0.9 belongs to sgd; adamw has betas."),
        ({"local": {"nesterov": True}}, "local.nesterov: needs optimizer sgd with a momentum above 0."),
        ({"local": None}, "local: must be a mapping of fields, but is null. It takes epochs,"),
        ({"name": "a/b"}, "name: must be text matching"),
        ({"server": 5}, "server: must be a list, each a server step ("),
        ({"server": "fedlwss"}, "server.0: there is no server step 'fedlwss'. Did you mean 'fedlws'?"),
        ({"lr": 0.1}, "lr: unknown field (set to 0.1). Did you mean 'local.lr'?"),
        ({"batch_size": 1}, "batch_size: unknown field (set to 1). Did you mean 'local.batch_size' or 'ev"),
        ({"server": ["shrink", {"shrink": 0.2}]}, "server: 'shrink' is listed 2 times; a stack can have it once."),
        (
            {"server": [{"shrink": {"clamp": [1]}}]},
            "server.0.shrink.clamp: must be a list [a number, a number] or null,",
        ),
        (
            {"data": {"proxy": {"samples": 9}}, "weighting": ["learner"]},
            "weighting.0.learner.epochs: is missing; it must be a whole number.",
        ),
        ({"data": {"name": {"parquet": "nowhere"}}}, "data.name: parquet: the folder nowhere is missing;"),
        ({"data": {"name": {"parquet": "x", "npz": "y"}}}, "data.name: must be the name of a data set, or {name:"),
        (
            {"data": {"partition": {"dirichlet_counts": -1}}},
            "data.partition.dirichlet_counts.alpha: must be a number > 0, but is -1",
        ),
        (
            {"data": {"client_test_frac": 0.5, "partition": "dirichlet_capped"}},
            "data.client_test_frac: is 0.5, but the par",
        ),
        ({"model": {"options": {"depth": 3}}}, "model.options.depth: unknown option."),
        ({"model": {"layer_by": "block"}}, "model.blocks: is empty,"),
        ({"model": {"layer_by": "block", "blocks": ["("]}}, "model.blocks.0: '(' is not a regular expression"),
        ({"model": {"blocks": ["a"]}}, "model.blocks: goes with layer_by: block, but layer_by is unit."),
        (
            {"model": {"bn_stats": "recalibrate"}},
            "model.bn_stats: recalibrate needs proxy data, but data.proxy.samples is 0",
        ),
        ({"model": {"init": "nowhere.safetensors"}}, "model.init: there is no file nowhere.safetensors."),
        ({"data": {"name": {"npz": {"path": "x" * 300}}}}, f"data.name: File name too long: {'x' * 200} ("),
        ({"evaluate": {"personal": "after_init"}}, "evaluate.personal: after_init needs client tests,"),
        (
            {"weighting": [{"fedldf": {"top_n:2": None}}]},
            "weighting.0.fedldf.top_n:2: unknown field (set to null). A space is mi",
        ),
        (
            {"evaluate": {"clients": 101, "personal": "after_init"}, "data": {"client_test_frac": 0.25}},
            "evaluate.clients: is 101, but there are 100. null tests all.",
        ),
        (
            {"evaluate": {"clients": 5}},
            "evaluate.clients: is how many clients evaluate.personal: after_init tests, which is not set.",
        ),
        ({"record": {"traces": [4, 21]}}, "record.traces: there is no round 21; rounds are 1 to 20."),
        ({"record": {"instruments": ["stethoscope"]}}, "record.instruments.0: there is no instrument 'stethoscope'."),
        ({"engine": "loca"}, "engine: there is no engine 'loca'. Did you mean 'local'?"),
    ],
)
def test_one_fault(changes: dict[str, Any], fault: str) -> None:
    (line,) = faults_of(plain(**changes))
    assert line.startswith(fault)


@pytest.mark.parametrize("given", [{"client": "near"}, {"upload": "near"}, {"rounds": {"selection": "near"}}])
def test_an_unknown_method_may_be_ones_own(given: dict[str, Any]) -> None:
    (fault,) = faults_of(plain(**given))
    assert "there is no" in fault
    assert fault.endswith("in the script that defines it, or from an installed package (docs/howto/method.md).")


@pytest.mark.parametrize("option", ["cuda_graphs", "fast_math"])
def test_what_changes_recorded_steps_is_refused_where_none_are(option: str) -> None:
    engine = {"ray": {option: True, "tape": "never", "batch_clients": 4}}
    why = f"leaves no recorded steps, and {option} changes only those. Leave one of them out."
    paths = ("engine.ray.tape", "engine.ray.batch_clients", "local.precision")
    assert faults_of(plain(engine=engine, local={"precision": "fp16"})) == [f"{path}: {why}" for path in paths]
    from_dict(plain(engine={"ray": {option: True}}))


@pytest.mark.parametrize("change", ["local.lr=0.1,0.2", "client=scaffold,fedprox"])
def test_several_values_of_one_run_point_to_a_list_and_to_a_sweep(change: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_dict(plain(), overrides=[change])
    value = change.partition("=")[2]
    assert str(raised.value).endswith(f" A list is written '[{value}]'; `raysim sweep` runs each of several values.")


def test_a_section_that_is_given_as_a_name() -> None:
    assert faults_of(plain(model="simple_cnnn")) == [
        "model.name: there is no model 'simple_cnnn'. Did you mean 'simple_cnn'? `raysim list models` shows all.",
    ]


def test_checks_of_methods_see_the_whole_configuration() -> None:
    proxy = {"proxy": {"samples": 10}}
    lines = faults_of(plain(data=proxy, weighting=[{"learner": 19}, {"other_learner": 20}]))
    assert lines == [
        "weighting: 'learner' and 'other_learner' both rescale the mixture; a run can have one.",
        "weighting.0.learner: must run as long as the federation.",
    ]
    assert from_dict(plain(data=proxy, weighting=[{"learner": 20}])).weighting == (Learner(20),)


@dataclass(frozen=True)
class Sender(ClientMethod):
    """Sends clients what it likes."""

    def downlink_rule(self) -> DownlinkRule:
        return DownlinkRule()


@pytest.mark.parametrize("other", ["fedfomo", "apple", "sender"])
def test_one_method_decides_what_clients_are_sent(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STACKS["client"].entries, "sender", Sender)  # type: ignore[index]
    client: list[Any] = [{"fedamp": {"init": "cloud"}}, other]
    changes = {"data": {"client_val_frac": 0.2}, "rounds": {"participation": 1.0}, "weighting": [{"fedldf": 2}]}
    lines = faults_of(plain(client=client, **changes))
    assert f"client: 'fedamp' and '{other}' both decide what clients are sent; a stack can have one." in lines


def test_float_fields_take_exponents_that_yaml_reads_as_text(tmp_path: Path) -> None:
    text = PLAIN.replace("lr: 0.1", "lr: 1e-3, betas: [0.9, 99e-2]") + "server: [{shrink: {clamp: [1e-2, 2E-1]}}]"
    assert "1e-3" in yaml.safe_load(text)["local"].values()  # as text: else this test proves nothing
    config = load(write(tmp_path, text))
    assert (config.local.lr, config.local.betas) == (0.001, (0.9, 0.99))
    assert config.server == (Shrink(clamp=(0.01, 0.2)),)
    assert load(write(tmp_path, PLAIN), ["local.lr=5e-4"]).local.lr == 0.0005


def test_an_entry_is_a_name_or_fields_or_its_first_field() -> None:
    written = ["shrink", {"shrink": None}, {"shrink": {}}, {"shrink": 0.1}, {"shrink": {"beta": 0.1, "clamp": None}}]
    assert {from_dict(plain(server=[entry])).server for entry in written} == {(Shrink(0.1, None),)}


@pytest.mark.parametrize(
    ("override", "section", "value"),
    [
        ("rounds.total=7", "rounds.total", 7),
        ("evaluate.global=false", "evaluate.global_", False),  # a section that the file does not have
        ("data.partition.dirichlet_counts.alpha=0.5", "data.partition.alpha", 0.5),
        ("data.partition={iid_equal: 5}", "data.partition.clients", 5),
        ("engine.local.threads=2", "engine.threads", 2),  # inside a bare name
        ("server.0.shrink.beta=0.2", "server", (Shrink(0.2, (0.0, 1.0)),)),
        ("server.0.shrink.clamp.1=0.3", "server", (Shrink(0.1, (0.0, 0.3)),)),
        ("server.0=shrink", "server", (Shrink(),)),
        ("server=[]", "server", ()),
        ("server=shrink", "server", (Shrink(),)),
        ("server={shrink: 0.3}", "server", (Shrink(0.3),)),
        ("data.partition=iid_equal", "data.partition.clients", 100),  # what both partitions have stays
        ("data.partition=natural", "data.partition.clients", None),  # but the data tell who their clients are
        ("client.0.starter.eta=2", "client", (Starter(2.0),)),  # a list that the file does not have
        ("record.traces=rounds", "record.traces", "rounds"),
        ("record.traces.0=3", "record.traces", (3,)),
        ("record.trace=[]", "record.traces", ()),  # of the last release
    ],
)
def test_set(tmp_path: Path, override: str, section: str, value: object) -> None:
    found: Any = load(write(tmp_path, PLAIN + "server: [{shrink: {clamp: [0, 1]}}]"), [override])
    for name in section.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_key_of_the_last_release_is_read(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match=r"write record.traces=\[1, 6\] for \[0, 5\]"):
        found = load(write(tmp_path, PLAIN + "record: {trace: [0, 5], traces: []}"))
    assert found.record.traces == (1, 6)
    with pytest.warns(FutureWarning, match=r"write record.traces=rounds"):
        assert load(write(tmp_path, PLAIN + "record: {trace: rounds}")).record.traces == "rounds"
    old = write(tmp_path, PLAIN + "record: {trace: []}")  # as every run of it wrote
    assert load(old, ["record.traces=[2]"]).record.traces == (2,)  # what is set later holds


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("rounds", "write it as path=value"),
        ("rounds.total=[", "'[' is not valid YAML."),
        ("rounds.total.x=1", "rounds.total is 20, which has no 'x' in it."),
        ("server.2=shrink", "server is a list of 1; '2' is not a place in it."),
        ("server.first=shrink", "server is a list of 1; 'first' is not a place in it."),
        ("server.lr=1", "shrink takes beta, clamp. Write server.0.shrink.FIELD=1."),
        ("client.mu=0.1", "Write client='[{fedprox: {mu: 0.1}}]'."),
        ("rounds=20", "Did you mean rounds.total=20?"),  # and no word of what rounds then lacks
        ("rounds.totl=5", "rounds.totl=5: unknown field (set to 5). Did you mean 'total'?"),
        ("server.0.shrnk.beta=1", "server.0=NAME replaces it."),
    ],
)
def test_set_that_fits_nowhere(tmp_path: Path, override: str, fault: str) -> None:
    path = write(tmp_path, PLAIN + "server: [shrink]")
    with pytest.raises(ConfigError) as caught:
        load(path, [override, "local.lr=x"])
    assert len(caught.value.faults) == 2
    assert fault in str(caught.value)
    assert "local.lr" in str(caught.value)


def test_a_default_does_not_stand_in_for_a_misspelt_field() -> None:
    """With `clients` misspelt, nothing can be said about the cohort, and the default of 20 must not be quoted."""
    partition = {"dirichlet_counts": {"alpha": 0.3, "clents": 100}}
    (line,) = faults_of(plain(data={"partition": partition}, rounds={"participation": 2}))
    assert line.startswith("data.partition.dirichlet_counts.clents: unknown field")


def test_a_preset_comes_first_and_explicit_keys_win(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = {"local": {"lr_decay": 0.9, "epochs": 3}, "server": ["shrink"], "data": {"client_val_frac": 0.3}}
    monkeypatch.setitem(PRESETS, "official", preset)
    config = from_dict(plain(preset="official", local={"epochs": 2}))
    assert (config.local.lr_decay, config.local.epochs, config.data.client_val_frac) == (0.9, 2, 0.3)
    assert config.server == (Shrink(),)
    assert from_dict(plain(preset="official", server=[])).server == ()  # a list is replaced, not extended
    assert from_dict(to_dict(config)) == config


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**32 - 1),
            "local": st.fixed_dictionaries(
                {"batch_size": st.integers(1, 512), "lr": st.floats(1e-9, 1e3)},
                optional={"grad_clip": st.none() | st.floats(1e-3, 10), "state": st.sampled_from(["reset", "persist"])},
            ),
            "client": st.sampled_from([[], ["starter"], [{"starter": {"eta": 1e-7}}]]),
            "server": st.sampled_from([[], ["shrink"], [{"shrink": {"beta": 3, "clamp": [0, 1]}}]]),
            "engine": st.sampled_from(["local", "ray", {"ray": {"clients_per_actor": 2, "gpu_per_client": 1}}]),
            "record": st.fixed_dictionaries({}, optional={"traces": st.just("rounds") | st.lists(st.integers(1, 20))}),
        }
    )
)
def test_the_resolved_file_is_the_same_run(changes: dict[str, Any]) -> None:
    config = from_dict({**plain(), **changes})
    read_back = from_dict(yaml.safe_load(to_yaml(config)))
    assert read_back == config
    assert fingerprint(read_back) == fingerprint(config)
    assert to_dict(config)["local"].keys() >= {"lr", "lr_decay", "betas", "grad_clip"}  # defaults are written out


def test_fingerprint_sees_every_value_and_no_order() -> None:
    raw = plain()
    assert fingerprint(from_dict(raw)) == fingerprint(from_dict(dict(reversed(raw.items()))))
    assert fingerprint(from_dict(raw)) != fingerprint(from_dict(plain(evaluate={"batch_size": 511})))


@pytest.mark.parametrize("catalogue", ["SOURCES", "PARTITIONS", "CLIENTS", "WEIGHTINGS", "STEPS", "ENGINES"])
def test_every_entry_can_be_configured_and_says_what_it_is(catalogue: str) -> None:
    for name, cls in getattr(configuration, catalogue).items():
        fields = configuration.fields_of(cls)
        assert cls.__doc__, name
        assert not [key for key, (_, hint) in fields.items() if "typing." in configuration.describe(hint)], name


@pytest.mark.parametrize(
    ("participation", "clients", "cohort"), [(0.29, 100, 29), (0.1, 100, 10), (0.001, 100, 1), (1.0, 7, 7), (0.5, 5, 2)]
)
def test_cohort_size(participation: float, clients: int, cohort: int) -> None:
    assert RoundsConfig(total=1, participation=participation).cohort_size(clients) == cohort


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [1", "not valid YAML"),
        ("seed: 1\nseed: 2", "line 2, column 1: not valid YAML: 'seed' is written twice"),
        ("- 1", "must hold the sections preset, name, seed, data,"),
        ("", "must hold the sections"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: ") as caught:
        load(write(tmp_path, text))
    assert fault in str(caught.value)


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, PLAIN)
    with pytest.raises(ConfigError, match=r"rnu\.yaml: no such file\. Did you mean .*run\.yaml\?"):
        load(tmp_path / "rnu.yaml")


def test_the_data_folder_is_root_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = plain(data={"name": {"npz": "x.npz"}})
    assert faults_of(raw) == ["data.name: " + raw_fault("neither data.root nor RAYSIM_DATA is set")]
    monkeypatch.setenv("RAYSIM_DATA", str(tmp_path))
    assert faults_of(raw) == ["data.name: " + raw_fault(f"RAYSIM_DATA is {tmp_path}")]
    (tmp_path / "x.npz").touch()
    assert from_dict(raw).data.folder == tmp_path
    assert faults_of(plain(data={"name": {"npz": "x.npz"}, "root": "elsewhere"}))[0].endswith(
        "(data.root is elsewhere)"
    )


def raw_fault(where: str) -> str:
    return f"npz: the file x.npz is missing; put it there or correct the path. ({where})"


# ---- configurations made in Python


SECTIONS: dict[str, Any] = {
    "data": {"name": "digits", "partition": {"iid_equal": {"clients": 4}}},
    "model": {"name": "small_cnn"},
    "rounds": {"total": 2},
    "local": {"batch_size": 8, "lr": 0.5},
}


def test_python_takes_mappings_and_objects_alike() -> None:
    written = from_dict({**SECTIONS, "client": [{"starter": 2.0}], "engine": "local"})
    objects: dict[str, Any] = {
        "data": DataConfig(name=Digits(), partition=IIDEqual(clients=4)),
        "model": ModelConfig(name="small_cnn"),
        "rounds": {"total": 2},
        "local": LocalConfig(batch_size=np.int64(8), lr=np.float32(0.5)),  # type: ignore[arg-type]
        "client": [Starter(2.0)],
        "engine": "local",
    }
    made = Config(**objects)
    assert type(made.local.batch_size) is int
    assert made == written == Config(**SECTIONS, client=[{"starter": 2.0}], engine="local")  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(made)) == made
    assert fingerprint(made) == fingerprint(written)
    check(made)


def test_python_is_told_every_fault_with_its_path() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(
            **SECTIONS | {"rounds": {"totl": 2}, "local": LocalConfig(batch_size="8", lr=-1.0)},  # type: ignore[arg-type]
            client=(Starter(2.0), Shrink()),
            engine=Starter(),  # type: ignore[arg-type]
        )
    found = {line.split(": ")[1] for line in caught.value.faults}
    assert found == {"rounds.totl", "local.batch_size", "local.lr", "client.1", "engine"}


def test_a_configuration_is_frozen_and_changes_are_validated() -> None:
    config = Config(**SECTIONS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 2  # type: ignore[misc]
    assert dataclasses.replace(config, seed=2).seed == 2
    with pytest.raises(ConfigError, match="seed: must be a whole number"):
        dataclasses.replace(config, seed=-1)


def test_rules_between_sections_hold_in_python_too() -> None:
    config = Config(**SECTIONS | {"rounds": {"total": 2, "participation": 3}})
    with pytest.raises(ConfigError, match=r"rounds\.participation: 3 asks for a cohort of 12 clients"):
        check(config)


def test_errors_survive_the_way_between_processes() -> None:
    assert pickle.loads(pickle.dumps(ConfigError(["a", "b"]))).faults == ("a", "b")
    assert str(ConfigError("one")) == "one"


def test_shipped_configurations_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnist_dir0.1").mkdir()
    (tmp_path / "mnist_dir0.1" / "train.parquet").touch()
    monkeypatch.setenv("RAYSIM_DATA", str(tmp_path))
    paths = sorted(CONFIGS.glob("*.yaml"))
    assert [load(path).name for path in paths] == [path.stem for path in paths]
