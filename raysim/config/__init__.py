"""Configurations: YAML or mappings to frozen dataclasses, with every fault found before anything is started.

schema.py has the sections, presets.py their defaults in other codes, fields.py and build.py the way from mappings to
objects, rules.py what cannot go together, load.py files and `--set`, identity.py when two configurations are one run.
"""

from raysim.analysis import INSTRUMENTS
from raysim.config.build import plain
from raysim.config.fields import STACKS, catalogue_of, docs_of, fields_of, is_section, stack_of
from raysim.config.identity import (
    check_unchanged,
    decisive,
    differences,
    entries_of,
    fingerprint,
    recall,
    remember,
    to_dict,
    to_yaml,
)
from raysim.config.load import from_dict, load, read_entry
from raysim.config.messages import describe, nearest, show
from raysim.config.presets import PRESETS
from raysim.config.rules import check, facts_of
from raysim.config.schema import (
    Config,
    DataConfig,
    EvaluateConfig,
    LocalConfig,
    ModelConfig,
    RecordConfig,
    RoundsConfig,
)
from raysim.data import PARTITIONS, SOURCES
from raysim.engine.settings import ENGINES, EngineConfig, LocalEngineConfig, RayEngineConfig
from raysim.errors import ConfigError
from raysim.methods import CLIENTS, STEPS, WEIGHTINGS
from raysim.models import MODELS
from raysim.registry import name_in
from raysim.store.sinks import SINKS

__all__ = [
    "CLIENTS", "ENGINES", "INSTRUMENTS", "MODELS", "PARTITIONS", "PRESETS", "SINKS", "SOURCES", "STACKS", "STEPS",
    "WEIGHTINGS", "Config", "ConfigError", "DataConfig", "EngineConfig", "EvaluateConfig", "LocalConfig",
    "LocalEngineConfig", "ModelConfig", "RayEngineConfig", "RecordConfig", "RoundsConfig", "catalogue_of", "check",
    "check_unchanged", "decisive", "describe", "differences", "docs_of", "entries_of", "facts_of", "fields_of",
    "fingerprint", "from_dict", "is_section", "load", "name_in", "nearest", "plain", "read_entry", "recall", "remember",
    "show", "stack_of", "to_dict", "to_yaml",
]  # fmt: skip
