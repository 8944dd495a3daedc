"""What a class says of its fields: keys, annotations and docstrings. Sections and catalogue entries are read alike."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import sys
import typing
from itertools import pairwise
from typing import Any, TypeGuard

from raysim.registry import REGISTRY, Catalogue

OWN = " One of your own is known in the script that defines it, or from an installed package (docs/howto/method.md)."
STACKS = {
    "client": Catalogue("client method", REGISTRY.table("client"), OWN),
    "weighting": Catalogue("weighting", REGISTRY.table("weighting"), OWN),
    "server": Catalogue("server step", REGISTRY.table("server"), OWN),
    "upload": Catalogue("transform", REGISTRY.table("transform"), OWN),
    "download": Catalogue("transform", REGISTRY.table("transform"), OWN),
    "attack": Catalogue("attack", REGISTRY.table("attack"), OWN),
}


@functools.cache
def fields_of(cls: type) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Key in the file → field and annotation. A trailing underscore only dodges a Python keyword."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = sorted(dataclasses.fields(cls), key=lambda f: f.kw_only is True)  # those of a base class come last
    return {f.name.rstrip("_"): (f, hints[f.name]) for f in fields if f.init}


def is_section(annotation: Any) -> TypeGuard[type]:
    """Whether a value is written as a mapping of a dataclass's fields."""
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


@functools.cache
def catalogue_of(annotation: Any) -> Catalogue | None:
    """The catalogue, where a value is one of its entries."""
    return next((m for m in typing.get_args(annotation)[1:] if isinstance(m, Catalogue)), None)


@functools.cache
def stack_of(annotation: Any) -> Any | None:
    """The annotation of the entries, where a value is a tuple of catalogue entries."""
    args = typing.get_args(annotation)
    return args[0] if typing.get_origin(annotation) is tuple and catalogue_of(args[0]) else None


def docs_of(cls: type) -> dict[str, str]:
    """The docstring of each field, in a class and in those that it inherits from: the string below the field.

    Nothing is known of a class without a source file, as one that was typed into a prompt.
    """
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        try:
            tree = _tree(owner.__module__)
        except (OSError, TypeError):
            continue
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner.__name__]
        body = [node for found in classes[:1] for node in found.body]  # none for a class that `make_dataclass` made
        for node, below in pairwise(body):
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                docs[node.target.id] = " ".join(str(below.value.value).split())
    return docs


@functools.cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))
