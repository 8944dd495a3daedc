"""Any module is a model: its own forward runs, its tensors keep their names, and what cannot be carried is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import simulate, tiny
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.config import STACKS, ConfigError
from raysim.core.layers import LayerMap
from raysim.federation import prepare
from raysim.models import MODELS, Inputs, ModelError
from raysim.models.own import builder_of
from raysim.report.runs import Run
from raysim.store.documents import read_tensors

LR, ROUNDS = 0.3, 4
SHAPE = (4, 6)  # of a sample: four steps of six numbers, or for `flatten` 24 numbers


class Plain(nn.Module):
    """`features` and a `head`, as many write them; what `forward` does is up to the subclass."""

    def __init__(self, inputs: Inputs):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(inputs.shape), 5), nn.Tanh())
        self.head = nn.Linear(5, inputs.classes)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


class Flipped(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x.flip(-1)))


class Standardised(Plain):
    """Per sample, in front of the head; a sample of zeros would be 0 / 0."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.features(x)
        return self.head((z - z.mean(1, keepdim=True)) / z.std(1, keepdim=True))


class Scaled(Plain):
    """By a buffer."""

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.register_buffer("scale", torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.normalize(self.features(x.clamp(-1, 1) / 2 * self.scale)))


class Projected(Plain):
    """By a matrix that is neither parameter nor buffer."""

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.B = torch.randn(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x @ self.B))


class Masked(Plain):
    """With an infinity in a buffer, as attention has it, and tables of integers: one that stays and one that counts."""

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -math.inf, 0.0, 0.0]))
        self.register_buffer("places", torch.tensor([4, 3, 2, 1, 0]))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.head((self.features(x) * self.mask.exp())[:, self.places])


