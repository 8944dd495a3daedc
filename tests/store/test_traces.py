"""Traces hold what they are given."""

import pytest
import torch
from safetensors.torch import load_file

from raysim.store.traces import Trace, read_arrays


def test_trace_writes_what_it_is_given(tmp_path):
    trace = Trace(tmp_path, [3])
    assert [t for t in range(5) if trace.wants(t)] == [2]
    assert Trace(tmp_path, "rounds").wants(7)
    assert not Trace(tmp_path).wants(0)
    with pytest.raises(ValueError, match="'all'"):
        Trace(tmp_path, "all")

    flat = torch.arange(12.0)
    views = {"conv.weight": flat[:6].view(2, 3).T, "conv.bias": flat[4:8], "bn.num_batches_tracked": torch.tensor(5)}
    trace.write(2, "client-0007.init", views)
    back = load_file(tmp_path / "traces/round-0003/client-0007.init.safetensors")
    assert back.keys() == views.keys()
    assert all(torch.equal(back[name], views[name]) and back[name].dtype == views[name].dtype for name in views)

    for steps in ([[4, 1, 2], [], [9]], [], [[]]):
        trace.write_arrays(2, "client-0007.samples", steps)
        assert [step.tolist() for step in read_arrays(trace.path(2, "client-0007.samples"))] == steps
