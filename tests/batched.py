"""Clients of unequal sizes who train one by one and together, in float64, on a device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.core.client import ClientMethod
from raysim.core.flat import FlatModel
from raysim.core.local_run import LocalSettings, RoundInfo
from raysim.core.optim import OptimizerSpec
from raysim.core.samples import ClientData, Samples
from raysim.core.task import Classification, Task
from raysim.host.batched_trainer import BatchedTrainer
from raysim.host.download import Download
from raysim.host.messages import ClientResult, HostSpec, TrainRequest
from raysim.host.trainer import Trainer
from raysim.methods import CLIENTS
from raysim.models import Inputs, builder

SIZES = [
    9,
    25,
    4,
    16,
    11,
    25,
]  # in batches of 8: short ones at different times, one of a single sample, none, nothing else
IMAGE = Inputs((1, 8, 8), 4)
METHODS: dict[str, list[ClientMethod]] = {
    "fedavg": [],
    **{
        name: [CLIENTS[name]()]
        for name in ("fedprox", "scaffold", "feddyn", "fedamp", "sgdm", "moon", "fedphp", "fedala")
    },
    "scaffold, mean_grad": [CLIENTS["scaffold"](c_update="mean_grad")],
    "feddyn, adaptive_alpha": [CLIENTS["feddyn"](alpha=0.1, adaptive_alpha=True)],
    "feddyn, unsquared": [CLIENTS["feddyn"](alpha=0.1, unsquared=True)],
    "sgdm, mfl": [CLIENTS["sgdm"](reading="mfl")],
    "several": [CLIENTS[name]() for name in ("fedala", "fedprox", "moon", "fedphp")],
}


class SeededSamples:
    """Samples of `inputs` that are drawn for each client."""

    def __init__(self, inputs: Inputs, sizes: Sequence[int], device: str):
        self.inputs, self.device = inputs, device
        self.partition = SimpleNamespace(sizes=np.array(sizes), train=[np.arange(n) for n in sizes])

    def client(self, client: int) -> ClientData:
        n, stream = int(self.partition.sizes[client]), torch.Generator().manual_seed(client)
        if self.inputs.vocab is None:
            x = torch.randn(n, *self.inputs.shape, dtype=torch.float64, generator=stream)
        else:
            x = torch.randint(self.inputs.vocab, (n, *self.inputs.shape), generator=stream)
        y = torch.randint(self.inputs.classes, (n,), generator=stream)
        samples = Samples(x.to(self.device), y.to(self.device))
        return ClientData(lambda part: samples)


def trained(
    together: int, methods: Sequence[ClientMethod] = (), *, model: str = "tiny_bn_cnn", inputs: Inputs = IMAGE,
    sizes: Sequence[int] = SIZES, rounds: int = 2, device: str = "cpu", task: Task | None = None,
    channels_last: bool = True, **local: Any,
) -> tuple[Tensor, dict[int, ClientResult]]:  # fmt: skip
    """Updates [N, S] of the last round, and what came with them; each round begins at the mean of the one before."""
    optimizer = {"momentum": 0.9, "weight_decay": 1e-3} | local.pop("optimizer", {})
    if methods and type(methods[0]).__name__ in ("SCAFFOLD", "SGDM"):
        optimizer["momentum"] = 0.0
    settings = LocalSettings(**{"epochs": 2, "batch_size": 8, **local}, optimizer=OptimizerSpec(**optimizer))
    torch.manual_seed(0)
    unused = np.zeros((2, *inputs.shape), np.float32 if inputs.vocab is None else np.int64)
    task = task or Classification()
    spec = HostSpec(
        model, builder(model), inputs, unused, task, {}, "unit", (), channels_last, settings, tuple(methods), (),
        batch_clients=together,
    )  # fmt: skip
    network, layers = spec.network()
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    flat = FlatModel(network, layers, device, dtype=torch.float64)
    value = flat.value.cpu().clone()
    samples: Any = SeededSamples(inputs, sizes, device)
    trainer: Any = (Trainer if together == 1 else BatchedTrainer)(spec, flat, samples, None)
    clients = tuple(range(len(sizes)))
    groups = tuple(clients[i : i + together] for i in clients[::together])
    shared = {name: torch.linspace(-0.01, 0.01, layers.P, dtype=torch.float64) for name in ("scaffold", "sgdm")}
    states = {c: {"previous": value.numpy()} if spec.stack.initial_previous else {} for c in clients}
    models: dict[int, Any] = {}
    for t in range(rounds):
        objects = [*states.values(), *models.values()]
        request = TrainRequest(
            RoundInfo(7, t, 10, len(sizes), 0.05, sum(sizes) / len(sizes)), clients, {c: c for c in clients},
            {c: len(sizes) + c for c in models},
            mix={c: tuple((j, 0.1 + 0.02 * c) for j in clients) for c in clients} if spec.stack.peer_models else None,
            peers=dict.fromkeys(clients, clients), return_states=True, return_models=True, groups=groups,
        )  # fmt: skip
        download = Download(request, value.to(device), {n: s.to(device) for n, s in shared.items()}, objects)
        updates, results = torch.empty(len(sizes), layers.S, dtype=torch.float64, device=device), {}
        torch.manual_seed(0)
        for client in clients:
            results[client], vectors = trainer.train(download, client, updates[client])
            assert results[client].status == "ok", results[client].status
            results[client].scalars |= {name: vector.cpu().numpy() for name, vector in vectors.items()}
        value = value + updates.cpu().mean(0)
        states = {c: result.state for c, result in results.items()}
        models = {c: result.model for c, result in results.items()} if spec.stack.peer_models else {}
    return updates.cpu(), results


def assert_same(one_by_one: Any, together: Any, tolerance: float = 1e-11) -> None:
    """Both returned by `trained`: equal to rounding, in all that clients upload, keep and report."""
    (updates, results), (joint, joint_results) = one_by_one, together
    largest = float(updates.abs().max())
    torch.testing.assert_close(joint, updates, rtol=0, atol=tolerance * largest)
    for client, result in results.items():
        other = joint_results[client]
        assert not other.remarks
        assert (other.steps, other.counters) == (result.steps, result.counters)
        assert [other.first_loss, other.last_loss] == [
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=0) or theirs
            for mine, theirs in ((result.first_loss, other.first_loss), (result.last_loss, other.last_loss))
        ]
        for mine, theirs in ((result.state, other.state), (result.scalars, other.scalars)):
            assert mine.keys() == theirs.keys()
            for name, array in mine.items():
                np.testing.assert_allclose(theirs[name], array, rtol=0, atol=tolerance * max(1, np.abs(array).max()))
