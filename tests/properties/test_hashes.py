"""The bits of every method's case (test_case.py) and of a traced run, as they were before the package was rebuilt.

They hold for one version of PyTorch on one type of CPU. What tells this type from others is how it rounds: another one
has another `rounding`, and there the comparison between engines has to do.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import simulate, tiny
from torch import nn

KNOWN: dict[str, Any] = json.loads(Path(__file__).with_name("hashes.json").read_text())
SCAFFOLD = {"client": ["scaffold"], "local": {"momentum": 0.0, "weight_decay": 0.0}}


@cache
def rounding() -> str:
    """How this machine adds: a hash of a network's gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 64), nn.Linear(64, 10))
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(32, 3, 16, 16).contiguous(memory_format=torch.channels_last)
    nn.functional.cross_entropy(model(x), torch.arange(32) % 10).backward()
    grads = b"".join(p.grad.contiguous().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(torch.__version__.encode() + grads).hexdigest()


def known(name: str) -> str:
    """The hash of this name on this machine. Skips the test where none is known."""
    bits = KNOWN.get(rounding(), {}).get(name)
    if bits is None:
        pytest.skip(f"no hash of {name} is known for PyTorch {torch.__version__} on this type of CPU")
    return bits


def test_a_traced_run_and_its_files(tmp_path: Path) -> None:
    federation = simulate(tiny(**SCAFFOLD, record={"traces": "rounds"}), tmp_path / "traced")
    assert federation.sha256() == known("traced")
    digest = hashlib.sha256()
    for path in sorted((tmp_path / "traced" / "traces").rglob("*.safetensors")):
        number = int(path.parent.name.removeprefix("round-")) - 1  # the digest is known of folders that count from 0
        digest.update(f"traced/trace/round-{number:04d}/{path.name}".encode() + path.read_bytes())
    assert digest.hexdigest() == known("traced files")
