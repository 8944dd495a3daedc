"""A saved run that goes on with other settings: more rounds, or what no bit of the result depends on."""

from __future__ import annotations

from pathlib import Path

from raysim.config import STACKS, Config, ConfigError, check_unchanged, fingerprint, load, name_in, to_yaml
from raysim.store.atomic import replacing, write_json
from raysim.store.documents import read_result
from raysim.store.manifest import read_manifest


def check_extension(config: Config, folder: Path) -> None:
    """Raises `ConfigError` where `config` would not continue the run in `folder` to the bits of a run that had it from
    the start."""
    check_unchanged(config, folder)
    total = load(folder / "config.yaml").rounds.total
    if config.rounds.total != total and (names := reads_total_rounds(config)):
        raise ConfigError(
            f"rounds.total: {' and '.join(names)} computes with the number of rounds, so a run of {total} is not the "
            f"beginning of one of {config.rounds.total}. Start another run."
        )


def reads_total_rounds(config: Config) -> list[str]:
    """Names of the run's methods whose arithmetic depends on `rounds.total`, as they declare."""
    found = [(STACKS[stack].entries, method) for stack in STACKS for method in getattr(config, stack)]
    return [name_in(entries, method) for entries, method in found if method.reads_total_rounds]


def rewrite(config: Config, folder: Path) -> None:
    """Let the folder of a run that goes on tell of `config`, and no more of an end that is not one any longer."""
    described = read_manifest(folder)
    if described.get("config_hash") != fingerprint(config):
        with replacing(folder / "config.yaml") as path:
            path.write_text(to_yaml(config), encoding="utf-8")
        write_json(folder / "manifest.json", described | {"config_hash": fingerprint(config)})
    result = read_result(folder)
    if result is not None and result["rounds"] != config.rounds.total:
        (folder / "result.json").unlink()
        (folder / "model.safetensors").unlink(missing_ok=True)
