"""The configurations that come with raysim: in its folder when it was installed from a wheel, beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

from raysim.config.messages import nearest
from raysim.errors import ConfigError
from raysim.paths import command


def folder() -> Path:
    """Where they are. Raises `ConfigError` where the installation has none."""
    package = Path(__file__).parents[1]
    for place in (package / "configs", package.parent / "configs"):
        if (place / "quickstart.yaml").is_file():
            return place
    raise ConfigError(f"{package}: this installation of raysim has no configurations. Install it again with pip.")


def find(name: str | Path) -> Path:
    """The configuration `name`: a file of that path or, where there is none, one that comes with raysim, such as
    `quickstart` or `fedlws/table1`. Raises `ConfigError` where there is neither."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = folder()
    if path.suffix in (".yaml", ".yml"):
        inner = Path(*path.parts[1:]) if path.parts[0] == "configs" else path
        if not path.exists() and (shipped / inner).is_file():
            known = inner.with_suffix("").as_posix()
            raise ConfigError(f"{name}: no such file. raysim brings it along under the name {known}.")
        return path  # its reader says what is wrong with it
    if (found := shipped / f"{name}.yaml").is_file():
        return found
    if path.is_dir():
        raise ConfigError(f"{name}: {_inside(path)}")
    names = [one.relative_to(shipped).with_suffix("").as_posix() for one in shipped.rglob("*.yaml")]
    hint = nearest(name, names, listed=False)
    raise ConfigError(f"{name}: no such file, and no configuration of that name comes with raysim.{hint}")


def _inside(folder: Path) -> str:
    """What a folder that stands for a configuration has in it, and what to write instead."""
    if (folder / "manifest.json").is_file():
        return f"is the folder of a run. {command('resume', folder)} continues it."
    files = sorted(folder.glob("*.y*ml"))
    if not files:
        return f"is a folder without a YAML file. {command('init', folder)} writes one."
    return f"is a folder. Name a file in it, such as {files[0]}."
