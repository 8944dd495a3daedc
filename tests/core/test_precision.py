"""`local.precision: bf16`: training steps in bfloat16, everything else in fp32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import play, tiny

from raysim import machine
from raysim.config import ConfigError, check_unchanged
from raysim.core.local_run import LocalRun
from raysim.store.atomic import write_json

needs_bf16 = pytest.mark.skipif(not machine.computes_bf16(), reason="this CPU has no instructions for bfloat16")
BF16 = {"local": {"precision": "bf16"}}


@needs_bf16
def test_steps_are_rounded_and_what_is_kept_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.dtype, ...]] = []
    gradient = LocalRun.gradient

    def watched(run: LocalRun, x: torch.Tensor, y: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        loss = gradient(run, x, y, *args, **kwargs)  # type: ignore[arg-type]
        seen.append((loss.dtype, run.grad.dtype, run.value.dtype, run.buffers.dtype))
        return loss

    monkeypatch.setattr(LocalRun, "gradient", watched)
    low = play(tiny(**BF16), tmp_path / "bf16")
    assert set(seen) == {(torch.float32,) * 4}
    full = play(tiny(), tmp_path / "fp32")
    difference = (low.server.value - full.server.value).norm() / full.server.value.norm()
    assert 1e-5 < difference < 0.2  # bfloat16 has 8 bits


@needs_bf16
def test_bits_do_not_depend_on_packing(tmp_path: Path, warm_ray: object) -> None:
    local = play(tiny(**BF16), tmp_path / "local")
    for clients in (1, 2):
        engine = {"ray": {"clients_per_actor": clients}}
        ray = play(tiny(**BF16, engine=engine), tmp_path / str(clients), make_engine=warm_ray)  # type: ignore[arg-type]
        assert ray.sha256() == local.sha256()


def test_it_is_a_part_of_the_bits_and_refused_where_it_is_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tiny(rounds={"total": 1}), tmp_path)
    with pytest.raises(ConfigError, match=r'local\.precision was "fp32" when the run began'):
        check_unchanged(tiny(**BF16), tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["settings"]["local"]["precision"]  # as a raysim without it wrote
    write_json(tmp_path / "manifest.json", manifest)
    check_unchanged(tiny(), tmp_path)
    with pytest.raises(ConfigError, match=r'local\.precision was "fp32"'):
        check_unchanged(tiny(**BF16), tmp_path)
    monkeypatch.setattr(machine, "computes_bf16", lambda: False)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="this CPU only emulates bf16"):
            play(tiny(**BF16), tmp_path / "refused")
