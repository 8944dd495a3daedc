"""A flat model is the module it was made from: same outputs, same gradients, same statistics."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.core.flat import FlatModel
from raysim.core.layers import LayerMap
from raysim.models import Inputs, build

GREY, COLOUR = Inputs((1, 8, 8), 4), Inputs((3, 16, 16), 4)
MODELS = {
    "tiny_bn_cnn": GREY, "small_cnn": GREY, "mlp": GREY, "vit": GREY, "resnet8": COLOUR,
    "fasttext": Inputs((6,), 4, vocab=9), "text_cnn": Inputs((6,), 4, vocab=9),
}  # fmt: skip


def module_and_flat(name: str, channels_last: bool = False, dtype=torch.float64) -> tuple[nn.Module, FlatModel]:
    torch.manual_seed(0)
    module = build(name, MODELS[name], **({"dropout": 0.0} if name in ("vit", "text_cnn") else {})).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-9)  # digits that float32 does not have
    layers = LayerMap.of(module, channels_last=channels_last)
    return module, FlatModel(copy.deepcopy(module), layers, dtype=dtype)


def batch(name: str, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = MODELS[name]
    y = torch.randint(inputs.classes, (5,), generator=generator)
    if inputs.vocab:
        return torch.randint(inputs.vocab, (5, *inputs.shape), generator=generator), y
    return torch.randn(5, *inputs.shape, generator=generator, dtype=dtype), y


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_two_steps_of_training(name, channels_last):
    """Forward, backward and an update through the vectors, twice: parameters, statistics and counters agree."""
    module, flat = module_and_flat(name, channels_last)
    x, y = batch(name)
    if channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        loss = F.cross_entropy(module(x), y)
        module.zero_grad()
        loss.backward()
        flat.grad.zero_()
        z, logits = flat.forward_from(0, x)
        F.cross_entropy(logits, y).backward()
        torch.testing.assert_close(F.cross_entropy(logits, y), loss)
        torch.testing.assert_close(flat.model.head(z), logits)
        for n, p in module.named_parameters():
            torch.testing.assert_close(flat.layers.unflatten(flat.grad)[n], p.grad, msg=n)
            p.data.sub_(p.grad, alpha=0.1)
        flat.params.sub_(flat.grad, alpha=0.1)
    state = flat.layers.state_dict(flat.value)
    for n, tensor in module.state_dict().items():
        torch.testing.assert_close(state[n], tensor, msg=n)


def test_the_vectors_are_the_model():
    """Views both ways, from the first moment and after a step; nothing is copied."""
    module, flat = module_and_flat("tiny_bn_cnn")
    assert flat.layers.state_dict(flat.value).keys() == module.state_dict().keys()
    for n, tensor in module.state_dict().items():
        assert flat.layers.state_dict(flat.value)[n].equal(tensor)
    flat.value.copy_(torch.arange(flat.layers.S))
    for n, tensor in flat.model.state_dict().items():
        assert tensor.double().equal(flat.layers.unflatten(flat.value)[n])
    flat.model.head.bias.data.fill_(-1)
    assert (flat.params[-4:] == -1).all()
    before = flat.value.data_ptr(), flat.grad.data_ptr()
    flat.model.train()
    flat.forward_from(0, batch("tiny_bn_cnn")[0])[1].sum().backward()
    storages = {t.untyped_storage().data_ptr() for t in (flat.value, flat.params, flat.buffers)}
    assert {p.untyped_storage().data_ptr() for p in flat.model.parameters()} <= storages
    assert {p.grad.untyped_storage().data_ptr() for p in flat.model.parameters()} == {flat.grad.data_ptr()}
    assert (flat.value.data_ptr(), flat.grad.data_ptr()) == before


@pytest.mark.parametrize("stage", [1, 2])
def test_lower_stages_run_without_a_graph(stage):
    """Their gradient stays zero; that of the stages above is the whole model's."""
    _, flat = module_and_flat("small_cnn")
    x, y = batch("small_cnn")
    F.cross_entropy(flat.forward_from(0, x)[1], y).backward()
    whole = flat.grad.clone()
    flat.grad.zero_()
    F.cross_entropy(flat.forward_from(stage, x)[1], y).backward()
    start = flat.layers.top(flat.layers.stages - stage).start
    assert flat.grad[start:].equal(whole[start:])
    assert not flat.grad[:start].any()
    assert whole[:start].any()


def test_another_value_through_the_same_module():
    """`functional` is differentiable and moves the statistics of the value it is given, `features_of` none at all."""
    module, flat = module_and_flat("tiny_bn_cnn")
    x, y = batch("tiny_bn_cnn")
    own = flat.value.clone()
    other = (own + 0.01).requires_grad_()
    F.cross_entropy(flat.functional(other * 1.0, x), y).backward()
    for parameter in module.parameters():
        parameter.data.add_(0.01)
    F.cross_entropy(module(x), y).backward()
    for n, p in module.named_parameters():
        torch.testing.assert_close(flat.layers.unflatten(other.grad[: flat.layers.P])[n], p.grad, msg=n)
    assert flat.value.equal(own)

    value = own + 0.01
    kept = value.clone()
    for mode in (True, False):
        flat.model.train(mode)
        torch.testing.assert_close(flat.model.head.weight.detach(), flat.layers.unflatten(own)["head.weight"])
        features = flat.features_of(value, x)
        reference = build("tiny_bn_cnn", GREY).double()
        reference.load_state_dict(flat.layers.state_dict(value))
        torch.testing.assert_close(features, reference.train(mode).features(x))
        assert value.equal(kept)
        assert flat.value.equal(own)
    moved = kept.clone()
    flat.model.train()
    with torch.no_grad():
        flat.functional(moved, x)
    changed = (moved != kept).nonzero().flatten()
    assert changed.min() >= flat.layers.P
    assert len(changed) == flat.layers.B
