"""Every number that a configuration takes, far out of its range: taken, or refused with a sentence before anything runs."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import MISSING
from types import UnionType
from typing import Annotated, Any

import pytest
from conftest import simulate, tiny
from test_switches import CATALOGUE, SWITCHES, sections_of

from raysim.config import Config, ConfigError, catalogue_of, fields_of, from_dict, to_dict
from raysim.config.fields import is_section, stack_of
from raysim.core.bounds import GREATEST_FLOAT
from raysim.errors import Explained
from raysim.federation import RoundFailed, prepare
from raysim.models import MODELS, ModelError, option_types

VALUES = (-1, 0, 10**20, 1e308, float("nan"), float("inf"))
TOKENS = {"data": {"name": "characters", "partition": {"iid_equal": {"clients": 8}}}}
Place = tuple[str | int, ...]


def numeric(annotation: Any) -> bool:
    """Whether a value is a number, or holds some."""
    return annotation in (int, float) or any(map(numeric, typing.get_args(annotation)))


def shaped(annotation: Any, value: Any) -> Any:
    """What a field of this annotation is when each of its numbers is `value`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return shaped(args[0], value)
    if origin in (typing.Union, UnionType):
        return shaped(next(one for one in args if numeric(one)), value)
    if origin is tuple:
        return [shaped(one, value) for one in args if one is not Ellipsis]
    return {"a": shaped(args[1], value)} if origin is dict else value


def whole(annotation: Any) -> bool:
    """Whether its numbers are whole."""
    return annotation is not float and all(map(whole, typing.get_args(annotation)))


def needed(cls: type) -> dict[str, Any]:
    """Something for the fields without a default."""
    fields = fields_of(cls).items()
    without = {key: hint for key, (f, hint) in fields if f.default is MISSING and f.default_factory is MISSING}
    return {key: shaped(hint, 1) if numeric(hint) else "x" for key, hint in without.items()}


