"""A model tried on two training samples, before anything is started."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raysim.core.arrays import tensor_of, to_numpy
from raysim.core.flat import FlatModel, stages_in
from raysim.core.hooks import HookError
from raysim.core.layers import LayerMap
from raysim.core.message import Message, Transform
from raysim.core.modes import modes_of_a_run
from raysim.core.outputs import Outputs, leaves
from raysim.core.rng import preserved, seed_globals
from raysim.core.score import Metric
from raysim.core.server import Server
from raysim.core.task import Task
from raysim.data import Dataset, Partition
from raysim.federation.failures import RoundFailed
from raysim.federation.versions import round_info
from raysim.host.host import ClientHost
from raysim.host.messages import ClientResult, HostSpec, TrainRequest
from raysim.lazy import Tensor, nn, torch
from raysim.models.structure import outside

TRIES = 3  # clients that may fail before a trial has
ONE_SEED = "Let it draw from the global generator of torch, NumPy or Python, or keep it in the state_dict"


def tried(spec: HostSpec, model: nn.Module, task: Task, data: Dataset) -> list[str]:
    """What is wrong with `model`, which is used up: its outputs do not fit the task, or it depends on more than its state_dict."""
    from raysim.models.model import Model

    x, y = tensor_of(spec.samples), tensor_of(data.y[: len(spec.samples)])
    stages = stages_in(model)
    head = stages[-1] if stages else None
    if isinstance(head, nn.Linear) and not data.is_text and data.has_classes:  # it says what it makes of a sample
        outputs: Outputs = torch.zeros(len(x), head.out_features)
    else:
        with torch.no_grad():
            outputs = model.eval()(x)
    if misfit := _misfit(outputs, y, task, data.outputs):
        return [f"model.name: {misfit}"]
    if misused := _misused(task, outputs, y):
        return [misused]
    if isinstance(model, Model):
        return []
    fault = _differs(spec.network()[0], spec.network()[0]) or _unsteady(spec, x, y, task)
    return [f"model.name: {spec.model} {fault}"] if fault else []


def _misfit(outputs: Outputs, y: Tensor, task: Task, classes: int) -> str | None:
    """What is wrong with the form of the outputs: one for a sequence that needs one at each position, or too few."""
    form = ""
    if not y.is_floating_point():
        y, form = torch.full_like(y, classes - 1), f" below {classes}"
    try:
        task.losses(outputs, y)
        return None
    except Exception as error:
        if isinstance(outputs, torch.Tensor):
            if outputs.ndim < 2 and y.ndim < 2:
                return f"its forward returned {list(outputs.shape)} for {len(y)} samples; return [B, {classes}]"
            made = f"outputs {[1, *outputs.shape[1:]]}"
        else:
            keys = f" of {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
            return (
                f"its forward returns a {type(outputs).__name__}{keys}, from which {task.name} cannot make its loss. Return only "
                f"the tensor of outputs [B, {classes}], or give a task of your own that knows the {type(outputs).__name__}"
            )
        labels = [1, *y.shape[1:]]
        return f"its {made} do not fit labels {labels}{form} (task {task.name}: {error})"


def _misused(task: Task, outputs: Outputs, y: Tensor) -> str | None:
    """What is wrong with the form of what the loss returns; the numbers of two samples may make no sense."""
    with preserved():
        try:
            task.total_loss(outputs, y)
        except HookError as error:
            return f"data.task: {error}"
        except Exception:
            return None
    return None


def unscored(spec: HostSpec, task: Task, names: Sequence[str], data: Dataset) -> list[str]:
    """What is wrong with the metrics of these names, which are the last of the task, on two training samples."""
    if not names:
        return []
    x, y = tensor_of(spec.samples), tensor_of(data.y[: len(spec.samples)])
    with preserved(), warnings.catch_warnings(action="ignore"):  # two samples have not all classes
        outputs = _evaluated(spec.network()[0], x)
        metrics = zip(names, task.metrics[-len(names) :], strict=True)
        faults = [_unscored(name, metric, task, outputs, y) for name, metric in metrics]
    return [f"evaluate.metrics: {fault}" for fault in faults if fault]


def _unscored(name: str, metric: Metric, task: Task, outputs: Outputs, y: Tensor) -> str | None:
    try:
        score = replace(task, metrics=(metric,)).score(outputs, y)
        metric.of(score.sums[metric.name])  # NaN is no fault: of more samples there may be a score
    except HookError as error:
        return str(error)
    except Exception as error:
        return f"{name} cannot score two training samples ({type(error).__name__}: {error})"
    return None


@dataclass
class Newcomer:
    """The sender of a first message, for a trial."""

    layers: LayerMap
    states: dict[str, Any] = field(default_factory=dict)

    def generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(0)

    def state(self, method: Any) -> Any:
        return self.states.setdefault(method.name, method.new_state(self.layers))


def first_message(transforms: Sequence[Transform], vector: Tensor, layers: LayerMap, private: str | None) -> Message:
    """A newcomer's message of `vector` [S], encoded."""
    message = Message(vector, layers, private=private)
    with preserved():
        message.encode(transforms, Newcomer(layers))
    return message


