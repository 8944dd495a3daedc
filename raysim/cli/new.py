"""`raysim init` and `raysim new method`: the first lines of something of one's own."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from raysim.api.errors import reported

TEMPLATES = files("raysim.cli") / "templates"


class Role(StrEnum):
    """What a method changes: how clients train, how they are weighted, what the server does with the mean."""

    client = "client"
    weighting = "weighting"
    server = "server"


TABLES = {Role.client: "CLIENTS", Role.weighting: "WEIGHTINGS", Role.server: "STEPS"}  # of raysim.methods
OPTIONS = {Role.client: "mu", Role.weighting: "power", Role.server: "eta"}  # the field of each role's example


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to; default: here.")] = Path(),
) -> None:
    """Write a small configuration with comments, to start from."""
    with reported():
        write({folder / name: (TEMPLATES / name).read_text("utf-8") for name in ("federation.yaml", "README.md")})
    there = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    print(f"{folder / 'federation.yaml'}   a configuration to change\n{folder / 'README.md'}   what to do with it")
    print(f"\nNow: {there}raysim run federation.yaml")


def method(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in a configuration, such as signsgd.")],
    role: Annotated[Role, typer.Option(help="What it changes.")] = Role.client,
) -> None:
    """Write a method's file, its test and its registration: into raysim in a checkout of it, else beside each other here."""
    from raysim import methods
    from raysim.config import ConfigError

    with reported():
        key, title = names(name)
        if any(key in getattr(methods, table) for table in TABLES.values()):
            raise ConfigError(f"raysim new method: there is a method {key} already. Choose another name.")
        if not is_checkout(Path()) and (module := shadowed(key)):
            raise ConfigError(f"raysim new method: {key}.py would hide the module {key} {module}. Choose another name.")
        words = {"name": key, "title": title, "role": role, "option": OPTIONS[role], "table": TABLES[role]}
        print(in_checkout(words) if is_checkout(Path()) else outside(words))


def outside(words: Mapping[str, str]) -> str:
    """Write a module that registers the method itself, and its test; what to say of them."""
    name, title = words["name"], words["title"]
    registration = {
        "importing": "import raysim\n",
        "decorator": f'@raysim.method("{words["role"]}", "{name}")\n',
    }
    path, test = Path(f"{name}.py"), Path(f"test_{name}.py")
    importing = {"importing": f"import pytest\nfrom {name} import {title}\n"}
    write({path: filled(words["role"], {**words, **registration}), test: filled("test", {**words, **importing})})
    return f"""{path}   the method, an example to replace
{test}   its test: pytest {test}

A script that imports {name} can use `{words["role"]}: [{name}]`. So that the command raysim finds it as well, make a package of
it whose pyproject.toml says:

[project.entry-points."raysim.methods"]
{name} = "{name}:{title}\""""


def in_checkout(words: Mapping[str, str]) -> str:
    """Write the method among raysim's own, its test, and its lines in the catalogue; what to say of them."""
    name, title = words["name"], words["title"]
    path, test = Path("raysim/methods", f"{name}.py"), Path("tests/methods", f"test_{name}.py")
    catalogue = Path("raysim/methods/__init__.py")
    importing = {"importing": f"import pytest\n\nfrom raysim.methods.{name} import {title}"}
    listed = registered(catalogue.read_text(encoding="utf-8"), words)
    write(
        {
            path: filled(words["role"], {**words, "importing": "", "decorator": ""}),
            test: filled("test", {**words, **importing}),
        }
    )
    catalogue.write_text(listed, encoding="utf-8")
    return f"""{path}   the method, an example to replace
{test}   its test: pytest {test}
{catalogue}   its two lines in the catalogue

The suite asks of each method of raysim's for more: a case in tests/cases/{name}.py, its switches in
tests/properties/test_switches.py, a setting in benchmarks/catalogue.py. CONTRIBUTING.md says what they hold."""


def registered(catalogue: str, words: Mapping[str, str]) -> str:
    """The source of `raysim/methods/__init__.py` with the method's import and its line."""
    lines = catalogue.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"{words['table']}: "))
    end = next(at for at in range(start, len(lines)) if lines[at].strip() == "}")
    indent = re.match(r"\s*", lines[end - 1])
    assert indent is not None
    lines.insert(end, f'{indent[0]}"{words["name"]}": {words["title"]},')
    imported = f"from raysim.methods.{words['name']} import {words['title']}"
    own = [at for at, line in enumerate(lines) if line.startswith("from raysim.methods.")]
    lines.insert(next((at for at in own if lines[at] > imported), own[-1] + 1), imported)
    return "\n".join(lines) + "\n"


def names(name: str) -> tuple[str, str]:
    """The name in a configuration, and the class: `sign_sgd` and `SignSgd` of sign_sgd, `signsgd` and `SignSGD` of SignSGD.

    Raises `ConfigError` for what cannot name both.
    """
    from raysim.config import ConfigError
    from raysim.store.documents import parse_yaml

    key, title = name.lower(), name if name != name.lower() else "".join(map(str.capitalize, name.split("_")))
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(key) or keyword.iskeyword(title):
        raise ConfigError(f"raysim new method {name}: must be letters, digits and _, and no word of Python's.")
    if (read := parse_yaml(key)) != key:
        raise ConfigError(f"raysim new method {name}: YAML reads {key} as {str(read).lower()}. Choose another name.")
    texts = [(TEMPLATES / f"{template}.txt").read_text("utf-8") for template in (*Role, "test")]
    if re.search(rf"^(?:from|import) .*\b{title}\b", "\n".join(texts), re.MULTILINE):
        raise ConfigError(f"raysim new method {name}: its files import another {title}. Choose another name.")
    return key, title


def shadowed(name: str) -> str | None:
    """Where the module is, in words, that a file of this name here would hide; None where there is none."""
    if name in sys.stdlib_module_names:
        return "of Python"
    with suppress(ValueError):  # a module that was not imported from anywhere
        found = find_spec(name)
        if found and found.origin and Path(found.origin).resolve() != Path(f"{name}.py").resolve():
            return f"at {found.origin}"
    return None


def filled(template: str, words: Mapping[str, str]) -> str:
    """The text of a template, its words filled in."""
    return Template((TEMPLATES / f"{template}.txt").read_text("utf-8")).substitute(words)


def write(texts: Mapping[Path, str]) -> None:
    """Write new files. Raises `ConfigError`, before the first, where one is there already."""
    from raysim.config import ConfigError

    if there := [path for path in texts if path.exists()]:
        raise ConfigError(
            f"{', '.join(map(str, there))}: already there, and left as it is. Choose another name or folder."
        )
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def is_checkout(folder: Path) -> bool:
    """Whether `folder` is the top of a checkout of raysim's source."""
    project = folder / "pyproject.toml"
    own = project.is_file() and re.search(r'^name = "raysim"$', project.read_text(encoding="utf-8"), re.MULTILINE)
    return bool(own) and (folder / "raysim/methods/__init__.py").is_file()
