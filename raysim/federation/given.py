"""The files that a run reads besides its data. A run that is resumed reads what it began with, or stops."""

from __future__ import annotations

import hashlib
from pathlib import Path

from raysim.config import Config, ConfigError
from raysim.store.manifest import read_manifest


def given_sha256(config: Config) -> dict[str, str]:
    """Hashes of the files, by the setting that names them."""
    return {setting: " ".join(map(_sha256, files)) for setting, files in _given(config).items()}


def check_given(folder: Path, config: Config) -> None:
    """Raises `ConfigError` where a file is not as the run in the folder read it. A run needs them as long as it is run: clients
    that have not taken part yet may begin with what `model.init` holds."""
    manifest, now = read_manifest(folder), given_sha256(config)
    was = manifest.get("given_sha256") or {"model.init": manifest.get("init_sha256")}  # as an older raysim wrote it
    changed = [setting for setting, sha256 in was.items() if sha256 not in (None, now.get(setting))]
    if changed:
        raise ConfigError(
            [
                f"{setting}: {', '.join(_given(config).get(setting, ()))} is not what the run in {folder} began with. "
                "Put it back, or start another run."
                for setting in changed
            ]
        )


def _given(config: Config) -> dict[str, tuple[str, ...]]:
    return ({"model.init": (config.model.init,)} if config.model.init else {}) | config.clock.files()


def _sha256(file: str) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