def trial_result(spec: HostSpec, data: Dataset, partition: Partition, server: Server) -> ClientResult:
    """What comes back from a client that trains one epoch, here and on a CPU: one with few samples. Its message says how many bytes
    the vectors and numbers take that methods send, which need not declare them. Raises `RoundFailed`."""
    if not (spec.upload or spec.stack.finishers or spec.probes):
        return ClientResult("ok")  # it sends the model as it is
    settings = replace(spec.settings, epochs=1, precision="fp32")
    here = replace(spec, settings=settings, device="cpu", batch_clients=1, tape="never", keep_freed_memory=False)
    holders = np.flatnonzero(partition.sizes)
    shared = {name: to_numpy(tensor) for name, tensor in server.shared.items()}
    status = ""
    with modes_of_a_run(spec.threads):
        host = ClientHost(here, data, partition)
        for client in holders[partition.sizes[holders].argsort(kind="stable")][:TRIES].tolist():
            request = TrainRequest(round_info(server), (client,), state_index={client: 0})
            state = spec.initial_state(server.value)
            result = host.train(request, to_numpy(server.value), shared, state).results[client]
            if result.status == "ok":
                return result
            status = status or result.status
    raise RoundFailed(f"clock: clients train for a trial, which shows how much they send, and none came back: {status}")


def unsendable(spec: HostSpec, value: Tensor, download: Sequence[Transform]) -> list[str]:
    """What is wrong with the transforms, tried on the initial model [S] or on an update that is as large."""
    faults = []
    for stack, transforms in (("upload", spec.upload), ("download", download)):
        try:
            message = first_message(transforms, value.clone(), spec.layers, spec.stack.personal_layers)
            if (message.costs < 0).any():
                faults.append(f"{stack}: a message of {message.costs.sum()} bytes")
        except Exception as error:
            faults.append(f"{stack}: cannot encode the initial model ({type(error).__name__}: {error})")
    return faults


def _differs(model: nn.Module, twin: nn.Module) -> str | None:
    """What is different in two models that were made under one seed."""
    pairs = zip(_tensors(model), _tensors(twin), strict=False)
    names = [name for (name, one), (_, other) in pairs if not _same(one, other)]
    return f"is another one each time that it is made: {names[0]} differs. {ONE_SEED}." if names else None


def _unsteady(spec: HostSpec, x: Tensor, y: Tensor, task: Task) -> str | None:
    """Whether a model that has taken a step, and is given its old weights again, is the old one."""
    model, layers = spec.network()
    if not layers.P:
        return "has no parameter to train."
    flat = FlatModel(model, layers)
    weights, others = flat.value.clone(), {name: tensor.clone() for name, tensor in outside(model)}

    def looked() -> list[Tensor]:
        made: list[Tensor] = []
        flat.value.copy_(weights)
        for mode in (False, True):
            seed_globals(0)
            _, outputs = flat.forward_from(0, x) if mode else (None, _evaluated(model, x))
            made += [tensor.detach().clone() for tensor in leaves(outputs)]
            if mode:
                flat.backward(task.loss(outputs, y))
            model.train()
        return [*made, flat.grad.clone()]

    try:
        with preserved():
            once, replaced, again = looked(), flat.replaced(), looked()
    except Exception as error:
        return f"cannot take a step of training on two samples ({type(error).__name__}: {error})."
    if replaced:
        return replaced
    if all(map(_same, once, again)):
        return None
    changed = [name for name, tensor in outside(model) if name not in others or not _same(tensor, others[name])]
    what = f" ({', '.join(changed)})" if changed else ""
    return (
        f"remembers something that its state_dict does not have{what}: with the same weights and samples it makes other "
        "outputs once it has been trained. Make it a buffer, or set it in each forward."
    )


def _evaluated(model: nn.Module, x: Tensor) -> Outputs:
    with torch.no_grad():
        return model.eval()(x)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.state_dict().items(), *outside(model)]


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return torch.equal(*(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))
