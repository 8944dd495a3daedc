"""`local.precision`: training steps in bfloat16 or float16, everything else in fp32."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import simulate, tiny
from runs import local_run

from raysim import machine
from raysim.config import ConfigError, check_unchanged
from raysim.core.local_run import LocalRun
from raysim.core.task import Classification
from raysim.engine.ray.placement import PlacementError
from raysim.federation.remote import session
from raysim.store.atomic import write_json

needs_bf16 = pytest.mark.skipif(not machine.computes_bf16(), reason="this CPU has no instructions for bfloat16")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
BF16, FP16 = {"local": {"precision": "bf16"}}, {"local": {"precision": "fp16"}}


@needs_bf16
def test_steps_are_rounded_and_what_is_kept_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.dtype, ...]] = []
    gradient = LocalRun.gradient

    def watched(run: LocalRun, x: torch.Tensor, y: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        loss = gradient(run, x, y, *args, **kwargs)  # type: ignore[arg-type]
        seen.append((loss.dtype, run.grad.dtype, run.value.dtype, run.buffers.dtype))
        return loss

    monkeypatch.setattr(LocalRun, "gradient", watched)
    low = simulate(tiny(**BF16), tmp_path / "bf16")
    assert set(seen) == {(torch.float32,) * 4}
    full = simulate(tiny(), tmp_path / "fp32")
    difference = (low.server.value - full.server.value).norm() / full.server.value.norm()
    assert 1e-5 < difference < 0.2  # bfloat16 has 8 bits


@needs_bf16
def test_bits_do_not_depend_on_packing(tmp_path: Path, warm_ray: object) -> None:
    local = simulate(tiny(**BF16), tmp_path / "local")
    for clients in (1, 2):
        engine = {"ray": {"clients_per_actor": clients}}
        ray = simulate(tiny(**BF16, engine=engine), tmp_path / str(clients), make_engine=warm_ray)  # type: ignore[arg-type]
        assert ray.sha256() == local.sha256()


def test_it_is_a_part_of_the_bits_and_refused_where_it_is_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(tiny(rounds={"total": 1}), tmp_path)
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
            simulate(tiny(**BF16), tmp_path / "refused")


@dataclass(frozen=True)
class Scaled(Classification):
    """Cross-entropy times a factor."""

    factor: float = 1.0

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.factor * super().losses(outputs, y)


def gradient(precision: str, factor: float, scale: float = 65536.0) -> tuple[torch.Tensor, LocalRun]:
    run = local_run([], precision=precision)
    run.task, run.loss_scale = Scaled(factor=factor), scale
    run.receive()
    run.gradient(*run.data.train)
    return run.grad / factor, run


@pytest.mark.parametrize(("power", "halved"), [(-20, False), (12, True)])
def test_gradients_fit_into_float16(power: int, halved: bool) -> None:
    """Those of a loss times 2^-20 lie below its smallest number, those of one times 2^12 and of the first scale above its
    largest; and a power of two changes no digit."""
    plain, run = gradient("fp16", 1.0)
    full, _ = gradient("fp32", 1.0)
    head = run.layers.span("head")  # of the layers below, a unit may fall to the other side of ReLU's kink
    assert 0 < (plain[head] - full[head]).norm() < 0.01 * full[head].norm()
    assert run.loss_scale == 65536
    scaled, run = gradient("fp16", 2.0**power)
    torch.testing.assert_close(scaled, plain, rtol=0.01, atol=1e-4)
    assert (run.loss_scale < 65536) == halved
    unscaled, _ = gradient("fp16", 2.0**power, scale=1.0)
    assert ((unscaled - plain).norm() > plain.norm()) == (power < 0)


def test_a_loss_that_is_no_number_ends_the_search_for_a_scale() -> None:
    run = local_run([], precision="fp16")
    run.task = Scaled(factor=float("inf"))
    run.receive()
    assert not run.gradient(*run.data.train).isfinite()
    assert run.loss_scale == 65536


@no_gpu
def test_a_gpu_that_is_asked_for_and_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device: cuda, but PyTorch finds no GPU"):
        simulate(tiny(engine={"local": {"device": "cuda"}}), tmp_path)


@no_gpu
@pytest.mark.parametrize(
    ("local", "engine", "why"),
    [(FP16["local"], {}, "fp16 is for GPUs"), ({}, {"cuda_graphs": True}, "cuda_graphs is for GPUs")],
)
def test_what_is_for_gpus_is_refused_where_clients_train_on_cpus(
    local: dict[str, Any], engine: dict[str, Any], why: str, tmp_path: Path, warm_ray: object
) -> None:
    for choice in ({"local": engine}, {"local": {"device": "cpu", **engine}}, {"ray": {"gpu_per_client": 0, **engine}}):
        with pytest.raises(ConfigError, match=why):
            simulate(tiny(local=local, engine=choice), tmp_path / "refused")
    with pytest.raises(ConfigError, match=why), session(tiny(local=local, engine={"ray": engine})):
        pass
    with pytest.raises(PlacementError, match=why):  # of a cluster that has none
        simulate(tiny(local=local, engine={"ray": engine}), tmp_path / "placed", make_engine=warm_ray)  # type: ignore[arg-type]
