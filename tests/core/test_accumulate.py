"""`local.accumulate`: a step in several passes is the step of one large batch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import simulate, tiny
from runs import local_run
from torch import nn

from raysim.config import ConfigError
from raysim.core.client import ClientMethod
from raysim.methods.ditto import Ditto
from raysim.methods.fedprox import FedProx
from raysim.methods.perfedavg import PerFedAvg
from raysim.methods.scaffold import SCAFFOLD
from raysim.models import MODELS, Inputs
from raysim.models.own import builder_of


@pytest.mark.parametrize("pass_size", [5, 8, 24])
@pytest.mark.parametrize("method", [FedProx(mu=0.5), PerFedAvg(), Ditto()], ids=lambda m: type(m).__name__)
def test_passes_add_up_to_the_step_of_their_samples(method: ClientMethod, pass_size: int) -> None:
    """In float64. Of 50 samples the last step has 2, and of 24 at a time in fives the last pass has 4."""
    runs = [
        local_run(
            [method], samples=50, batch_size=24, epochs=2, clip=0.4, pass_size=size, name="adamw", weight_decay=0.1
        )
        for size in (None, pass_size)
    ]
    for run in runs:
        run.stack.start(run)
        run.stack.train(run)
    whole, parts = runs
    torch.testing.assert_close(parts.params, whole.params, rtol=1e-10, atol=1e-12)
    assert parts.steps == whole.steps == 2 * math.ceil(50 / (24 * whole.stack.batches_per_step))
    for mine, theirs in zip(parts.losses, whole.losses, strict=True):
        assert [n for _, n in mine] == [n for _, n in theirs]
        torch.testing.assert_close([loss for loss, _ in mine], [loss for loss, _ in theirs], rtol=1e-10, atol=1e-12)


def test_a_setting_and_its_large_batch_are_one_run(tmp_path: Path) -> None:
    models = [
        simulate(
            tiny(model={"name": "mlp"}, client=[SCAFFOLD()], local={**local, **PLAIN}), tmp_path / str(i)
        ).server.value
        for i, local in enumerate(({"batch_size": 4, "accumulate": 3}, {"batch_size": 12}))
    ]
    torch.testing.assert_close(*models, rtol=1e-4, atol=1e-6)


PLAIN = {"momentum": 0.0, "weight_decay": 0.0}  # SCAFFOLD's steps are those of plain SGD


def test_a_pass_of_one_sample_is_found_before_batchnorm_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients of 9 samples: a step of 8 in passes of 4 leaves one, and so do passes of 4 in one step; 3 x 3 does not."""

    def normed(inputs: Inputs) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, inputs.classes))

    monkeypatch.setitem(MODELS, "normed", builder_of(normed))
    clients = {
        "name": {"synthetic": {"samples": 18, "shape": [3], "classes": 2}},
        "partition": {"iid_equal": {"clients": 2}},
    }
    changes = {"data": clients, "model": {"name": "normed"}}
    assert (
        simulate(tiny(**changes, local={"batch_size": 3, "accumulate": 3}), tmp_path / "fits")
        .server.value.isfinite()
        .all()
    )
    for local in ({"batch_size": 4, "accumulate": 2}, {"batch_size": 4, "accumulate": 3}):
        with pytest.raises(ConfigError, match="would train on a batch of one sample"):
            simulate(tiny(**changes, local=local), tmp_path / "lone")
