"""Which number of the flat vector belongs to which tensor and layer, against walks over plain modules."""

import re

import pytest
import torch
from torch import Tensor, nn

import raysim.core.segments
from raysim.core.layers import GROUPINGS, LayerMap
from raysim.models import Inputs, build


class PreNorm(nn.Module):
    """A token and a norm before the first linear layer, as in a ViT block."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 4))
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)


def network() -> nn.Sequential:
    """Every kind of tensor: parameters bare and owned, convolutions with and without a bias, statistics, a counter."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU()),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(1), nn.LayerNorm(4)),
        PreNorm(),
        nn.Linear(4, 2),
    )


NET = network()
PARAMETERS = dict(NET.named_parameters())
UNIT = {
    # A norm joins the unit that is open, a bare parameter the first unit.
    "0.0": ["0.0.weight", "0.1.weight", "0.1.bias", "2.token"],
    "1.0": ["1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias", "2.norm.weight", "2.norm.bias"],
    "2.linear": ["2.linear.weight", "2.linear.bias"],
    "3": ["3.weight", "3.bias"],
}
EXPECTED = {
    "unit": UNIT,
    "module": {
        "0.0": ["0.0.weight"], "0.1": ["0.1.weight", "0.1.bias"], "1.0": ["1.0.weight", "1.0.bias"],
        "1.2": ["1.2.weight", "1.2.bias"], "2.token": ["2.token"], "2.norm": ["2.norm.weight", "2.norm.bias"],
        "2.linear": ["2.linear.weight", "2.linear.bias"], "3": ["3.weight", "3.bias"],
    },
    "tensor": {name: [name] for name in PARAMETERS},
    "entry": {name: [name] if name in PARAMETERS else [] for name in NET.state_dict()},
    "model": {"model": list(PARAMETERS)},
    # A group closes at each "bias"; the next begins with the statistics of the norm before it, whose name it does not take.
    "bias_group": {
        "0.0.weight": ["0.0.weight", "0.1.weight", "0.1.bias"], "1.0.weight": ["1.0.weight", "1.0.bias"],
        "1.2.weight": ["1.2.weight", "1.2.bias"], "2.token": ["2.token", "2.norm.weight", "2.norm.bias"],
        "2.linear.weight": ["2.linear.weight", "2.linear.bias"], "3.weight": ["3.weight", "3.bias"],
    },
    "block": {"^[01]": [n for n in PARAMETERS if n[0] in "01"], ".": [n for n in PARAMETERS if n[0] in "23"]},
}  # fmt: skip


def layer_map(by: str = "unit", **options) -> LayerMap:
    return LayerMap.of(NET, by, ("^[01]", ".") if by == "block" else (), **options)


def members(layers: LayerMap) -> dict[str, list[str]]:
    """Parameters of each layer, in model order."""
    found = {name: [] for name in layers.names}
    for spec, layer in sorted(zip(layers.tensors, layers.groups, strict=True), key=lambda pair: pair[0].order):
        if spec.kind == "parameter":
            found[layers.names[layer]].append(spec.name)
    return found


@pytest.mark.parametrize("by", GROUPINGS)
def test_groupings(by):
    assert members(layer_map(by)) == EXPECTED[by]
    blocks = ("^[01]", ".") if by == "block" else ()
    assert layer_map("tensor").regroup(by, blocks) == layer_map(by)


@pytest.mark.parametrize(("by", "layer"), [("unit", "0.0"), ("module", "0.1"), ("tensor", "0.1.bias")])
def test_statistics_travel_with_their_norm(by, layer):
    layers = layer_map(by)
    layer_of = {s.name: layers.names[g] for s, g in zip(layers.tensors, layers.groups, strict=True)}
    assert {layer_of[f"0.1.{name}"] for name in ("running_mean", "running_var", "num_batches_tracked")} == {layer}


def test_resnet20_groups_of_the_released_code():
    """22 groups; a later one begins with the statistics of the BatchNorm before it, and is called after its weights."""
    layers = LayerMap.of(build("resnet20", Inputs((3, 32, 32), 10)), "bias_group")
    assert layers.L == 22
    members = [[s for s, g in zip(layers.tensors, layers.groups, strict=True) if g == at] for at in range(22)]
    first = [min(group, key=lambda spec: spec.order).name for group in members]
    assert first[0] == "stem.conv.weight"
    assert all(name.endswith("running_mean") for name in first[1:])
    assert all(re.search(r"conv\d?\.weight$", name) for name in layers.names[:-1])
    assert layers.names[-1] == "head.weight"
    assert len({*layers.names}) == 22
    last = [spec.name for spec in members[-1]]
    assert [n for n in last if "num_batches_tracked" in n]
    assert [n for n in last if n.startswith("head")] == ["head.weight", "head.bias"]


