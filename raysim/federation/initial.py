"""The model that a run begins with: drawn from the seed, or read from a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from raysim.config import Config, ConfigError
from raysim.core.layers import LayerMap
from raysim.host.messages import HostSpec
from raysim.lazy import Tensor
from raysim.store.documents import DamagedFile, read_tensors


def initial_value(config: Config, spec: HostSpec) -> Tensor:
    """The model [S] that every method starts from: drawn from the seed, or read from `model.init`."""
    model, layers = spec.network()
    value = layers.flatten(model.state_dict())
    return read_initial(config, layers, value) if config.model.init else value


def read_initial(config: Config, layers: LayerMap, drawn: Tensor) -> Tensor:
    """The model [S] in `model.init`, but for what `model.init_except` leaves as it was `drawn` [S]."""
    assert config.model.init
    state, left_out = layers.state_dict(drawn), config.model.init_except
    if unknown := [part for part in left_out if not any(_within(name, part) for name in state)]:
        raise ConfigError(f"model.init_except: {unknown[0]} is no tensor or module of the model.")
    try:
        read = read_tensors(Path(config.model.init))
        own = {name: tensor for name, tensor in state.items() if any(_within(name, part) for part in left_out)}
        return layers.flatten(read | own)
    except DamagedFile as error:
        raise ConfigError(f"model.init: {error}") from None
    except (KeyError, ValueError) as error:
        way = "model.init_except leaves tensors out, as in model.init_except: [head]"
        raise ConfigError(f"model.init: {config.model.init}: {error.args[0]}. {way}.") from None


def with_frozen(config: Config, spec: HostSpec) -> HostSpec:
    """With the tensors in `model.init` that no round changes."""
    frozen = {name: tensor for name, (_, tensor) in spec.layers.constants.items() if tensor.is_floating_point()}
    kept = {name for name in frozen if not any(_within(name, part) for part in config.model.init_except)}
    if config.model.init is None or not kept:
        return spec
    try:
        read = read_tensors(Path(config.model.init))
    except DamagedFile as error:
        raise ConfigError(f"model.init: {error}") from None
    for name in sorted(kept):
        if name not in read or read[name].shape != frozen[name].shape:
            raise ConfigError(
                f"model.init: {config.model.init}: the frozen tensor {name} {[*frozen[name].shape]} is missing or of another shape."
            )
    return replace(spec, frozen={name: read[name] for name in kept})


def _within(name: str, part: str) -> bool:
    return f"{name}.".startswith(f"{part}.")
