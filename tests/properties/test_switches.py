"""Every field of every method does something: with another value the run, or what is tested in it, is another."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from conftest import simulate, table, tiny

from raysim.methods import CLIENTS, STEPS, WEIGHTINGS

ROLES = {"client": CLIENTS, "weighting": WEIGHTINGS, "server": STEPS}
CATALOGUE = {name: (role, cls) for role, entries in ROLES.items() for name, cls in entries.items()}


@dataclass(frozen=True)
class Switches:
    """Another value for each field of one method. A value that is a mapping says of what other fields it needs, too."""

    others: dict[str, Any]
    base: dict[str, Any] = field(default_factory=dict)  # fields of all runs
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the configuration


PROXY = {"data": {"proxy": {"samples": 24}}}
HOPELESS = PROXY | {"local": {"lr": 2.0}}  # clients that end worse than chance
ALL = {"rounds": {"participation": 1.0}}
PLAIN = {"local": {"momentum": 0.0, "weight_decay": 0.0}}
NORMS = {"model": {"layer_by": "bias_group"}}
LEARNED = {"epochs": 1, "lr": 0.02, "form": "quad", "batch_size": 9, "betas": [0.9, 0.99], "halve_every": 1}
DISTILLED = {"epochs": 1, "lr": 0.01, "batch_size": 9, "betas": [0.9, 0.99], "server_ft_official": True}
ADAPTIVE = {"eta": 0.02, "eta_schedule": ["cosine"], "beta1": 0.5, "epsilon": 1e-2, "initial": 0.1}

SWITCHES = {
    "fedala": Switches(
        {"eta": 0.1, "fraction": 0.5, "layers": 2, "tensors": 1, "threshold": 1e-6, "window": True, "clients": "all",
         "freeze": True, "epochs": 2, "start_round": 2, "drop_last": True},
        {"threshold": 1e9}, {"rounds": {"total": 4, "participation": 0.75}},
    ),
    "fedprox": Switches({"mu": 0.1, "official_sgd": True}),
    "feddyn": Switches({"alpha": 0.1, "unsquared": True, "adaptive_alpha": True, "weights": "size"}),
    "sgdm": Switches({"reading": "mfl", "rho": 0.5}, sections=PLAIN),
    "fedbabu": Switches({"ft_epochs": 2, "ft_part": "head"}, {"ft_epochs": 1}),
    "moon": Switches({"mu": 0.5, "tau": 1.0}),
    "finetune": Switches({"ft_epochs": 2}, {"ft_epochs": 1}),
    "perfedavg": Switches({"alpha": 0.01, "beta": 0.01}),
    "fedrep": Switches({"head_epochs": 2}, {"head_epochs": 1}),
    "scaffold": Switches({"c_update": "option_1"}, sections=PLAIN),
    "pfedme": Switches(
        {"eta": 0.02, "lam": 4.0, "inner_steps": 2, "mu": 0.1, "beta": 0.5, "evaluate": "w"}, {"lam": 5.0, "inner_steps": 1}
    ),
    "ditto": Switches({"lam": 1.0, "epochs": 2, "first": "global", "official_sgd": True}, {"epochs": 1}),
    "fedamp": Switches(
        {"alpha": 0.5, "lam": 2.0, "sigma": 4.0, "clip": True, "init": "cloud"}, {"alpha": 1e3, "sigma": 2.0}, ALL
    ),
    "fedphp": Switches({"mu": 0.5, "lam": 0.1, "evaluate": "private"}),
    "fedfomo": Switches(
        {"models": 2, "epsilon": 0.5}, {"models": 3},
        {"data": {"client_val_frac": 0.25}, "rounds": {"total": 4, "participation": 0.75}},
    ),
    "apple": Switches(
        {"eta2": 0.02, "mu": 0.5, "L": 0.7, "schedule": "epsilon", "epsilon": {"schedule": "epsilon", "epsilon": 0.1},
         "models": 3, "initial": "own", "official": True},
        {"L": 1.0}, ALL,
    ),
    "partialfed": Switches(
        {"model_batches": 2, "choice_batches": 2, "tau": 1.0, "tau_decay": 0.5, "choice_lr": 1.0, "logits": [1.0, 0.0]},
        {"model_batches": 1, "choice_batches": 1}, {"rounds": {"participation": 0.75}},
    ),
    "fedadp": Switches({"keep": 0.6, "least": 0.4}, {"keep": 0.5}),
    "fedavg": Switches({"weights": "uniform"}),
    "feddisco": Switches({"a": 0.1, "b": 0.3, "metric": "l2", "normalize_kl": False, "target": [0.7, 0.1, 0.1, 0.1]}),
    "ldawa": Switches(
        {"base": "size", "warmup": 1, "layer_by": "model", "scale_buffers": True, "renormalize": True}, {"warmup": 0}
    ),
    "fednova": Switches({}),
    "ccn": Switches({"temperature": 0.1, "latent_at": "before", "activation": "pre"}),
    "fedldf": Switches({"top_n": 2, "metric": "relative"}, {"top_n": 1}),
    "random_layer": Switches({"n": 2}, {"n": 1}),
    "hdfl": Switches({"n": 2, "select": "by_loss"}, {"n": 1}),
    "median": Switches({}),
    "trimmed_mean": Switches({"beta": 0.4}, sections=ALL),
    "multi_krum": Switches({"f": 1, "m": 2}, {"f": 0}, ALL),
    "fedlaw": Switches(
        {
            **LEARNED, "swa": True, "swa_order": {"swa": True, "swa_order": "gamma_first"}, "gamma_clamp": [1.01, 1.1],
            "guard": True,
        },
        {"epochs": 2}, HOPELESS,
    ),
    "attentive_law": Switches({**LEARNED, "swa": {"swa": True, "epochs": 9}, "stop_round": 1}, {"epochs": 2}, PROXY),
    "adaptive_gws": Switches(
        {**LEARNED, "gamma_clamp": [1.01, 1.1], "guard": True, "eta": 0.5}, {"epochs": 2}, HOPELESS
    ),
    "step_size": Switches({"eta": 0.5, "eta_schedule": ["cosine"]}),
    "fedavgm": Switches({"beta": 0.5, "eta": 0.5, "eta_schedule": ["cosine"], "damped": True, "scale_by_lr": True}),
    "fedadagrad": Switches(ADAPTIVE),
    "fedadam": Switches({**ADAPTIVE, "beta2": 0.9}),
    "fedyogi": Switches({**ADAPTIVE, "beta2": 0.9}),
    "fedlws": Switches(
        {"beta": 0.05, "per": "model", "variant": "only_opt", "tau_stat": "rms", "tau_clamp": [0.01, 0.02],
         "lws_stats": "all", "shrink_buffers": True},
        sections=NORMS,
    ),
    "fixed_shrink": Switches({"gamma": 0.8, "decrement": 0.05}, {"gamma": 0.9}),
    "awd": Switches({"strength": 0.1, "smoothing": 0.5}),
    "adadecay": Switches({"strength": 0.1, "alpha": 1.0}, {"strength": 0.05}),
    "server_ft": Switches(DISTILLED, sections=PROXY),
    "feddf": Switches(
        {**DISTILLED, "temperature": 2.0, "cosine": True, "patience": 1,
         "validation": {"patience": 9, "validation": 0.5}}, {"epochs": 2}, PROXY,
    ),
    "fedbe": Switches(
        {**DISTILLED, "samples": 3, "mode": "dirichlet", "temperature": 0.5, "swa": True}, {"epochs": 2}, PROXY
    ),
}  # fmt: skip

RECORDED_ALONE = {("fedldf", "metric")}  # it compares layers, of which each is ranked by itself


def test_every_field_has_another_value():
    assert SWITCHES.keys() == CATALOGUE.keys()
    for name, switches in SWITCHES.items():
        assert switches.others.keys() == {f.name for f in fields(CATALOGUE[name][1])}, name


def sections_of(name: str) -> dict[str, Any]:
    """The configuration in which one method is run, without the method."""
    role, switches = CATALOGUE[name][0], SWITCHES[name]
    sections: dict[str, Any] = {
        "data": {
            "name": {"synthetic": {"samples": 120, "shape": [1, 8, 8], "classes": 4}}, "client_test_frac": 0.3,
            "partition": {"dirichlet_counts": {"alpha": 0.8, "clients": 5, "min_size": 8}},
        },
        "rounds": {"total": 2, "participation": 0.6, "evaluate_every": 2},
        "evaluate": {"global": False, "personal": "after_init"} if role == "client" else {"global": False},
    }  # fmt: skip
    for section, changes in switches.sections.items():
        sections[section] = {**sections.get(section, {}), **changes}
    return sections


def outcome(name: str, own: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    """Hash of the run, scores of the clients' models, and whether something was recorded."""
    role, switches = CATALOGUE[name][0], SWITCHES[name]
    federation = simulate(tiny(**sections_of(name), **{role: [{name: {**switches.base, **own}}]}), folder)
    personal = table(folder, "personal") if role == "client" else {}
    recorded = table(folder, "notes")["value"].tolist() if (folder / "notes").exists() else []
    return federation.sha256(), [column.tolist() for column in personal.values()], recorded


@pytest.mark.parametrize("name", [name for name in SWITCHES if SWITCHES[name].others])
def test_every_switch_changes_the_result(name, tmp_path):
    base = outcome(name, {}, tmp_path / "base")
    for field_, value in SWITCHES[name].others.items():
        own = value if isinstance(value, dict) else {field_: value}
        found = outcome(name, own, tmp_path / f"other-{field_}")
        if (name, field_) in RECORDED_ALONE:
            assert found[2] != base[2], field_
        else:
            assert found[:2] != base[:2], field_