def test_statistics_without_parameters_are_a_layer():
    net = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))
    assert LayerMap.of(net, "unit").names == LayerMap.of(net, "module").names == ("0", "1")


def test_block_names_the_tensor_that_no_pattern_matches():
    with pytest.raises(ValueError, match=r"no pattern matches the tensor '2\.token'"):
        LayerMap.of(NET, "block", ("^[01]",))


@pytest.mark.parametrize("channels_last", [False, True])
def test_layout(channels_last):
    """Parameters in order, then statistics, then counters, without gaps; the value is the state_dict and back."""
    layers = layer_map(channels_last=channels_last)
    ends = [0, *(s.stop for s in layers.tensors)]
    assert [s.start for s in layers.tensors] == ends[:-1]
    assert [s.name for s in layers.tensors[: layers.T]] == list(PARAMETERS)
    assert [s.kind for s in layers.tensors[layers.T :]] == ["buffer", "buffer", "counter"]
    P = sum(p.numel() for p in NET.parameters())
    assert (layers.P, layers.S, layers.B) == (P, P + 7, 7)
    state = NET.state_dict()
    value = layers.flatten(state)
    back = layers.state_dict(value)
    assert list(back) == list(state)
    for name, tensor in state.items():
        assert back[name].equal(tensor)
        assert back[name].dtype == tensor.dtype
        assert back[name].is_contiguous()
    first = value[: 3 * 2 * 9]
    expected = state["0.0.weight"].permute(0, 2, 3, 1) if channels_last else state["0.0.weight"]
    assert first.equal(expected.flatten())
    assert layers.unflatten(value)["0.0.weight"].is_contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )
    assert layers.counts.tolist() == [sum(PARAMETERS[n].numel() for n in ns) for ns in EXPECTED["unit"].values()]


def test_flatten_keeps_float64():
    state = {n: t.double() + 1e-12 if t.is_floating_point() else t for n, t in NET.state_dict().items()}
    layers = layer_map()
    value = layers.flatten(state, torch.float64)
    assert all(layers.state_dict(value)[name].equal(tensor) for name, tensor in state.items())


def test_flatten_names_the_tensor_that_does_not_fit():
    state = NET.state_dict()
    with pytest.raises(KeyError, match=r"2\.token"):
        layer_map().flatten({n: t for n, t in state.items() if n != "2.token"})
    with pytest.raises(ValueError, match=r"3\.weight has shape \(3, 4\), the model needs \(2, 4\)"):
        layer_map().flatten({**state, "3.weight": torch.zeros(3, 4)})


