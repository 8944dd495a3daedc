"""The manifest describes the machine, and nobody."""

import socket
from pathlib import Path

import pytest

import raysim
from raysim.store.atomic import write_json
from raysim.store.manifest import DamagedManifest, manifest, read_manifest

ROOT = Path(raysim.__file__).parents[1]


def test_a_manifest_is_read_back_or_refused(tmp_path):
    assert read_manifest(tmp_path) == {}
    for text in ("{", "[]"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(DamagedManifest, match="is damaged"):
            read_manifest(tmp_path)


def test_manifest_describes_the_machine_and_nobody(tmp_path):
    described = manifest("abc", 8, {"partition_hash": "def"})
    write_json(tmp_path / "manifest.json", described)
    assert read_manifest(tmp_path) == described
    text = (tmp_path / "manifest.json").read_text()
    assert described["seed"] == 8
    assert described["partition_hash"] == "def"
    assert {"python", "torch", "numpy", "pyarrow"} <= described["versions"].keys()
    assert described["hardware"]["cores"] >= 1
    assert described["hardware"]["memory_bytes"] > 0
    assert not any(private in text for private in (str(Path.home()), str(ROOT), socket.gethostname()))
