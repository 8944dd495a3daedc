"""Who may import whom (see the packages' docstrings), read off the source; and what a process must not load."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import tiny

import raysim
from raysim.engine.ray.ray_engine import ray_engine
from raysim.federation.federation import Federation
from raysim.methods import CLIENTS, STEPS, WEIGHTINGS

ROOT = Path(raysim.__file__).parent

# Each part and the parts it may import, itself apart. Parts are packages, or modules at the top.
MAY_IMPORT = {
    "core": set(),
    "store": set(),
    "data": {"core"},
    "models": {"core"},
    "methods": {"core"},
    "analysis": {"core", "store"},
    "host": {"core", "data", "models", "engine"},
    "engine": {"core", "data", "models", "host"},
    "report": {"store"},
    "__init__": {"report"},
}
ABOVE = {"config", "federation", "sweep", "cli", "__main__"}
MAY_IMPORT |= dict.fromkeys(ABOVE, frozenset({*MAY_IMPORT, *ABOVE}))
# A saved run is brought back by what played it.
MAY_IMPORT["analysis/saved"] = {"core", "store", "host", "engine", "config", "federation"}
# The Ray engine stands between a configuration and a federation that it puts into an actor.
MAY_IMPORT["engine/ray/ray_engine"] = MAY_IMPORT["engine"] | {"engine", "config", "federation"}


def modules() -> Iterator[tuple[str, str, ast.Module]]:
    """Part, path and syntax tree of every file of the package."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        part = name if name in MAY_IMPORT else name.partition("/")[0]
        yield part, name, ast.parse(path.read_text())


def imported(tree: ast.AST, typing: bool = False) -> Iterator[str]:
    """Dotted names of imported modules, those inside functions too; without `typing`, not those of TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imported(node, typing)


def parts_of(names: Iterator[str]) -> set[str]:
    """Parts of the package among them."""
    below = {name.split(".")[1] for name in names if name.startswith("raysim.")}
    return below & {*MAY_IMPORT}


@pytest.mark.parametrize(("part", "name", "tree"), [pytest.param(*module, id=module[1]) for module in modules()])
def test_imports(part, name, tree):
    assert part in MAY_IMPORT, f"{name} belongs to no part: say in MAY_IMPORT what it may import"
    own = {part.partition("/")[0]}
    assert parts_of(imported(tree)) - own <= MAY_IMPORT[part]
    # For types alone, methods may also name the configuration, which they check, and instruments the round they see.
    assert parts_of(imported(tree, typing=True)) - own <= MAY_IMPORT[part] | {"config", "federation", "engine"}


def test_only_the_engine_and_the_search_import_ray():
    found = {name for _, name, tree in modules() for module in imported(tree, True) if re.match(r"ray(\.|$)", module)}
    assert found == {"engine/ray/ray_engine", "sweep/tune"}


def test_core_and_methods_need_torch_numpy_and_annotations_alone():
    allowed = {"torch", "numpy", "annotated_types", "raysim", *sys.stdlib_module_names}
    for part, name, tree in modules():
        if part in ("core", "methods"):
            assert {module.partition(".")[0] for module in imported(tree)} <= allowed, name


def test_every_method_names_its_paper():
    """In the file's first line, `Name: Title (Authors, year)` or the like; and in what `raysim list methods` prints."""
    for part, name, tree in modules():
        if part == "methods" and name != "methods/__init__":
            first = (ast.get_docstring(tree) or "").partition("\n")[0]
            assert re.search(r"\b(19|20)\d\d\b", first), f"{name}: {first!r} names no paper"
    for catalogue in (CLIENTS, WEIGHTINGS, STEPS):
        for name, method in catalogue.items():
            assert method.__doc__, name
            assert not method.__doc__.startswith(f"{method.__name__}("), f"{name} has no docstring of its own"


def test_each_file_of_methods_is_in_the_catalogue():
    files = {path.stem for path in (ROOT / "methods").glob("[a-z]*.py")}
    listed = {m.__module__.rpartition(".")[2] for c in (CLIENTS, WEIGHTINGS, STEPS) for m in c.values()}
    assert files == listed


HEAVY = ("torchvision", "sklearn", "matplotlib", "pandas", "PIL", "sympy")


def test_importing_everything_loads_nothing_heavy():
    """Every module but the command line, in a process of its own."""
    names = [name for _, name, _ in modules() if not name.startswith("report")]
    dotted = [f"raysim.{name.removesuffix('/__init__').replace('/', '.')}" for name in names if name != "__init__"]
    code = f"import sys, importlib\nfor name in {dotted}: importlib.import_module(name)\n"
    code += f"print(sorted(set({HEAVY}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_an_actor_that_trains_loads_nothing_heavy(tmp_path, cluster):
    """Fresh actors: those of other tests may have been asked for a torchvision model. L-DAWA takes layers' products."""
    import ray

    config = tiny(engine={"ray": {"clients_per_actor": 3}}, weighting=["ldawa"])
    federation = Federation(config, tmp_path, make_engine=ray_engine)
    federation.step()
    [host] = federation.engine.hosts
    loaded = set(ray.get(host.__ray_call__.remote(lambda _: list(sys.modules))))
    federation.close()
    assert "torch" in loaded
    assert not loaded & set(HEAVY)