@pytest.mark.parametrize("by", GROUPINGS)
def test_dots_and_norms(by):
    """Sums over each layer's tensors; of whole values also over its statistics and counters."""
    layers = layer_map(by)
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(3, layers.S, generator=generator), torch.randn(layers.S, generator=generator)
    for width in (layers.P, layers.S):
        expected = torch.zeros(3, layers.L, dtype=torch.float64)
        for spec, layer in zip(layers.tensors, layers.groups, strict=True):
            if spec.stop <= width:
                at = slice(spec.start, spec.stop)
                expected[:, layer] += (a[:, at].double() * b[at].double()).sum(1)
        dots = layers.dots(a[:, :width], b[:width])
        assert dots.dtype == torch.float64
        torch.testing.assert_close(dots, expected, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(layers.norms(a[0, :width]), layers.dots(a[0, :width], a[0, :width]).sqrt())


def test_sums_of_squares_do_not_overflow_or_vanish():
    layers = layer_map("model")
    assert layers.norms(torch.full((layers.P,), 1e30)).item() == pytest.approx(1e30 * layers.P**0.5)
    assert layers.norms(torch.full((layers.P,), 1e-30)).item() == pytest.approx(1e-30 * layers.P**0.5)


@pytest.mark.parametrize("by", ["tensor", "unit", "model"])
def test_squares_are_the_same_whatever_is_at_hand(by, monkeypatch):
    """Of one vector or many, of all of it or of a block: the same bits. Blocks tile the vector, and none holds statistics
    beside parameters."""
    monkeypatch.setattr(raysim.core.segments, "RUN", 4)
    layers = layer_map(by)
    rows = torch.randn(3, layers.S + 1, generator=torch.Generator().manual_seed(1))[:, 1:]  # at odd addresses
    rows[1] *= 1e-30
    rows[2, :3] = 0
    whole = layers.segments.squares(rows)
    assert torch.stack([layers.segments.squares(row.clone()) for row in rows]).equal(whole)
    for size in 1, 9, 10**6:
        blocks = list(layers.segments.blocks(size))
        assert [0, *(stop for _, stop in blocks)] == [*(start for start, _ in blocks), layers.S]
        assert any(stop == layers.P for _, stop in blocks)
        assert max(stop - start for start, stop in blocks) <= max(size, 4)
        assert torch.cat([layers.segments.squares(rows[:, a:b], a) for a, b in blocks], 1).equal(whole)
    torch.testing.assert_close(layers.norms(rows), layers.dots(rows, rows).sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(layers.norms(rows.double()), layers.dots(rows, rows).sqrt(), rtol=1e-14, atol=0)


def test_scaled_is_a_product_with_expanded_factors():
    layers = layer_map("unit")
    value = torch.randn(layers.S, generator=torch.Generator().manual_seed(1))
    factors = torch.tensor([1.0, 0.3, 0.3, *torch.rand(len(layers.tensors) - 3).tolist()]).double()
    before = value.clone()
    assert layers.scaled(value, factors).equal(value * layers.per_element(factors.float()))
    few = layers.scaled(value, factors[: layers.T])
    assert few[: layers.P].equal(layers.scaled(value, factors)[: layers.P])
    assert few[layers.P :].equal(value[layers.P :])
    assert value.equal(before)


@pytest.mark.parametrize("by", GROUPINGS)
def test_values_of_layers_for_tensors_and_parameters(by):
    layers = layer_map(by)
    per_layer = torch.arange(2 * layers.L).view(2, layers.L)
    per_tensor = layers.expand(per_layer)
    assert per_tensor.tolist() == [[row[g] for g in layers.groups] for row in per_layer.tolist()]
    assert layers.collect(per_tensor).equal(per_layer)
    expanded = layers.per_parameter(per_layer)
    assert expanded.shape == (2, layers.P)
    for spec, layer in zip(layers.tensors[: layers.T], layers.groups, strict=False):
        assert (expanded[:, spec.start : spec.stop] == per_layer[:, layer : layer + 1]).all()
    assert layers.per_element(per_tensor).shape == (2, layers.S)


def names(layers: LayerMap, part: slice) -> list[str]:
    """Tensors that lie in a slice of [P], which must not cut one."""
    inside = [s for s in layers.tensors[: layers.T] if part.start <= s.start and s.stop <= part.stop]
    assert sum(s.size for s in inside) == part.stop - part.start
    return [s.name for s in inside]


def test_parts_of_the_model():
    """Stages are the model's children; the last is the head."""
    layers = layer_map()
    everything = list(PARAMETERS)
    bounds = [next(i for i, n in enumerate(everything) if n.startswith(f"{stage}.")) for stage in range(4)]
    assert layers.stages == 4
    assert names(layers, layers.span("all")) == everything
    assert names(layers, layers.span("head")) == everything[bounds[3] :]
    assert names(layers, layers.span("body")) == everything[: bounds[3]]
    assert names(layers, layers.top(0)) == []
    assert names(layers, layers.top(1)) == everything[bounds[3] :]
    assert names(layers, layers.top(2)) == everything[bounds[2] :]
    assert names(layers, layers.top(9)) == everything
    assert names(layers, layers.top(1, within="body")) == everything[bounds[2] : bounds[3]]
    assert names(layers, layers.top(9, within="body")) == everything[: bounds[3]]
    assert names(layers, layers.top_tensors(3)) == everything[-3:]
    assert names(layers, layers.top_tensors(1, within="body")) == everything[bounds[3] - 1 : bounds[3]]
    assert layers.stage_at(layers.top(2).start) == 2
    in_head = {s.name for s, there in zip(layers.tensors, layers.where("head"), strict=True) if there}
    assert in_head == {"3.weight", "3.bias"}
    assert layers.where("body").equal(~layers.where("head"))
    assert layers.where("all").all()


def test_unflatten_is_differentiable():
    layers = layer_map(channels_last=True)
    value = layers.flatten(NET.state_dict()).requires_grad_()

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        return (torch.func.functional_call(NET[0], strip(tensors), (torch.ones(2, 2, 3, 3),)) ** 2).sum()

    def strip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n[2:]: t for n, t in tensors.items() if n in ("0.0.weight", "0.1.weight", "0.1.bias")}

    loss(layers.unflatten(value)).backward()
    leaves = {n: p.detach().clone().requires_grad_() for n, p in PARAMETERS.items()}
    loss(leaves).backward()
    for name, grad in layers.unflatten(value.grad).items():
        torch.testing.assert_close(grad, torch.zeros_like(grad) if leaves.get(name) is None or
                                   leaves[name].grad is None else leaves[name].grad)  # fmt: skip