class Ring(Plain):
    """With integers of every kind that training changes and forward indexes with: in place, and by another tensor."""

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("order", torch.tensor([4, 3, 2, 1, 0]))
        self.register_buffer("at", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("small", torch.zeros(2, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.order = self.order.roll(1)
            self.at.add_(2).remainder_(5)
            self.seen[self.at] = True
            self.small[1] += 100
        z = self.norm(self.features(x))[:, self.order]
        return self.head(z * torch.where(self.seen, 1.0, 0.5) + z[:, self.at].unsqueeze(1) + self.small[1] // 50)


class LSTM(nn.Module):
    def __init__(self, inputs: Inputs):
        super().__init__()
        self.fc = nn.Linear(5, inputs.classes)  # first in the state_dict, last in the forward
        self.lstm = nn.LSTM(inputs.shape[-1], 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(x[:, 0])
        return self.fc(outputs[:, -1])


class Conv(nn.Module):
    """Without a Linear, as a fully convolutional net."""

    def __init__(self, inputs: Inputs):
        super().__init__()
        self.conv = nn.Conv1d(inputs.shape[1], inputs.classes, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[:, 0]).mean(2)


class Tied(nn.Module):
    """What decodes is what encodes, and two modules have one buffer: either has two names in the state_dict."""

    def __init__(self, inputs: Inputs):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.decoder.weight = self.encoder.weight
        self.one, self.two = nn.BatchNorm1d(24), nn.BatchNorm1d(24)
        self.two.running_mean = self.one.running_mean
        self.head = nn.Linear(24, inputs.classes)

    def forward(self, x: Tensor) -> Tensor:
        z = self.one(self.encoder(x[:, 0]).tanh().flatten(1))
        return self.head(self.two(self.decoder(z.view(-1, 4, 6)).flatten(1)).tanh())


class TiedHead(nn.Module):
    """As language models have it: the head's weight is the first layer's, so that the head has no tensor alone."""

    def __init__(self, inputs: Inputs):
        super().__init__()
        self.first = nn.Linear(24, 3, bias=False)
        self.back = nn.Linear(3, 24)
        self.head = nn.Linear(24, 3, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.back(self.first(x.flatten(1)).tanh()))


class TwoPaths(Plain):
    """Each module has a second path, as where `net` lists what the attributes hold."""

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.norm = nn.BatchNorm1d(5)
        self.net = nn.Sequential(self.features, self.norm, self.norm, self.head)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class Normed(Plain):
    """Weights that are made of others, and sparse numbers outside the state_dict."""

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.features[1] = nn.utils.parametrizations.weight_norm(self.features[1])
        self.neighbours = torch.eye(5).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.neighbours @ self.features(x).T).T)


class Bounded(Plain):
    """Its forward writes into a parameter: rows of the table are shortened to length 1 when they are read."""

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.words = nn.Embedding(4, 5, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x) + self.words((x.flatten(1)[:, 0] > 0).long()))


def stacked(inputs: Inputs) -> nn.Module:
    """An nn.Sequential, whose stages could be called one by one but for what they share."""
    parts = nn.Sequential(nn.Flatten(), nn.Linear(24, 3, bias=False), nn.Linear(3, 24), nn.Linear(24, 3, bias=False))
    parts[3].weight = parts[1].weight
    return parts


def lazy(inputs: Inputs) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.ReLU(), nn.Linear(5, inputs.classes))


def with_names(monkeypatch: pytest.MonkeyPatch, **factories: Callable[..., nn.Module]) -> None:
    for name, factory in factories.items():
        monkeypatch.setitem(MODELS, name, builder_of(factory))


def settings(name: str, clients: int = 1, **changes: Any) -> dict[str, Any]:
    """Every client has one batch a round, and trains by plain SGD."""
    data = {
        "name": {"synthetic": {"samples": 90, "shape": [1, *SHAPE], "classes": 3}},
        "partition": {"iid_equal": {"clients": clients}},
    }
    local = {"batch_size": 1000, "lr": LR, "lr_decay": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    rounds = {"total": ROUNDS, "participation": 1.0}
    return {"data": data, "model": {"name": name}, "local": local, "rounds": rounds} | changes


@pytest.mark.parametrize(
    "kind",
    [
        Plain,
        Flipped,
        Standardised,
        Scaled,
        Projected,
        Masked,
        Ring,
        LSTM,
        Conv,
        Tied,
        TiedHead,
        stacked,
        TwoPaths,
        Normed,
        Bounded,
    ],
)
def test_a_run_of_one_client_is_gradient_descent_on_the_users_module(
    kind: Callable[[Inputs], nn.Module], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_names(monkeypatch, theirs=kind)
    federation = simulate(tiny(**settings("theirs")), tmp_path)
    by_hand, _ = federation.spec.network()
    assert type(by_hand) is (kind if isinstance(kind, type) else nn.Sequential)
    rows, data = federation.run.partition.train[0], federation.run.data
    x, y = data.transform(torch.from_numpy(data.x[rows])), torch.from_numpy(data.y[rows])
    for _ in range(ROUNDS):
        by_hand.zero_grad()
        F.cross_entropy(by_hand(x), y).backward()
        with torch.no_grad():
            for parameter in by_hand.parameters():
                if parameter.grad is not None:
                    parameter -= LR * parameter.grad
    found = read_tensors(tmp_path / "model.safetensors")
    assert found.keys() == by_hand.state_dict().keys()
    assert sum(parameter.numel() for parameter in by_hand.parameters()) == federation.spec.layers.P  # each once
    torch.testing.assert_close(found, dict(by_hand.state_dict()), rtol=1e-4, atol=1e-6)
    torch.manual_seed(0)
    kind(federation.spec.inputs).load_state_dict(found)  # the plain class takes its weights back
    loaded = Run(tmp_path).model()
    torch.testing.assert_close(loaded(x), by_hand.eval()(x), rtol=1e-4, atol=1e-5)


def test_what_tied_weights_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A head that shares its parameters is no part of its own; a file with two tensors for one is refused."""
    with_names(monkeypatch, theirs=TiedHead)
    for method in ("fedrep", "fedbabu"):
        with pytest.raises(
            ConfigError, match=rf"client\.0\.{method}: needs the .* head\.weight is also first\.weight\."
        ):
            prepare(tiny(**settings("theirs", clients=3, client=[method])))
    fedala = simulate(tiny(**settings("theirs", clients=3, client=["fedala"])), tmp_path / "fedala")
    assert torch.isfinite(fedala.server.value).all()
    saved = dict(read_tensors(tmp_path / "fedala" / "model.safetensors"))
    torch.save(saved, tmp_path / "same.pt")
    torch.save(saved | {"head.weight": saved["head.weight"] + 1}, tmp_path / "other.pt")
    for name in ("same", "other"):
        begun = settings("theirs", model={"name": "theirs", "init": str(tmp_path / f"{name}.pt")})
        if name == "same":
            prepare(tiny(**begun))
            continue
        with pytest.raises(ConfigError, match=r"head\.weight differs from first\.weight, and the model has one"):
            prepare(tiny(**begun))


@pytest.mark.parametrize("method", ["fedala", "fedrep", "fedbabu", "moon", "fedphp", "ccn"])
def test_methods_find_head_and_latents(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They do the same with a module whose parts they found as with raysim's model of the same layers."""

    class Ours(nn.Module):
        """raysim's mlp with another way to write it; a run draws the same weights for both."""

        def __init__(self, inputs: Inputs):
            super().__init__()
            self.fc1 = nn.Linear(math.prod(inputs.shape), 7)
            self.out = nn.Linear(7, inputs.classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.fc1(x.flatten(1)).relu())

    with_names(monkeypatch, ours=Ours)
    stack = "weighting" if method == "ccn" else "client"
    changes = settings("ours", clients=3, **{stack: [method]})
    changes["local"] |= {"batch_size": 8, "momentum": 0.9}
    one = simulate(tiny(**changes), tmp_path / "ours")
    mlp = {"name": "mlp", "options": {"hidden": [7]}}
    other = simulate(tiny(**changes | {"model": mlp}), tmp_path / "mlp")
    assert one.server.layers.head == "out"
    torch.testing.assert_close(one.server.value, other.server.value, rtol=1e-5, atol=1e-6)


def test_only_methods_that_need_a_head_ask_for_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_names(monkeypatch, conv=Conv)
    for stack in STACKS:
        for name, method in STACKS[stack].entries.items():
            if method.needs.head:
                with pytest.raises(ConfigError, match=rf"{stack}\.0\.{name}: needs {method.needs.head} of the model's"):
                    prepare(tiny(**settings("conv", clients=3, **{stack: [name]})))
    simulate(tiny(**settings("conv", clients=3, client=["fedala"])), tmp_path)


def test_the_page_says_which_methods_need_a_head() -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "model.md").read_text(encoding="utf-8")
    listed = {
        name: "its parameters" if "parameters" in what else "its latents"
        for names, what in re.findall(
            r"^\| ([\w, ]+) \| (the parameters of its head|its latents: .*) \|$", page, re.MULTILINE
        )
        for name in names.split(", ")
    }
    needed = {m.__name__: m.needs.head for stack in STACKS.values() for m in stack.entries.values() if m.needs.head}
    assert listed == needed


def test_a_head_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Logs(LSTM):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).log_softmax(1)

    monkeypatch.setitem(MODELS, "logs", builder_of(Logs, head="fc"))
    federation = simulate(tiny(**settings("logs", clients=3, client=["fedrep"])), tmp_path)
    layers = federation.server.layers
    of_head = [
        spec.name for spec in layers.tensors if spec.stop > layers.span("head").start and spec.kind == "parameter"
    ]
    assert of_head == ["fc.weight", "fc.bias"]
    monkeypatch.setitem(MODELS, "logs", builder_of(Logs, head="fcc"))
    with pytest.raises(
        ModelError, match=r"logs: its head is said to be 'fcc', but it has no such module\. It has fc, lstm"
    ):
        prepare(tiny(**settings("logs")))


def test_stages_that_a_model_declares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Declared(Plain):
        stages = ("features.1", "head")

    class Forgotten(Plain):
        stages = ("head",)

    with_names(monkeypatch, declared=Declared, forgotten=Forgotten)
    layers = simulate(tiny(**settings("declared")), tmp_path).server.layers
    assert [(spec.name, spec.stage) for spec in layers.tensors[::2]] == [("features.1.weight", 0), ("head.weight", 1)]
    with pytest.raises(ModelError, match=r"its stages are head, and its tensor features\.1\.weight is in none of them"):
        prepare(tiny(**settings("forgotten")))


def test_lazy_modules_are_made_by_training_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_names(monkeypatch, lazy=lazy)
    federation = simulate(tiny(**settings("lazy")), tmp_path)
    assert federation.model().state_dict()["1.weight"].shape == (5, math.prod(SHAPE))


def test_tables_of_integers_are_constants_until_training_changes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A constant is not sent, but is in the file; one that changes is averaged as BatchNorm's counters are."""
    with_names(monkeypatch, masked=Masked)
    federation = simulate(tiny(**settings("masked", clients=3)), tmp_path)
    saved = read_tensors(tmp_path / "model.safetensors")
    assert saved["seen"].tolist() == [ROUNDS, ROUNDS]
    assert saved["places"].tolist() == [4, 3, 2, 1, 0]
    assert saved["mask"].tolist() == [0, 0, -math.inf, 0, 0]
    assert {s.name for s in federation.server.layers.tensors} == saved.keys() - {"places"}


@pytest.mark.parametrize("stack", [[], [{"fedlws": {"lws_stats": "all"}}]], ids=["greatest", "mean"])
def test_counters_of_several_elements(stack: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their clients agree, so that the greatest and the mean are one."""
    with_names(monkeypatch, ring=Ring)
    simulate(tiny(**settings("ring", clients=3, server=stack)), tmp_path)
    saved = read_tensors(tmp_path / "model.safetensors")
    assert saved["order"].tolist() == [3, 2, 1, 0, 4]
    assert saved["at"].item() == 2 * ROUNDS % 5
    assert saved["seen"].tolist() == [False, True, True, True, True]
    assert saved["small"].tolist() == [0, 100 * ROUNDS % 256]
    assert saved["norm.num_batches_tracked"].item() == ROUNDS


class Far(Plain):
    """Counts where fp32 knows only every second integer."""

    def __init__(self, inputs: Inputs, start: int = 2**24):
        super().__init__(inputs)
        self.register_buffer("far", torch.tensor([start]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.far += 1
        return super().forward(x)


class Grows(Plain):
    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.register_buffer("table", torch.tensor([0]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.table = self.table + (
                1 if len(self.table) == 1 and self.table < 3 else torch.zeros(2, dtype=torch.long)
            )
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Far, r"theirs: far: it holds 16777217; integers that training changes are exact up to 2\^24"),
        (lambda inputs: Far(inputs, 2**24 - 2), r"far: it holds 16777217; integers that training changes"),
        (Grows, r"forward has made table int64 \[2\]; it was int64 \[1\], and must stay so"),
    ],
)
def test_integers_that_cannot_be_carried(
    model: Callable[..., nn.Module], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_names(monkeypatch, theirs=model)
    with pytest.raises(Exception, match=message):
        simulate(tiny(**settings("theirs")), tmp_path)


class Late(Plain):
    """Counts from its third batch on, which no trial sees."""

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.register_buffer("table", torch.zeros(2, dtype=torch.long))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 3:
            self.table += 1
        return super().forward(x)


def test_a_table_that_changes_later_is_no_constant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_names(monkeypatch, late=Late)
    changes = settings("late", clients=3)
    with pytest.raises(Exception, match="training has changed the model's tensor table, which no client sends"):
        simulate(tiny(**changes | {"local": {"batch_size": 2}}), tmp_path)


class Averaging(Plain):
    """From some step on, it has another tensor for a buffer. No output shows it."""

    later = 0

    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.register_buffer("centre", torch.zeros(5))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        z = self.features(x)
        self.steps += self.training
        if self.steps > self.later:
            self.centre = 0.9 * self.centre + 0.1 * z.detach().mean(0)
        return self.head(z)


class AveragingLater(Averaging):
    later = 8


class Clamped(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.head.weight.data = self.head.weight.data.clamp(-10, 10)
        return super().forward(x)


def test_a_tensor_that_is_replaced_later_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_names(monkeypatch, later=AveragingLater)
    with pytest.raises(
        Exception, match=r"model's forward puts another tensor in the place of centre,.* self\.centre\.data\.copy_"
    ):
        simulate(tiny(**settings("later", clients=3) | {"local": {"batch_size": 2}}), tmp_path)


class ExtraState(Plain):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


class Remembers(Plain):
    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        z = self.features(x)
        self.state = z.mean(0).detach() + (0 if self.state is None else self.state)
        return self.head(z + self.state)


class Dictionary(Plain):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x), "loss": None}


class Labelled(Plain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Unseeded(Plain):
    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.noise = torch.randn(5, generator=torch.Generator().manual_seed(int(torch.Generator().seed())))


class Complex(Plain):
    def __init__(self, inputs: Inputs):
        super().__init__(inputs)
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


def recurrent(inputs: Inputs) -> nn.Module:
    return nn.Sequential(nn.Flatten(0, 1), nn.LSTM(6, 5), nn.Linear(5, inputs.classes))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Remembers, r"theirs remembers something that its state_dict does not have \(state\)"),
        (
            Dictionary,
            r"its forward returns a dict of logits, loss, from which .* Return only the tensor of outputs \[B, 3\]",
        ),
        (Labelled, r"theirs: its forward does not take a batch .* labels go to the task"),
        (Unseeded, r"theirs is another one each time that it is made: noise differs"),
        (Clamped, r"theirs puts another tensor in the place of head\.weight, .*as in self\.head\.weight\.data\.copy_"),
        (Averaging, r"theirs puts another tensor in the place of centre, which no step and no mean then reaches"),
        (ExtraState, r"theirs: its state_dict has _extra_state, a dict, and raysim averages tensors"),
        (Complex, r"theirs: phase is complex64, which raysim cannot average"),
        (lambda inputs: Plain(inputs).double(), r"theirs: features\.1\.weight is float64; raysim trains in float32"),
        (recurrent, r"theirs: its forward .*A recurrent layer returns a pair \(outputs, state\)"),
    ],
)
def test_refused_with_the_way_out(
    factory: Callable[..., nn.Module], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_names(monkeypatch, theirs=factory)
    with pytest.raises((ConfigError, ModelError), match=message):
        prepare(tiny(**settings("theirs")))


def test_a_feature_map_in_front_of_the_head_is_one_latent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MOON compares that of each sample, as where the same numbers are flattened before."""

    class Pooled(nn.Module):
        def __init__(self, inputs: Inputs, early: bool = False):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 5, 3), nn.AdaptiveAvgPool2d(2))
            self.head = nn.Sequential(nn.Flatten(), nn.Linear(20, inputs.classes))
            self.early = early

        def forward(self, x: Tensor) -> Tensor:
            z = self.body(x)
            out: Tensor = self.head(z.flatten(1) if self.early else z)
            return out

    monkeypatch.setitem(MODELS, "late", builder_of(Pooled, head="head"))
    monkeypatch.setitem(MODELS, "early", builder_of(lambda inputs: Pooled(inputs, early=True), head="head"))
    moon = [
        simulate(tiny(**settings(name, clients=3, client=[{"moon": {"mu": 5.0}}])), tmp_path / name).server.value
        for name in ("late", "early")
    ]
    torch.testing.assert_close(moon[0], moon[1], rtol=1e-5, atol=1e-6)
    plain = simulate(tiny(**settings("late", clients=3)), tmp_path / "plain").server.value
    assert (moon[0] - plain).abs().max() > 1e-3


