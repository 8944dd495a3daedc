"""What a user's class or function is defined by: its source, and that of what it names.

A whole file would change with the line that starts a run; a class alone would not change with the helper beside it. So a
definition has the statement that makes the class or function and, of its module and of modules beside that, the statements
that make what it names, and so on.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import symtable
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache, partial
from numbers import Number
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

SHOWN = 200  # characters of a value; of a longer one the hash
INSTALLED = {"site-packages", "dist-packages"}  # folders of what others have written


@dataclass(frozen=True)
class Definition:
    """The source of an entry of the registry that is not raysim's own."""

    text: str | None = None
    """None where there is none to be had, as of what was typed into a prompt."""
    file: str | None = None
    """As an import finds it: `train.py`, `package/nets.py`; None for a notebook, and where it is unknown."""
    given: bool = False
    """Whether the entry was given as an object, so that no import of the file registers it."""

    @property
    def sha256(self) -> str | None:
        """Of the text."""
        return None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()


def definition_of(entry: object, given: bool = False, values: Sequence[str] = ()) -> Definition | None:
    """What defines an entry of the registry, with the `values_of` it when it was registered; None for raysim's own."""
    parts = _parts(entry)
    if not parts:
        return None
    found = [place for part in parts if (place := _place(part))]
    if len(found) < len(parts):
        return Definition(given=given)
    text = _gathered(found) + "".join(f"# given: {value}\n" for value in values)
    return Definition(text, found[0][0].file, given)


def read_now(entry: object) -> None:
    """Take the files of an entry as they are now, where it has just been registered: they may change before a run begins."""
    for part in _parts(entry):
        if file := _file(part.__module__):
            _READ[file] = _lines(file)


def _parts(entry: Any) -> list[Any]:
    """The classes and functions, but for raysim's, that an entry is made of, as they were written."""
    return [part for part, _ in _walk(entry, []) if part]


def values_of(entry: Any) -> list[str]:
    """Numbers, texts and names of functions with which an entry was made and which its source does not have, as of an object of
    torchmetrics, or of a class or function that another function returns: NAME = VALUE. They may change while the entry is
    used, so they are asked for before."""
    return [*dict.fromkeys(value for _, values in _walk(entry, []) for value in values)]


def _walk(entry: Any, seen: list[Any], captured: bool = False) -> Iterator[tuple[Any, list[str]]]:
    """What an entry is made of: classes and functions, None for other objects and for raysim's, each with the values that it
    holds. Of what is `captured` the name is a value, too, which says enough of what others have written."""
    entry = inspect.unwrap(entry)
    if any(entry is one for one in seen):  # a function may close over itself
        return
    seen.append(entry)
    written = isinstance(entry, FunctionType | type)
    maker = entry if written else entry.func if isinstance(entry, partial) else type(entry)
    own = f"{getattr(maker, '__module__', '')}.".startswith("raysim.")
    held = [*_held(entry)]
    lines = [f"{name} = {shown}" for name, one in held if name and (shown := _shown(one, captured or written))]
    is_part = written and not own and not (captured and _is_installed(entry))
    yield entry if is_part else None, [] if own else lines
    captures = written or not (isinstance(entry, partial | MethodType) or is_dataclass(entry))
    for name, one in held:
        if callable(one) or is_dataclass(one) or not name:
            yield from _walk(one, seen, captured or (captures and one is not maker))


def _held(entry: Any) -> Iterator[tuple[str, Any]]:
    """What an entry holds, without a name what says nothing as a value."""
    if isinstance(entry, FunctionType | type):
        yield from _captured(entry) if "<" in entry.__qualname__ else ()  # else its statement has all
    elif isinstance(entry, MethodType):
        yield from (("", entry.__func__), ("", entry.__self__))
    elif isinstance(entry, partial):
        yield from {"func": entry.func, **{str(i): arg for i, arg in enumerate(entry.args)}, **entry.keywords}.items()
    else:
        yield "", type(entry)
        if is_dataclass(entry):
            yield from ((field.name, getattr(entry, field.name)) for field in fields(entry))
        else:
            yield from ((name, one) for name, one in getattr(entry, "__dict__", {}).items() if name[0] != "_")


