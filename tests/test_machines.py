"""What processes compute with is written down, and what has changed since a run began is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from command import Command
from conftest import simulate, table, tiny

from raysim.config import to_yaml
from raysim.engine.local import LocalEngine
from raysim.federation.machines import warn_of_changes
from raysim.host.device import numerics
from raysim.store.manifest import SWITCHES, manifest, read_manifest


def test_every_switch_of_a_process_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
        assert numerics(torch.device("cpu"))[name] is None
        monkeypatch.setenv(name, f"of {name}")
        assert numerics(torch.device("cpu"))[name] == manifest("", 0, {})["hardware"]["switches"][name] == f"of {name}"


def test_a_run_under_another_switch_is_named_on_resume(tmp_path: Path) -> None:
    """The real command line, with oneDNN held to AVX2, then without, then as before."""
    file, run = tmp_path / "tiny.yaml", tmp_path / "run"
    file.write_text(to_yaml(tiny(rounds={"total": 1})))
    began = Command("run", file, "--out", run, ONEDNN_MAX_CPU_ISA="AVX2", MKL_CBWR="COMPATIBLE")
    assert began.end() == 0
    assert read_manifest(run)["numerics"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    changed = Command("resume", run, "rounds.total=2", DNNL_DEFAULT_FPMATH_MODE="BF16")
    assert changed.end() == 0
    said = [line for line in changed.err.splitlines() if "the run began with" in line]
    doubt = "; bits may differ from those of a run that was not stopped"
    assert said == [
        f"raysim: the run began with ONEDNN_MAX_CPU_ISA AVX2, and now it is not set{doubt}",
        f"raysim: the run began with DNNL_DEFAULT_FPMATH_MODE not set, and now it is BF16{doubt}",
        f"raysim: the run began with MKL_CBWR COMPATIBLE, and now it is not set{doubt}",
    ]
    same = Command("resume", run, "rounds.total=3", ONEDNN_MAX_CPU_ISA="AVX2", MKL_CBWR="COMPATIBLE")
    assert same.end() == 0
    assert "the run began with" not in same.err


def test_hosts_count_as_well_as_the_driver_and_what_was_not_written_down_does_not(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    simulate(tiny(rounds={"total": 1}), tmp_path)
    about = read_manifest(tmp_path)
    now = about["numerics"]
    warn_of_changes(tmp_path, now)
    del about["hardware"]["switches"], about["hardware"]["cpu"], about["numerics"]["MKL_CBWR"]  # as an older raysim
    (tmp_path / "manifest.json").write_text(json.dumps(about))
    warn_of_changes(tmp_path, now)
    (tmp_path / "manifest.json").write_text(json.dumps({"numerics": {}}))
    warn_of_changes(tmp_path, now)
    assert not recwarn.list
    (tmp_path / "manifest.json").write_text(json.dumps(about))
    with pytest.warns(UserWarning, match="began with cpu_capability .*, and now it is AVX512 of another host"):
        warn_of_changes(tmp_path, now | {"cpu_capability": "AVX512 of another host"})


def test_hosts_that_differ_are_named_at_the_start_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here as answers that are put in their place; tests/engine/test_cluster.py has nodes of two environments."""
    hosts = [{"cpu": "A", "MKL_CBWR": None}, {"cpu": "A", "MKL_CBWR": "AVX2"}, {"cpu": "B", "MKL_CBWR": None}]
    monkeypatch.setattr(LocalEngine, "numerics", lambda self: hosts)
    how = r"differ in what they compute with \(cpu: A, B; MKL_CBWR: not set, AVX2\)"
    with pytest.warns(UserWarning, match=how):
        federation = simulate(tiny(), tmp_path)
    assert read_manifest(tmp_path)["numerics"] == {}  # what is alike
    [event] = table(federation.folder, "events")["message"]
    assert re.search(how, event)
