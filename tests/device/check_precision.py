"""Float16 on the emulated device: a run trains, near the one in fp32."""

from __future__ import annotations

from pathlib import Path

import torch
from conftest import simulate, tiny
from device import emulated

emulated.install()


def test_float16_trains_near_fp32(tmp_path: Path) -> None:
    runs = [
        simulate(tiny(local={"precision": precision}, engine={"local": {"device": "cuda"}}), tmp_path / precision)
        for precision in ("fp16", "fp32")
    ]
    low, full = (run.server.value for run in runs)
    assert low.dtype == torch.float32
    assert 1e-5 < (low - full).norm() / full.norm() < 0.2