def _captured(made: Any) -> Iterator[tuple[str, Any]]:
    """What a function or class that another function has made may have from there."""
    if isinstance(made, FunctionType):
        for name, cell in zip(made.__code__.co_freevars, made.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is still empty
                yield name if name != "__class__" else "", cell.cell_contents
        parameters = inspect.signature(made).parameters.values()
        yield from ((one.name, one.default) for one in parameters if one.default is not one.empty)
        return
    yield from (("", base) for base in made.__bases__)
    for name, one in vars(made).items():
        functions = (one.fget, one.fset) if isinstance(one, property) else (getattr(one, "func", one),)
        for function in map(inspect.unwrap, functions):
            if not isinstance(function, FunctionType) or not function.__qualname__.startswith(f"{made.__qualname__}."):
                yield from [(name, one)] * (name[0] != "_")
            elif function.__code__.co_filename != "<string>":  # else `dataclass` has made it
                yield from _captured(function)


def _is_installed(entry: Any) -> bool:
    """Whether others have written it."""
    module = getattr(entry, "__module__", None) or "builtins"
    return module.partition(".")[0] in sys.stdlib_module_names or bool(INSTALLED & {*Path(_file(module) or "").parts})


def _is_plain(value: object) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(map(_is_plain, value.items()))
    return value is None or isinstance(value, Number | str | bytes)


def _called(value: Any) -> str:
    """The name of a function, or of an object's class, with the package that is installed, whatever module in it has it."""
    name = getattr(value, "__qualname__" if isinstance(value, FunctionType | type) else "__name__", None)
    if name is None:
        name, value = type(value).__qualname__, type(value)
    package = (getattr(value, "__module__", None) or "").partition(".")[0]
    return f"{package}.{name}" if package and _is_installed(value) else name


def _shown(value: Any, named: bool) -> str | None:
    """A value as a line has it; of a function, if it is to be `named`, its name."""
    if callable(value):
        return _called(value) if named else None
    if not _is_plain(value):
        return None
    shown = repr(value)
    return shown if len(shown) <= SHOWN else f"a {type(value).__name__} {hashlib.sha256(shown.encode()).hexdigest()}"


# --------------------------------------------------------------------------------------------------- the text of a module

_READ: dict[str, str] = {}  # texts of files, as they were when something in them was registered


@dataclass(frozen=True)
class _Statement:
    """A statement of a module."""

    text: str
    line: int
    node: ast.AST
    uses: dict[str, set[str]]  # names of the module that it uses, and of each the attributes

    __hash__ = object.__hash__


@dataclass(frozen=True)
class _Page:
    """The text of a module, or of a notebook's cells."""

    text: str
    file: str | None = None  # as an import finds it
    home: Path | None = None  # what lies here or below is the user's, too; None: here
    package: str = ""
    notebook: bool = False

    def binding(self, name: str) -> list[_Statement]:
        """The statements that bind a name; of a notebook, where cells run again, the last one."""
        return _statements(self.text).get(name, [])[-1 if self.notebook else 0 :]


@lru_cache(1024)  # all entries of a module are found in one text
def _statements(text: str) -> dict[str, list[_Statement]]:
    """By the names that they bind, and all of them under ""; empty where the text is no Python."""
    found: dict[str, list[_Statement]] = {}
    try:
        nodes, lines = ast.parse(text).body, text.splitlines()
    except (SyntaxError, ValueError):
        return found
    for node in nodes:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
        source = "\n".join(lines[first - 1 : node.end_lineno])
        statement = _Statement(source, first, node, _uses(source, node))
        for name in dict.fromkeys(["", *_bound(node)]):
            found.setdefault(name, []).append(statement)
    return found


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that a statement of a module binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    else:
        for inner in ast.iter_child_nodes(node):
            yield from _bound(inner)


def _uses(source: str, node: ast.AST) -> dict[str, set[str]]:
    """Names of the module that a statement uses, with attributes. Those of arguments and local variables are others."""
    try:
        table = symtable.symtable(source, "", "exec")
    except SyntaxError:  # it shares its line with another
        return {}
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()} | {*_globals(table)}
    uses: dict[str, set[str]] = {name: set() for name in sorted(names)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id in uses:
            uses[inner.value.id].add(inner.attr)
    return uses


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    for inner in table.get_children():
        yield from (symbol.get_name() for symbol in inner.get_symbols() if symbol.is_global())
        yield from _globals(inner)


def _file(module: str) -> str | None:
    """Of a module that has been imported, the file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return str(Path(file).absolute()) if file and file.endswith(".py") else None


def _lines(file: str) -> str:
    """The text of a file as it is now, or of what was compiled under that name."""
    linecache.checkcache(file)
    return "".join(linecache.getlines(file))


def _page(module: str) -> _Page | None:
    """The page of a module that has been imported from a file."""
    if (file := _file(module)) is None:
        return None
    if file not in _READ:
        _READ[file] = _lines(file)
    text, path = _READ[file], Path(file)
    package = getattr(sys.modules[module], "__package__", None) or ""
    if not package:
        return _Page(text, path.name, path if path.parent.name in INSTALLED else path.parent)
    levels = package.count(".") + 1
    return _Page(text, "/".join(path.parts[-levels - 1 :]), path.parents[levels - 1], package)


# --------------------------------------------------------------------------------------------- where a part is defined


def _place(part: Any) -> tuple[_Page, _Statement] | None:
    """The page and the statement that define a class or function; None where its source cannot be had."""
    name, first = part.__qualname__.partition(".")[0], getattr(getattr(part, "__code__", None), "co_firstlineno", 0)
    for page, resolved in _pages(part):
        if name == "<lambda>":
            if statement := _lambda(page, first):
                return resolved, statement
        elif found := page.binding(name):
            return resolved, found[-1]
    return None


def _pages(part: Any) -> Iterator[tuple[_Page, _Page]]:
    """Pages on which a part may be defined, each with the page that has what it names."""
    functions = [part] if isinstance(part, FunctionType) else [f for f in vars(part).values() if _inside(f, part)]
    compiled = [function.__code__.co_filename for function in functions]  # a cell of a notebook is a file to Python
    main = sys.modules.get(part.__module__)
    if isinstance(cells := getattr(main, "In", None), list) and hasattr(main, "get_ipython"):
        notebook = _Page("\n".join(cell for cell in cells if _statements(cell)), notebook=True)
        yield from ((_Page(_lines(file)), notebook) for file in compiled if part.__qualname__ == "<lambda>")
        yield notebook, notebook
    page = _page(part.__module__)
    if page and (not compiled or _file(part.__module__) in {str(Path(file).absolute()) for file in compiled}):
        yield page, page  # and not a module that merely has the name under which a text was executed
    yield from ((other, other) for other in map(_Page, map(_lines, compiled)))


def _inside(value: object, cls: type) -> bool:
    """Whether it is a function of the class's body, and none that `dataclass` may have made."""
    if not isinstance(value, FunctionType) or not value.__qualname__.startswith(f"{cls.__qualname__}."):
        return False
    return not (is_dataclass(cls) and value.__name__.startswith("__"))


def _lambda(page: _Page, line: int) -> _Statement | None:
    """The functions without a name that begin in that line, without the statement around them, which may start a run."""
    for statement in _statements(page.text).get("", []):
        nodes = [node for node in ast.walk(statement.node) if isinstance(node, ast.Lambda) and node.lineno == line]
        if nodes:
            text = "\n".join(f"({ast.get_source_segment(page.text, node)})" for node in nodes)
            return _Statement(text, line, nodes[0], _uses(text, ast.parse(text)))
    return None


# ------------------------------------------------------------------------------------------------ and what it names


def _gathered(places: list[tuple[_Page, _Statement]]) -> str:
    """The statements at `places` and all that they need, page by page, on each page in its order."""
    chosen: dict[_Page, dict[_Statement, None]] = {}
    waiting = list(places)
    while waiting:
        page, statement = waiting.pop(0)
        here = chosen.setdefault(page, {})
        if statement in here:
            continue
        here[statement] = None
        for name, attributes in statement.uses.items():
            waiting += [place for one in page.binding(name) for place in _followed(page, one, name, attributes)]
            waiting += [place for one in page.binding("*") for place in _followed(page, one, name, attributes)]
    texts = []
    for number, (page, statements) in enumerate(chosen.items()):
        ordered = [one.text for one in sorted(statements, key=lambda one: one.line)]
        texts.append("\n\n".join([f"# {page.file}"] * bool(number) + ordered))
    return "\n\n\n".join(texts) + "\n"


def _followed(
    page: _Page, statement: _Statement, name: str, attributes: set[str]
) -> Iterator[tuple[_Page, _Statement]]:
    """The statement that binds a name and, where it imports it from a module of the user's, what binds it there."""
    node = statement.node
    if not isinstance(node, ast.Import | ast.ImportFrom):
        yield page, statement
        return
    starred = node.names[0].name == "*"
    if not starred:
        yield page, statement
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            parents = page.package.split(".")
            above = parents[: len(parents) + 1 - node.level] if node.level else []
            module, wanted = ".".join([*above, *filter(None, [node.module])]), name if starred else alias.name
            inner = f"{module}.{wanted}"
            found = [(inner, attributes)] if inner in sys.modules else [(module, {wanted})]
        else:
            found = [(alias.name, attributes)]
        if starred or (alias.asname or alias.name.partition(".")[0]) == name:
            for module, names in found:
                for there, one, attribute in _bound_in(page, module, names):
                    yield from [(page, statement)] * starred
                    yield from _followed(there, one, attribute, set())


def _bound_in(page: _Page, module: str, names: set[str]) -> Iterator[tuple[_Page, _Statement, str]]:
    """The statements that bind these names of a module; none where it is not the user's."""
    there = _page(module) if module.partition(".")[0] not in sys.stdlib_module_names else None
    home = page.home or Path.cwd()
    file = Path(_file(module) or "/")
    if there is None or not file.is_relative_to(home) or INSTALLED & {*file.relative_to(home).parts}:
        return
    for name in sorted(names):
        yield from ((there, one, name) for one in there.binding(name))
