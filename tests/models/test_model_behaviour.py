"""What every model promises, whatever its architecture."""

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import simulate, tiny
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from raysim.config import ConfigError
from raysim.data import Dataset
from raysim.data.sources import Given
from raysim.federation.builder import prepare
from raysim.models import MODELS, Inputs, ModelError, build
from raysim.models.model import Model
from raysim.models.modules import Recurrent
from raysim.models.own import builder_of

# Small samples keep this quick: most of the models are fully convolutional.
IMAGE, DIGIT = Inputs((3, 32, 32), 10), Inputs((1, 8, 8), 10)
INPUTS = dict.fromkeys(MODELS, IMAGE) | {
    "bn_cnn": Inputs((1, 28, 28), 10),
    "mlp": DIGIT,
    "lenet": Inputs((1, 28, 28), 10),
    "fedavg_cnn": Inputs((1, 28, 28), 10),
    "small_cnn": DIGIT,
    "tiny_bn_cnn": DIGIT,
    "resnet110": DIGIT,
    "wrn56_4": DIGIT,
    "densenet121": DIGIT,
    "vit": DIGIT,
    "amazon_mlp": Inputs((50,), 2),
    "fasttext": Inputs((12,), 4, vocab=30),
    "text_cnn": Inputs((12,), 4, vocab=30),
    "char_gru": Inputs((12,), 30, vocab=30),
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def fresh(request: pytest.FixtureRequest) -> tuple[Model, Tensor]:
    """A model in training mode, and a batch of two."""
    torch.manual_seed(0)
    inputs = INPUTS[request.param]
    return build(request.param, inputs), batch(inputs)


def batch(inputs: Inputs) -> Tensor:
    if inputs.vocab is not None:
        return torch.randint(inputs.vocab, (2, *inputs.shape))
    return torch.randn(2, *inputs.shape)


def test_structure(fresh: tuple[Model, Tensor]) -> None:
    model, _ = fresh
    *stages, last = (name for name, _ in model.named_children())
    assert last == "head" and isinstance(model.head, nn.Linear) and stages
    for stage in model:
        assert list(stage.parameters())
    assert all(module.training for module in model.modules())
    assert not any(getattr(module, "num_batches_tracked", 0) for module in model.modules())


def test_features_then_head_is_the_model(fresh: tuple[Model, Tensor]) -> None:
    model, x = fresh
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        z = model.features(x)
        positions = (12,) if isinstance(model[-2], Recurrent) else ()  # with an output at each
        assert z.shape == (2, *positions, model.head.in_features)
        assert torch.equal(model.head(z), model(x))


def test_trains(fresh: tuple[Model, Tensor]) -> None:
    """Every parameter gets a gradient, and features may be used twice: in the loss and in a penalty."""
    model, x = fresh
    model = copy.deepcopy(model)
    z = model.features(x)
    outputs = model.head(z)
    loss = F.cross_entropy(outputs.flatten(0, -2), torch.arange(outputs[..., 0].numel()) % 2) + z.square().mean()
    loss.backward()
    assert loss.isfinite()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name


def test_float64_channels_last_and_functional_call(fresh: tuple[Model, Tensor]) -> None:
    model, x = fresh
    model = copy.deepcopy(model).double().eval()
    x = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        y = model(x)
        assert y.dtype == torch.float64
        last_bit = 1e-14 if isinstance(model[-2], Recurrent) else 0  # PyTorch's GRU adds in another order
        again = functional_call(copy.deepcopy(model).to("meta"), model.state_dict(), x)
        torch.testing.assert_close(again, y, rtol=last_bit, atol=last_bit)
        if x.dim() == 4:
            z = model.features(x)
            model.to(memory_format=torch.channels_last)
            torch.testing.assert_close(model.features(x.contiguous(memory_format=torch.channels_last)), z)


@pytest.mark.parametrize("name", ["simple_cnn", "vgg16", "resnet20", "text_cnn"])
def test_building_draws_the_initial_weights_and_nothing_else(name: str) -> None:
    """In registration order and by the framework's own initialisation: one seed, one model, whatever the machine."""
    torch.manual_seed(1)
    model = build(name, INPUTS[name])
    drawn_next = torch.rand(())
    weights = [p.detach().clone() for p in model.parameters()]
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert torch.rand(()) == drawn_next


class Masked(nn.Module):
    """Hides the second feature, and takes the others from a table of places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.register_buffer("hidden", torch.tensor([False, True, False]))
        self.register_buffer("places", torch.tensor([2, 0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.masked_fill(self.hidden, 0)[:, self.places])


def test_tables_of_integers_are_constants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are neither averaged nor sent: such as masks, and Swin's places."""
    monkeypatch.setitem(
        MODELS, "masked", lambda inputs: Model(OrderedDict(body=Masked(), head=nn.Linear(3, inputs.classes)))
    )
    shape = {"name": {"synthetic": {"samples": 260, "shape": [3], "classes": 4}}}
    federation = simulate(tiny(model={"name": "masked"}, data=shape, server=["fedlws"]), tmp_path)
    model = federation.model()
    assert federation.server.layers.S == sum(p.numel() for p in model.parameters()) == (2 + 1) * 3 + (3 + 1) * 4
    assert model.body.places.tolist() == [2, 0]
    assert model.body.hidden.dtype == torch.bool


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("frozen", ["body.0", "body"], ids=["a layer", "the body"])
def test_frozen_parameters_stay(frozen, together, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under weight decay, with clients that step together, and where the model is scaled."""

    def made(inputs: Inputs) -> Model:
        body = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU())
        model = Model(OrderedDict(body=body, head=nn.Linear(4, inputs.classes)))
        model.get_submodule(frozen).requires_grad_(False)
        return model

    monkeypatch.setitem(MODELS, "partly_frozen", made)
    shape = {"name": {"synthetic": {"samples": 260, "shape": [3], "classes": 4}}}
    local = {"batch_size": 8, "weight_decay": 0.1}
    engine = {"local": {"batch_clients": together}}
    changes = {"model": {"name": "partly_frozen"}, "data": shape, "local": local, "engine": engine}
    value = {
        n: simulate(tiny(**changes, rounds={"total": n}, server=["fedlws"]), tmp_path / str(n)).server for n in (1, 3)
    }
    first, last = (server.layers.state_dict(server.value) for server in value.values())
    for name in first:
        assert torch.equal(first[name], last[name]) == name.startswith(frozen)
    if frozen == "body":
        with pytest.raises(
            ConfigError, match=r"client\.0\.fedrep: trains the head, then the body, and this model has frozen"
        ):
            prepare(tiny(**changes | {"client": ["fedrep"]}))


def test_a_batch_of_one_sample_is_refused_where_batchnorm_cannot_train_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def normed(inputs: Inputs) -> Model:
        return Model(
            OrderedDict(body=nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), head=nn.Linear(5, inputs.classes))
        )

    monkeypatch.setitem(MODELS, "normed", normed)
    data: dict[str, Any] = {
        "name": {"synthetic": {"samples": 252, "shape": [3], "classes": 4}}, "proxy": {"samples": 9},
        "partition": {"iid_equal": {"clients": 3}},
    }  # fmt: skip
    changes = {"data": data, "server": [{"server_ft": {"batch_size": 5}}]}
    sizes = prepare(tiny(**changes, model={"name": "normed"}, local={"batch_size": 1000}))[1].sizes
    assert len({*sizes.tolist()}) == 1
    lone = {"batch_size": int(sizes[0]) - 1}
    with pytest.raises(
        ConfigError, match=r"local.batch_size: 3 clients \(0, 1, 2\) would train on a batch of one sample"
    ) as error:
        prepare(tiny(**changes | {"server": [{"server_ft": {"batch_size": 4}}]}, model={"name": "normed"}, local=lone))
    assert "server.0.server_ft.batch_size: 4 would train on a batch of one sample" in str(error.value)
    held_out = {"feddf": {"batch_size": 3, "patience": 5, "validation": 0.2}}  # two of nine, and 7 = 3 + 3 + 1
    with pytest.raises(ConfigError, match=r"server.0.feddf.batch_size: 3 would train on a batch of one sample"):
        prepare(tiny(**changes | {"server": [held_out]}, model={"name": "normed"}))
    single = {"data": data | {"proxy": {"samples": 1}}, "model": {"name": "normed", "bn_stats": "recalibrate"}}
    with pytest.raises(ConfigError, match=r"model.bn_stats: recalibrate would train on a batch of one sample"):
        prepare(tiny(**single))
    dropped = lone | {"drop_last": True, "momentum": 0.0, "weight_decay": 0.0}
    prepare(tiny(**changes, model={"name": "normed"}, local=dropped, client=[{"fedala": {"fraction": 1.0}}]))
    for own in ({"fedala": {"fraction": 1.0, "drop_last": False}}, {"scaffold": {"c_update": "option_1"}}):
        with pytest.raises(
            ConfigError, match=rf"client.0.{next(iter(own))}: at 3 clients its own pass would train on a batch"
        ):
            prepare(tiny(**changes, model={"name": "normed"}, local=dropped, client=[own]))


def test_two_parameters_of_one_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(inputs: Inputs) -> Model:
        model = Model(OrderedDict(body=nn.Linear(3, 3), head=nn.Linear(3, inputs.classes)))
        model.head.bias = nn.Parameter(model.body.bias.data)
        return model

    monkeypatch.setitem(MODELS, "doubled", doubled)
    with pytest.raises(ModelError, match=r"doubled: head\.bias and body\.bias are two parameters with one memory"):
        build("doubled", Inputs((3,), 3))


def test_fasttext_averages_over_the_padding() -> None:
    model = build("fasttext", Inputs((4,), 2, vocab=5))
    tokens = torch.tensor([[3, 0, 0, 0]])
    torch.testing.assert_close(model.embedding(tokens), model.embedding.weight[[3]] / 4)


def test_text_cnn_takes_the_maximum_over_time() -> None:
    model = build("text_cnn", Inputs((7,), 2, vocab=9)).eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    windows = model.embedding.weight[tokens[0]].unfold(0, 3, 1)  # [5, E, 3]
    conv = model.ngrams.convs[0]
    by_hand = (windows.flatten(1) @ conv.weight.flatten(1).T + conv.bias).relu().max(dim=0).values
    torch.testing.assert_close(model.features(tokens)[0, :100], by_hand)


def test_vgg16_centres_small_images() -> None:
    model = build("vgg16", Inputs((1, 28, 28), 62)).eval()
    x = torch.randn(1, 1, 28, 28)
    unpadded = nn.Sequential(*list(model.block1)[1:])
    torch.testing.assert_close(model.block1(x), unpadded(F.pad(x, (2, 2, 2, 2))))


def test_vit_attention_is_scaled_dot_product() -> None:
    attention = build("vit", DIGIT).eval().block0.attention
    x = torch.randn(2, 5, 512)
    q, k, v = (part.unflatten(2, (8, 64)).transpose(1, 2) for part in attention.qkv(attention.norm(x)).chunk(3, dim=2))
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(x), x + attention.out(mixed))


def test_vit_reads_its_class_token() -> None:
    model = build("vit", DIGIT).eval()
    z = model.features(torch.randn(3, 1, 8, 8))
    assert z.shape == (3, 512)
    torch.testing.assert_close(z.mean(dim=1), torch.zeros(3), atol=1e-5, rtol=0)  # its last step is a LayerNorm


@pytest.mark.parametrize(("name", "probability"), [("text_cnn", 0.8), ("vit", 0.1)])
def test_dropout(name: str, probability: float) -> None:
    def found(model: Model) -> set[float]:
        return {module.p for module in model.modules() if isinstance(module, nn.Dropout)}

    assert found(build(name, INPUTS[name])) == {probability}
    assert found(build(name, INPUTS[name], dropout=0.0)) == {0.0}


def test_too_few_outputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(inputs: Inputs) -> Model:
        return Model(OrderedDict(body=nn.Linear(3, 3), head=nn.Linear(3, inputs.classes - 1)))

    monkeypatch.setitem(MODELS, "narrow", narrow)
    data = {"name": {"synthetic": {"shape": [3], "classes": 4}}}
    with pytest.raises(
        ConfigError, match=r"model.name: its outputs \[1, 3\] do not fit labels \[1\] below 4 \(task classification"
    ):
        prepare(tiny(model={"name": "narrow"}, data=data))


@pytest.mark.parametrize(("columns", "made"), [(1, r"\[2\]"), (3, r"\[2, 1\]")])
def test_outputs_of_another_shape_than_the_targets_are_refused(
    columns: int, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch would stretch them: the loss would be that of every pair of samples, or of one output and all targets."""

    class Regressor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(x)
            return out.squeeze(-1) if columns == 1 else out

    monkeypatch.setitem(MODELS, "regressor", builder_of(Regressor))
    targets = np.ones((8, columns), np.float32)
    data = Dataset("d", np.eye(8, 3, dtype=np.float32), targets, 6, ("a", "b", "c")[:columns], task="regression")
    config = tiny(
        model={"name": "regressor"}, data={"name": Given.of(data), "partition": {"iid_equal": {"clients": 2}}}
    )
    with pytest.raises(ConfigError, match=rf"task regression: outputs {made} for targets \[2, {columns}\]"):
        prepare(config)
