"""Who may import whom, read off the source; and what a process must not load."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from conftest import tiny

import raysim
from raysim.federation import Federation
from raysim.methods import ATTACKS, CLIENTS, SELECTIONS, STEPS, TRANSFORMS, WEIGHTINGS

ROOT = Path(raysim.__file__).parent

# Packages from the ground up: a file may import its own package and those of lower floors. Imports inside functions
# count. Those for types alone do not: they say what a function is given, load nothing and cannot make a circle.
FLOORS = (
    {"definition", "errors"},
    {"clock", "lazy", "machine", "paths", "printable", "ray_variables", "registry", "version"},
    {"core", "store"},
    {"data", "models", "methods", "analysis"},
    {"host", "report"},
    {"engine"},
    {"config", "plugins"},
    {"federation"},
    {"api"},
    {"sweep"},
    {"cli", "__init__"},
    {"__main__"},
)
FLOOR = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of every file of the package, by its dotted name without `raysim.`."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(ROOT.rglob("*.py"))}
    return {name.removesuffix(".__init__"): ast.parse(path.read_text()) for path, name in names.items()}


def imported(tree: ast.AST, typing: bool = True) -> Iterator[str]:
    """Dotted names of imported modules; without `typing`, not those of TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name.removeprefix("raysim.") in modules() else str(node.module) for name in names)
        yield from imported(node, typing)


def own(tree: ast.AST) -> set[str]:
    """Files of the package that a file imports, but for types, by their names in `modules`."""
    names = {name.removeprefix("raysim.") for name in imported(tree, typing=False) if re.match(r"raysim(\.|$)", name)}
    assert names <= modules().keys() | {"raysim"}, names - modules().keys()
    return {"__init__" if name == "raysim" else name for name in names}


def test_imports_go_down():
    package = {name: name.partition(".")[0] for name in modules()}
    assert not {name for name, its in package.items() if its not in FLOOR}, "these are in no package with a floor"
    imports = [(name, other) for name, tree in modules().items() for other in own(tree)]
    assert not [(a, b) for a, b in imports if package[a] != package[b] and FLOOR[package[b]] >= FLOOR[package[a]]]


def test_no_file_imports_itself_by_way_of_others():
    sorter = TopologicalSorter({name: own(tree) for name, tree in modules().items()})
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def test_commands_for_people_are_made_for_a_shell():
    """By `raysim.paths.command`: what stands in braces may be a path with a space in it."""
    texts = [
        ast.unparse(node) for tree in modules().values() for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    ]
    assert not [text for text in texts if re.search(r"`raysim [^`]*\{", text)]


def test_only_the_engine_and_the_search_import_ray():
    found = {name for name, tree in modules().items() for module in imported(tree) if re.match(r"ray(\.|$)", module)}
    # A sink publishes the numbers of a run as Ray's metrics.
    assert {name for name in found if not name.startswith("engine.ray.")} == {"sweep.tune", "store.sinks"}


def test_core_and_methods_need_torch_numpy_and_annotations_alone():
    allowed = {"torch", "numpy", "annotated_types", "raysim", *sys.stdlib_module_names}
    for name, tree in modules().items():
        if name.partition(".")[0] in ("core", "methods"):
            assert {module.partition(".")[0] for module in imported(tree, typing=False)} <= allowed, name


def test_what_is_long_says_why():
    """Its docstring does; here it is named, so that nothing joins it unnoticed."""
    long = []
    for path in sorted(Path(raysim.__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        long += [path.name] * (text.count("\n") > 400)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                first = (node.body[1:] if ast.get_docstring(node) else node.body) or [node]
                long += [node.name] * (node.end_lineno - first[0].lineno >= 50)
            if isinstance(node, ast.ClassDef):
                methods = [f for f in node.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")]
                plain = [f for f in methods if not any("property" in ast.unparse(d) for d in f.decorator_list)]
                long += [node.name] * (len(plain) > 15)
    assert long == ["ClientMethod", "Engine", "run_round", "ClientHost"]


def test_every_method_names_its_paper():
    """In the file's first line, `Name: Title (Authors, year)` or the like; and in what `raysim list methods` prints."""
    for name, tree in modules().items():
        if name.startswith("methods."):
            first = (ast.get_docstring(tree) or "").partition("\n")[0]
            assert re.search(r"\b(19|20)\d\d\b", first), f"{name}: {first!r} names no paper"
    for catalogue in (CLIENTS, WEIGHTINGS, STEPS, TRANSFORMS, ATTACKS, SELECTIONS):
        for name, method in catalogue.items():
            assert method.__doc__, name
            assert not method.__doc__.startswith(f"{method.__name__}("), f"{name} has no docstring of its own"
            assert method.__doc__.count("Wrong choice ") == 1, f"{name} does not say where it is the wrong choice"


def test_each_file_of_methods_is_in_the_catalogue():
    files = {path.stem for path in (ROOT / "methods").glob("[a-z]*.py")}
    catalogues = (CLIENTS, WEIGHTINGS, STEPS, TRANSFORMS, ATTACKS, SELECTIONS)
    listed = {m.__module__.rpartition(".")[2] for c in catalogues for m in c.values()}
    assert files == listed - {"selection"}


HEAVY = ("torchvision", "sklearn", "matplotlib", "pandas", "PIL", "sympy")
MODELS = {"models.model", "models.modules", "models.transformer"}  # classes of modules, which their builders import
LATE = {*MODELS, "core.tape"}  # imported where they are used: their classes are PyTorch's


def test_importing_everything_loads_nothing_heavy():
    """PyTorch neither: every file takes it from `late`. In a process of its own."""
    dotted = [f"raysim.{name}" for name in modules() if not name.startswith(("report", "__")) and name not in LATE]
    code = f"import sys, importlib\nfor name in {dotted}: importlib.import_module(name)\n"
    code += f"print(sorted({{*{HEAVY}, 'torch'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_an_actor_that_trains_loads_nothing_heavy(tmp_path, cluster):
    """Fresh actors: those of other tests may have been asked for a torchvision model. L-DAWA takes layers' products."""
    import ray

    from raysim.engine.ray.engine import ray_engine

    config = tiny(engine={"ray": {"clients_per_actor": 3}}, weighting=["ldawa"])
    federation = Federation(config, tmp_path, make_engine=ray_engine)
    federation.step()
    [host] = federation.engine.hosts
    loaded = set(ray.get(host.__ray_call__.remote(lambda _: list(sys.modules))))
    federation.close()
    assert "torch" in loaded
    assert not loaded & set(HEAVY)
