"""What is set so that a GPU repeats its bits, where it is written down, and who asks for it again."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from conftest import simulate, tiny
from device import emulated

from raysim.config import ConfigError
from raysim.core.layers import LayerMap
from raysim.federation import Federation
from raysim.models import Inputs, build
from raysim.store.manifest import kernels, read_manifest, switches

emulated.install()


def test_a_gpu_is_made_to_repeat_its_bits_and_a_cpu_is_left_alone(tmp_path: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    simulate(tiny(engine={"local": {"device": "cpu"}}), tmp_path / "cpu")
    assert torch.are_deterministic_algorithms_enabled() == before
    assert read_manifest(tmp_path / "cpu")["numerics"] == kernels() | switches()
    simulate(tiny(engine={"local": {"device": "cuda"}}), tmp_path / "cuda")
    found = read_manifest(tmp_path / "cuda")["numerics"]
    assert {key: found[key] for key in ("gpu", "deterministic", "tf32", "cublas_workspace")} == {
        "gpu": "emulated", "deterministic": True, "tf32": False, "cublas_workspace": ":4096:8"
    }  # fmt: skip


def test_a_run_is_not_resumed_on_another_gpu(tmp_path: Path) -> None:
    config = tiny(engine={"local": {"device": "cuda"}}, rounds={"checkpoint_every": 1})
    federation = Federation(config, tmp_path)
    federation.step()
    federation.close()
    manifest = read_manifest(tmp_path)
    manifest["numerics"]["gpu"] = "NVIDIA T4"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="began on NVIDIA T4, and this engine computes on emulated"):
        Federation(config, tmp_path, resume=True)


def test_squares_of_rows_do_not_depend_on_their_neighbours() -> None:
    layers = LayerMap.of(build("tiny_bn_cnn", Inputs((1, 8, 8), 4)))
    rows = torch.randn(3, layers.P, device="cuda")
    together = layers.segments.squares(rows)
    for i in range(3):
        assert torch.equal(together[i], layers.segments.squares(rows[i]))
    torch.testing.assert_close(together.cpu(), layers.segments.squares(rows.cpu()), rtol=1e-6, atol=0)


def test_the_benchmark_compares_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    found = importlib.import_module("gpu").agreement("fedala")
    assert found["same_bits"] and found["apart"] < 1e-6
