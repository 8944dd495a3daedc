"""The configuration as a JSON schema, by which editors complete keys and underline mistakes."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any

from pydantic import TypeAdapter

from raysim.config.build import plain
from raysim.config.fields import catalogue_of, docs_of, fields_of, is_section, stack_of
from raysim.config.schema import Config
from raysim.registry import Catalogue

BESIDE = ("table", "methods")  # what `raysim reproduce` and `raysim sweep` make of a file


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a file: every setting with its description and default, every entry with its options.

    It knows single settings. What they must be together, and what is missing, `raysim run --dry-run` says: a preset may
    bring it.
    """
    whole = _section(Config)
    whole["properties"] |= {name: {} for name in BESIDE}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "raysim configuration", **whole}


def _schema(annotation: Any) -> dict[str, Any]:
    if catalogue := catalogue_of(annotation):
        return _entry(catalogue)
    if entry := stack_of(annotation):
        one = _schema(entry)
        return {"anyOf": [{"type": "array", "items": one}, *one["anyOf"]]}  # one may stand without its brackets
    if is_section(annotation):
        section = _section(annotation)
        name = section["properties"].get("name")
        return {"anyOf": [section, {**name, "type": "string"}]} if name else section  # a text is its name
    return TypeAdapter(annotation).json_schema()


def _entry(catalogue: Catalogue) -> dict[str, Any]:
    options = {name: _options(cls) for name, cls in catalogue.entries.items()}
    named = {
        "type": "object",
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
        "properties": options,
    }
    number = [_first(catalogue.entries[catalogue.number])] if catalogue.number else []
    return {"anyOf": [{"enum": [*options]}, named, *number]}


def _options(cls: type) -> dict[str, Any]:
    """The fields of an entry, nothing, or only the value of the first one."""
    section = _section(cls)
    first = [_first(cls)] if section["properties"] else []
    about = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
    return {"description": about, "anyOf": [section, {"type": "null"}, *first]}


def _first(cls: type) -> dict[str, Any]:
    """The value of the first field, which may stand for the whole."""
    value: dict[str, Any] = next(iter(_section(cls)["properties"].values()))
    return value


def _section(cls: type) -> dict[str, Any]:
    docs, properties = docs_of(cls), {}
    for key, (field, annotation) in fields_of(cls).items():
        default = field.default if field.default_factory is MISSING else field.default_factory()
        properties[key] = {
            **_schema(annotation),
            **({"description": docs[field.name]} if field.name in docs else {}),
            **({} if default is MISSING else {"default": plain(annotation, default)}),
        }
    return {"type": "object", "additionalProperties": False, "properties": properties}