def base(stack: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections around an entry, and its other fields."""
    if stack in ("client", "weighting", "server"):
        return sections_of(name), SWITCHES[name].base
    return {}, {}


def numbers(cls: type = Config, place: Place = (), around: dict[str, Any] | None = None) -> Iterator[Any]:
    """The place of each number in a configuration, its annotation, and a configuration in which it can be set."""
    raw = around or to_dict(tiny())
    for key, (_, hint) in fields_of(cls).items():
        entry = stack_of(hint) or hint
        if catalogue := catalogue_of(entry):
            for name, one in catalogue.entries.items():
                sections, fields = base(key, name)
                inner = to_dict(tiny(**sections)) if sections else raw
                filled = {name: {**needed(one), **fields}}
                there = (*place, key, 0, name) if stack_of(hint) else (*place, key, name)
                yield from numbers(one, there, put(inner, (*place, key), [filled] if stack_of(hint) else filled))
        elif is_section(hint):
            yield from numbers(hint, (*place, key), raw)
        elif numeric(hint):
            yield (*place, key), hint, raw


def put(raw: Any, place: Place, value: Any) -> Any:
    """`raw` with another value at the place."""
    if not place:
        return value
    key, *rest = place
    if isinstance(raw, list):
        return [put(one, tuple(rest), value) if i == key else one for i, one in enumerate(raw)]
    return {**raw, key: put(raw.get(key, {}), tuple(rest), value)}


def of_models() -> Iterator[Any]:
    for name, builder in MODELS.items():
        for option, hint in option_types(builder).items():
            around = TOKENS if name in ("text_cnn", "char_gru") else {"data": {"name": {"synthetic": {}}}}
            if numeric(hint):
                raw = {**to_dict(tiny(**around)), "model": {"name": name, "options": {}}}
                yield ("model", "options", option), hint, raw


PLACES = {".".join([*map(str, place), *[raw["model"]["name"]] * ("options" in place)]): (place, hint, raw)
          for place, hint, raw in [*numbers(), *of_models()]}  # fmt: skip


def refused(place: Place, hint: Any, raw: dict[str, Any], value: Any) -> ConfigError | None:
    try:
        config = from_dict(put(raw, place, shaped(hint, value)))
    except ConfigError as error:
        return error
    try:
        prepare(config)
    except Exception as error:
        if not isinstance(error, Explained):
            raise
    return None


def test_every_number_is_taken_or_refused_with_a_sentence(subtests: pytest.Subtests) -> None:
    """Data are read, clients get theirs, and the network is built and tried, as under --dry-run; what is no number that
    arrays can hold does not come so far."""
    assert len(PLACES) > 150
    for path, (place, hint, raw) in PLACES.items():
        for value in VALUES:
            with subtests.test(f"{path}={value}"):
                error = refused(place, hint, raw, value)
                if value not in (-1, 0) and (whole(hint) or value != 10**20):
                    assert error
                if error:
                    path_of = ".".join(map(str, place))
                    assert any(
                        f": {path_of}" in line or any(str(key) in line for key in place[-2:]) for line in error.faults
                    ), error


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("data.partition.dirichlet_counts.clients", 10**20, "must be a whole number > 0 and <= 10000000, but is 1000"),
        ("data.partition.dirichlet_counts.clients", 10**9, "must be a whole number > 0 and <= 10000000, but is 1000"),
        ("data.partition.iid_equal.seed", -1, "must be a whole number >= 0 and < 4294967296 or null, but is -1."),
        ("data.proxy.samples", 10**20, "must be a whole number (whole numbers lie within ±2^63), but is 1000000000"),
        ("local.lr", 1e308, "must be a number > 0 (numbers lie within ±1e+18), but is 1.0e+308."),
        ("rounds.total", 10**20, "must be a whole number > 0 (whole numbers lie within ±2^63), but is 1000000"),
        ("engine.ray.threads", 10**6, "must be a whole number > 0 and <= 1024, but is 1000000."),
        ("model.options.hidden.mlp", -1, "must be a list, each a whole number > 0 and <= 10000000, but is [-1]."),
        ("model.options.dropout.vit", 1.5, "must be a number >= 0 and <= 1, but is 1.5."),
    ],
)
def test_a_number_out_of_range_is_named_with_its_range(path: str, value: float, says: str) -> None:
    place, hint, raw = PLACES[path]
    error = refused(place, hint, raw, value)
    assert error
    (fault,) = [line for line in error.faults if says in line]
    assert fault.startswith(f"configuration: {'.'.join(map(str, place))}: {says}")


def test_the_greatest_rates_are_no_errors_in_the_code(subtests: pytest.Subtests, tmp_path) -> None:
    """With each number of each method, and each rate of `local`, as great as it may be: a round ends, or a client's model
    is not finite, for which the client is to blame."""
    rates = [path for path in PLACES if path.startswith("local.")]
    methods = [path for path in PLACES if any(f".{name}." in path for name in CATALOGUE)]
    for path in [*rates, *methods]:
        place, hint, raw = PLACES[path]
        if whole(hint):
            continue
        with subtests.test(path):
            try:
                config = from_dict(
                    put({**raw, "rounds": {**raw["rounds"], "total": 2}}, place, shaped(hint, GREATEST_FLOAT))
                )
                simulate(config, tmp_path / path)
            except (ConfigError, RoundFailed) as error:
                if "error in a client's code" in str(error):
                    raise


def test_numbers_within_options_are_held_to_the_same(tmp_path) -> None:
    model = {"name": "mlp", "options": {"hidden": [10**20]}}
    with pytest.raises(
        ConfigError, match=r"model\.options: must be a mapping \(whole numbers lie within ±2\^63\), but is \{hid"
    ):
        tiny(model=model)
    with pytest.raises(
        ModelError, match=r"mlp: cannot be made with model\.options \{'hidden': \[10000000, 10000000\]\}"
    ):
        prepare(tiny(model={"name": "mlp", "options": {"hidden": [10**7, 10**7]}}))