def test_layers_of_parts() -> None:
    """A layer whose weight is made of others, and an attention with its one matrix for queries, keys and values."""
    inputs = Inputs((4, 6), 3)
    assert [*LayerMap.of(Normed(inputs), "unit", ()).names] == ["features.1", "head"]
    encoder = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16))
    names = [*LayerMap.of(encoder, "unit", ()).names]
    assert names[:3] == ["0", "1.self_attn", "1.self_attn.out_proj"] and "1.linear1" in names


def test_the_tensor_that_became_infinite_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is not the one that was so from the start."""
    with_names(monkeypatch, masked=Masked)
    changes = settings("masked", rounds={"total": 2, "participation": 1.0, "on_client_failure": "stop"})
    changes["local"] |= {"lr": 1e18, "epochs": 9, "momentum": 0.99, "weight_decay": 1e18}
    with pytest.raises(Exception, match=r"(features\.1|head)\.\w+ is the first tensor that became so"):
        simulate(tiny(**changes), tmp_path)


def test_initial_parameters_of_a_saved_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As torch saves it, with names of the user's class; a head of another size is left out."""
    with_names(monkeypatch, plain=Plain)
    saved = Plain(Inputs((1, *SHAPE), 7)).state_dict()
    file = tmp_path / "saved.pt"
    torch.save(saved, file)
    changes = settings("plain") | {"model": {"name": "plain", "init": str(file)}}
    with pytest.raises(
        ConfigError, match=r"head\.weight has shape \(7, 5\), the model needs \(3, 5\)\. model\.init_except"
    ):
        prepare(tiny(**changes))
    changes["model"]["init_except"] = ["head"]
    frozen = {"lr": 1e-30, "batch_size": 1000, "momentum": 0.0, "weight_decay": 0.0}
    found = simulate(tiny(**changes | {"local": frozen}), tmp_path / "run").model().state_dict()
    drawn = simulate(tiny(**settings("plain") | {"local": frozen}), tmp_path / "drawn").model().state_dict()
    for name, tensor in found.items():
        assert torch.equal(tensor, (drawn if name.startswith("head") else saved)[name]), name
    changes["model"]["init_except"] = ["fc"]
    with pytest.raises(ConfigError, match=r"model\.init_except: fc is no tensor or module of the model"):
        prepare(tiny(**changes))
    changes["model"]["init_except"] = ["head"]
    file.write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"saved\.pt is damaged: it does not hold tensors"):
        prepare(tiny(**changes))


def test_a_pickle_as_initial_parameters_runs_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Sentinel:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    with_names(monkeypatch, plain=Plain)
    torch.save({"head.weight": Sentinel()}, tmp_path / "saved.pt")
    with pytest.raises(ConfigError, match=r"saved\.pt is damaged"):
        prepare(tiny(**settings("plain") | {"model": {"name": "plain", "init": str(tmp_path / "saved.pt")}}))
    assert not (tmp_path / "ran").exists()
