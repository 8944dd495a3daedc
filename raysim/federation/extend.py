"""A saved run that goes on with other settings: more rounds, or what no bit of the result depends on."""

from __future__ import annotations

import os
from pathlib import Path

from raysim.config import Config, fingerprint, to_yaml
from raysim.federation.code import definitions_in
from raysim.store.atomic import remove, replacing, write_json
from raysim.store.code import record
from raysim.store.documents import read_result
from raysim.store.manifest import read_manifest


def rewrite(config: Config, folder: Path) -> None:
    """Update the folder of a resumed run: write `config` and the user's code as it is now, drop the old result."""
    described = read_manifest(folder)
    code = record(folder, definitions_in(config, folder), described.get("code", ()))
    if code != described.get("code"):
        described["code"] = code
        write_json(folder / "manifest.json", described)
    if described.get("config_hash") != fingerprint(config):
        before = (folder / "config.yaml").stat()
        with replacing(folder / "config.yaml") as path:
            path.write_text(to_yaml(config), encoding="utf-8")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # which say when the run began
        write_json(folder / "manifest.json", described | {"config_hash": fingerprint(config)})
    result = read_result(folder)
    if result is not None and result["rounds"] != config.rounds.total:
        remove(folder / "result.json")
        remove(folder / "model.safetensors")
