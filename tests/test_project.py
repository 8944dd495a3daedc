"""What the project says of itself: its dependencies are what it imports, its versions agree, its commands exist."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import raysim

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# What an extra is for: the modules that import it may fail without it, with a sentence that names the extra.
OPTIONAL = {"report", "analysis", "tensorboard", "mlflow", "wandb", "tune", "fuzz", "onnx"}

PEERS = {"blazefl", "flwr", "pfl"}  # simulators that a benchmark runs in environments of their own


def plain(requirement: str) -> str:
    """The distribution of `ray[default]>=2.40`, spelled as package indexes compare names."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def imported(folder: Path) -> Iterator[tuple[str, str]]:
    """File and top-level module of every import, those inside functions too."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [str(node.module)]
            for module in modules:
                yield str(path.relative_to(ROOT)), module.partition(".")[0]


installed = cache(packages_distributions)  # module -> distributions


def distributions(module: str) -> set[str]:
    absent = ["mlflow-skinny"] if module == "mlflow" else [module]
    return {plain(name) for name in installed().get(module, absent)}


def test_what_is_imported_is_declared(subtests: pytest.Subtests) -> None:
    extras = PROJECT["optional-dependencies"]
    of_use = {plain(one) for one in PROJECT["dependencies"]}
    of_use |= {plain(one) for extra in OPTIONAL for one in extras[extra]}
    of_development = of_use | {plain(one) for one in extras["dev"]}
    own = {"raysim", *sys.stdlib_module_names}
    near = own | {
        path.stem for top in ("tests", "benchmarks") for path in (ROOT / top).rglob("*")
    }  # their folders, too
    for folder, allowed, known in (
        ("raysim", of_use, own),
        ("tests", of_development, near),
        ("benchmarks", of_development, near | PEERS),
    ):
        with subtests.test(folder):
            found = imported(ROOT / folder)
            assert {(file, m) for file, m in found if m not in known and not distributions(m) & allowed} == set()


def test_every_required_package_is_imported() -> None:
    """Save torchvision, by whose release pip finds the torch that fits, and what only builds or runs the others."""
    found = {name for _, module in imported(ROOT / "raysim") for name in distributions(module)}
    assert {plain(one) for one in PROJECT["dependencies"]} <= found


def test_the_extras_of_development_are_those_of_use() -> None:
    """Except for services that tests replace by stand-ins, and the fuzzer, which they do not need."""
    extras = PROJECT["optional-dependencies"]
    of_use = {one for name in OPTIONAL - {"mlflow", "wandb", "fuzz"} for one in extras[name]}
    assert of_use <= set(extras["dev"])


def test_versions_agree() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == raysim.__version__
    assert cited["license"] == PROJECT["license"]
    assert f"## [{raysim.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {lowest}" in PROJECT["classifiers"]


def test_workflows_try_every_python_of_the_classifiers_and_a_browser() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    named = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)}
    assert set(workflow["jobs"]["test"]["strategy"]["matrix"]["python"]) == named
    assert workflow["env"]["RAYSIM_REQUIRE_BROWSER"] == "1"  # see tests/browser.py


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_does_what_the_readme_says_for_pip(tmp_path: Path) -> None:
    command = ["make", "-n", "quickstart", "test", "TORCH=cpu", f"VENV={tmp_path / 'new'}"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [block] = re.findall(r"^```bash\npython3 -m venv.*\n((?:.+\n)+)```", (ROOT / "README.md").read_text("utf-8"), re.M)
    commands = [re.split(r"  +#", line)[0].removeprefix("pip install ") for line in block.splitlines()]
    assert len(commands) == 4
    assert [command for command in commands if command not in made] == []


def test_pages_name_files_that_exist(subtests: pytest.Subtests) -> None:
    for page in ("CONTRIBUTING.md", "CHANGELOG.md", "docs/decisions/README.md"):
        with subtests.test(page):
            path = ROOT / page
            text = path.read_text(encoding="utf-8")
            links = re.findall(r"\]\((?!http)([^)#]+)\)", text)
            assert [link for link in links if not (path.parent / link).exists()] == []
            named = set(re.findall(r"`((?:raysim|tests|benchmarks|docs|configs)/[\w/.]+)`", text))
            assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_decisions_are_numbered_and_listed() -> None:
    pages = sorted(path.name for path in (ROOT / "docs/decisions").glob("[0-9]*.md"))
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    listed = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
    for name in pages:
        text = (ROOT / "docs/decisions" / name).read_text(encoding="utf-8")
        assert f"({name})" in listed, name
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"], name
