"""Compressed messages: the rules by numerical cases and algebra, whole runs by recomputation, on both engines."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from case import Traced
from conftest import simulate, table, tiny
from ray import cloudpickle
from torch import Tensor, nn

from raysim.config import ConfigError
from raysim.core.broadcast import Broadcast
from raysim.core.failures import ClientFailure
from raysim.core.layers import LayerMap
from raysim.core.message import Compressor, Message, Part, Transform
from raysim.core.server import Memory
from raysim.federation import Federation
from raysim.methods import TRANSFORMS

CASES = json.loads((Path(__file__).parents[1] / "vectors" / "compression.json").read_text())["cases"]


class Sender:
    """One whose uniform numbers are given, or drawn from one stream."""

    def __init__(self, layers: LayerMap, uniform: Sequence[float] | None = None, seed: int = 0):
        self.layers, self.uniform = layers, uniform
        self.stream = torch.Generator().manual_seed(seed)
        self.states: dict[str, Any] = {}

    def generator(self, purpose: str) -> torch.Generator:
        return self.stream

    def state(self, method: Transform) -> Any:
        return self.states.setdefault(method.name, method.new_state(self.layers))


def chain(*entries: Any) -> tuple[Transform, ...]:
    """Transforms as in a configuration, for tensors of any size."""
    named = [(entry, {}) if isinstance(entry, str) else next(iter(entry.items())) for entry in entries]
    return tuple(
        TRANSFORMS[name](**options, **({"least": 0} if issubclass(TRANSFORMS[name], Compressor) else {}))
        for name, options in named
    )


@cache
def layers_of(*shapes: tuple[int, ...]) -> LayerMap:
    """A model of tensors with these shapes."""
    model = nn.Module()
    for i, shape in enumerate(shapes):
        model.register_parameter(f"w{i}", nn.Parameter(torch.zeros(shape)))
    return LayerMap.of(model)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers are those of the sender."""
    drawn = Compressor.draws
    monkeypatch.setattr(
        Compressor, "draws",
        lambda self, part, sender: torch.tensor(sender.uniform) if sender.uniform else drawn(self, part, sender),
    )  # fmt: skip


def sent(vector: Any, *entries: Any, sender: Sender | None = None) -> tuple[Tensor, Message]:
    """What is received of a tensor, flat, and its message."""
    update = torch.tensor(vector)
    layers = layers_of(tuple(update.shape))
    flat = update.flatten()
    message = Message(flat, layers)
    message.encode(chain(*entries), sender or Sender(layers))
    return flat, message


def close(found: Tensor, expected: Any) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64).flatten()
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))


def of(*rules: str) -> list[Any]:
    return [pytest.param(case, id=f"{case['rule']}{i}") for i, case in enumerate(CASES) if case["rule"] in rules]


@pytest.mark.parametrize("case", of("qsgd", "uniform", "top_k", "sign", "terngrad", "chain"))
def test_cases(case: Mapping[str, Any], given: None) -> None:
    inputs, params, expect = case["inputs"], case["params"], case["expect"]
    entries = params.get("chain") or [{case["rule"]: params}]
    received, message = sent(inputs["vector"], *entries, sender=Sender(layers_of((12,)), inputs.get("uniform")))
    close(received, expect["decoded"])
    assert message.costs.sum() == expect["bytes"]
    if len(expect.get("indices", ())) < 12 and "indices" in expect:
        assert received.nonzero().flatten().tolist() == expect["indices"]
    if "codes" in expect and case["rule"] == "qsgd":
        bits = expect["bits_per_entry"]
        numbers = [code + params["levels"] for code in expect["codes"]]
        assert packed(numbers, bits).hex() == expect["packed_codes_hex"]
        assert len(packed(numbers, bits)) == message.costs[0].sum()


def packed(codes: Sequence[int], bits: int) -> bytes:
    """Whole numbers side by side, the first in the lowest bits."""
    whole = sum(code << (bits * i) for i, code in enumerate(codes))
    return whole.to_bytes(ceil(bits * len(codes) / 8), "little")


@pytest.mark.parametrize("case", of("qsgd_bytes", "top_k_bytes"))
def test_bytes(case: Mapping[str, Any]) -> None:
    vector = torch.randn(case["inputs"]["entries"], generator=torch.Generator().manual_seed(0)).tolist()
    _, message = sent(vector, {case["rule"].removesuffix("_bytes"): case["params"]})
    assert message.costs.sum() == case["expect"]["bytes"]


@pytest.mark.parametrize(
    ("entries", "fraction", "cost"),
    [(1024, 0.05, 52 * 4 + 65), (100, 0.07, 7 * 4 + 7)],
    ids=["a position of 1024 takes ten bits", "0.07 of 100 is 7, although floats say more"],
)
def test_bytes_of_top_k(entries: int, fraction: float, cost: int) -> None:
    _, message = sent(torch.arange(1.0, entries + 1).tolist(), {"top_k": {"fraction": fraction}})
    assert message.costs.sum() == cost


def test_the_largest_of_the_largest() -> None:
    vector = torch.randn(40, generator=torch.Generator().manual_seed(0)).tolist()
    twice, message = sent(vector, {"top_k": {"fraction": 0.5}}, {"top_k": {"fraction": 0.2}})
    once, expected = sent(vector, {"top_k": {"fraction": 0.1}})
    assert twice.tolist() == once.tolist() and (message.costs == expected.costs).all()


@pytest.mark.parametrize("case", of("powersgd"))
def test_powersgd(case: Mapping[str, Any]) -> None:
    tensor, start, expect = (
        torch.tensor(case["inputs"]["tensor"]),
        torch.tensor(case["inputs"]["start"]),
        case["expect"],
    )
    sender = Sender(layers_of(tuple(tensor.shape)))
    [method] = chain({"powersgd": case["params"]})
    sender.state(method).of["model/w0"] = start
    for decoded in ("decoded", "then_warm"):
        received, message = sent(tensor.tolist(), {"powersgd": case["params"]}, sender=sender)
        close(received, expect[decoded])
    assert message.costs.sum() == expect["bytes"]


def test_error_feedback_keeps_what_was_not_received() -> None:
    """Σ received = Σ sent − what is kept, and the cases, number by number."""
    [case] = [case for case in CASES if case["rule"] == "error_feedback"]
    entries = ["error_feedback", {"top_k": case["params"]["top_k"]}]
    sender = Sender(layers_of((12,)))
    total = torch.zeros(12, dtype=torch.float64)
    for update, step in zip(case["inputs"]["updates"], case["expect"]["steps"], strict=True):
        received, _ = sent(update, *entries, sender=sender)
        assert received.tolist() == step["sent"]
        errors = sender.states["error_feedback"].of["model"]
        assert errors.tolist() == step["error"]
        total += torch.tensor(update, dtype=torch.float64) - received
    assert total.tolist() == errors.tolist()


def server_of(layers: LayerMap, clients: int) -> Any:
    return SimpleNamespace(
        layers=layers, memory=Memory(), seed=0, t=0, value=torch.zeros(layers.S),
        population=SimpleNamespace(sizes=torch.ones(clients)),
    )  # fmt: skip


def test_a_download_of_changes() -> None:
    """From a public model of zeros. A client that has missed j messages is sent them all, or one whole model."""
    [case] = [case for case in CASES if case["rule"] == "download"]
    server, broadcast = server_of(layers_of((12,)), 5), Broadcast(chain(*case["params"]["download"]))
    broadcast.prepare(server)  # the first message is whole
    assert broadcast.deliver(server, range(5)).sum(1).tolist() == [48] * 5
    for t, (value, step) in enumerate(zip(case["inputs"]["global_models"], case["expect"]["steps"], strict=True), 1):
        server.value, server.t = torch.tensor(value), t
        broadcast.encode(server, t)
        assert broadcast.public(server).tolist() == step["public"]
        if t < 5:
            assert broadcast.deliver(server, [4]).sum() == step["bytes"]
            late = [0, 1, 2, 3][t - 1]
            expected = case["expect"]["bytes_after_missing"][t - 1]
            assert broadcast.deliver(server, [late]).sum() == expected


@pytest.mark.parametrize("entry", [
    {"qsgd": {"levels": 2, "bucket": 8}}, "terngrad", {"uniform": {"bits": 2, "rounding": "stochastic"}},
    {"rand_k": {"fraction": 0.25, "unbiased": True}},
], ids=["qsgd", "terngrad", "uniform", "rand_k"])  # fmt: skip
def test_the_mean_of_random_draws_is_what_was_sent(entry: Any) -> None:
    """10,000 draws at once, as rows that are encoded apart: within four standard errors."""
    vector, draws = torch.linspace(-1.5, 2.0, 8), 10_000
    [method] = chain(entry)
    sender, spec = Sender(layers_of((8,))), layers_of((8,)).tensors[0]
    rows = []
    for _ in range(draws):
        part = Part("model", spec, vector, vector)
        method.encode(part, sender)
        rows.append(part.decoded())
    found = torch.stack(rows).double()
    assert ((found.mean(0) - vector).abs() <= 4 * found.std(0) / sqrt(draws) + 1e-6).all()


@pytest.mark.parametrize(("stack", "costs"), [
    ([{"rand_k": {"fraction": 0.5}}, {"rand_k": {"fraction": 0.2}}], (400, 0, 0)),
    ([{"rand_k": {"fraction": 0.5}}, {"top_k": {"fraction": 0.2}}], (400, 125, 0)),
    ([{"top_k": {"fraction": 0.5}}, {"rand_k": {"fraction": 0.2}}], (400, 125, 0)),
    ([{"qsgd": {"levels": 7}}, "powersgd"], (4 * 2 * (20 + 50), 0, 0)),
], ids=str)  # fmt: skip
def test_what_the_receiver_cannot_know_is_paid_for(stack: Any, costs: Any) -> None:
    """100 of 1000 numbers, with 10 bits for each position that the server cannot draw itself; factors of a matrix in full."""
    layers = layers_of((20, 50))
    vector, sender = torch.linspace(-1, 1, 1000), Sender(layers)
    part = Part("model", layers.tensors[0], vector, vector)
    for method in chain(*stack):
        method.encode(part, sender)  # type: ignore[attr-defined]
    assert part.costs() == costs


# Whole runs.

STACKS: dict[str, Any] = {
    "top_k": [{"top_k": 0.05}], "rand_k": [{"rand_k": 0.2}], "qsgd": [{"qsgd": {"norm": "max"}}],
    "uniform": [{"uniform": {"bits": 4, "rounding": "stochastic"}}], "bf16": ["bf16"], "fp16": ["fp16"],
    "sign": ["error_feedback", "sign"], "terngrad": ["terngrad"], "powersgd": ["error_feedback", {"powersgd": 1}],
    "error_feedback": ["error_feedback", {"top_k": 0.05}, {"qsgd": {"levels": 3, "norm": "max"}}],
}  # fmt: skip
DOWN: dict[str, Any] = {"uniform": [{"uniform": 8}], "top_k": [{"top_k": 0.1}], "powersgd": ["powersgd"]}


def test_every_transform_is_in_a_stack() -> None:
    assert STACKS.keys() == TRANSFORMS.keys()


@pytest.mark.parametrize("name", STACKS)
def test_same_bits_on_actors_and_after_a_stop(name: str, tmp_path: Path, warm_ray: Any, subtests: Any) -> None:
    changes = {"upload": STACKS[name], "download": DOWN.get(name, []), "rounds": {"total": 4, "checkpoint_every": 1}}
    local = simulate(tiny(**changes), tmp_path / "local")
    traffic = table(tmp_path / "local", "traffic")
    assert (traffic["bytes"] == sum(traffic[c] for c in traffic if c[:3] in ("up_", "dow"))).all()
    assert (traffic["up_params"] < 4 * local.server.layers.P).all()
    engine = {"ray": {"clients_per_actor": 2}}
    assert simulate(tiny(**changes, engine=engine), tmp_path / "ray", make_engine=warm_ray).sha256() == local.sha256()
    first = Federation(tiny(**changes), tmp_path / "stopped")
    for _ in range(2):
        first.step()
    first.close()
    resumed = Federation(tiny(**changes), tmp_path / "stopped", resume=True)
    while resumed.step() is not None:
        pass
    resumed.finish()
    resumed.close()
    assert resumed.sha256() == local.sha256()
    assert all((table(tmp_path / "stopped", "traffic")[c] == traffic[c]).all() for c in traffic if "transport" not in c)


@pytest.mark.parametrize("upload", [[{"top_k": 1.0}], [{"rand_k": 1.0}]], ids=str)
def test_everything_sent_is_fedavg(upload: Any, ran: Any) -> None:
    assert ran(upload=upload).sha256() == ran().sha256()


def test_what_is_added_up_is_what_was_sent(ran: Any) -> None:
    """Of every tensor of 256 elements or more, the twentieth with the greatest changes; others and buffers whole."""
    trace = {"record": {"traces": [1]}}
    honest, sparse = (Traced(f.folder, 0, f) for f in (ran(**trace), ran(upload=[{"top_k": 0.05}], **trace)))
    assert len(honest.clients) == 3
    encoded = 0
    for true, sent in zip(honest.clients, sparse.clients, strict=True):
        for spec in honest.federation.server.layers.tensors:
            moved, arrived = (one.model[spec.name] - honest.before[spec.name] for one in (true, sent))
            if spec.kind != "parameter" or moved.size < 256:
                np.testing.assert_allclose(arrived, moved, atol=1e-6)
                continue
            least = np.sort(np.abs(moved).ravel())[-ceil(moved.size * 0.05)]
            kept = np.abs(moved) >= least
            np.testing.assert_allclose(arrived, np.where(kept, moved, 0), atol=1e-6)
            encoded += 1
    assert encoded >= 6


def test_only_what_is_sent_counts(ran: Any, tmp_path: Path) -> None:
    """Layers that the plan leaves out, heads that stay, neurons that are not sent, and a second vector."""
    layers = ran().server.layers
    sizes = {spec.name: spec.size for spec in layers.tensors if spec.kind == "parameter"}
    cost = {name: 2 * size if size >= 256 else 4 * size for name, size in sizes.items()}

    def bytes_of(**changes: Any) -> np.ndarray:
        return table(ran(upload=["bf16"], **changes).folder, "traffic")["up_params"].reshape(3, -1)

    assert (bytes_of() == sum(cost.values())).all()
    head = sum(cost[name] for name in cost if name.startswith("head"))
    assert head > 0 and (bytes_of(client=["fedrep"]) == sum(cost.values()) - head).all()
    assert (bytes_of(weighting=[{"random_layer": 1}]).sum(1) == sum(cost.values())).all()
    plain = table(ran(client=["fedadp"]).folder, "traffic")["up_params"]
    assert (table(ran(client=["fedadp"], upload=["bf16"]).folder, "traffic")["up_params"] < plain).all()
    still = {"local": {"momentum": 0.0, "weight_decay": 0.0}}
    scaffold = table(ran(client=["scaffold"], upload=["bf16"], **still).folder, "traffic")
    assert (scaffold["up_vectors"] == sum(cost.values())).all()


def test_a_download_without_the_head(ran: Any) -> None:
    """FedRep's clients are sent the other layers: 8 bits an element, and two numbers of four bytes for each tensor."""
    run = ran(client=["fedrep"], download=[{"uniform": {"bits": 8, "least": 0}}], evaluate={"global": False})
    sizes = [spec.size for spec in run.server.layers.tensors if spec.kind == "parameter" and "head" not in spec.name]
    traffic = table(run.folder, "traffic")
    assert {*traffic["down_params"]} == {sum(sizes)}
    assert {*traffic["down_scales"]} == {8 * len(sizes)}


@pytest.mark.parametrize("client", ["fedala", "ditto", "fedamp", "apple", "scaffold", "fedadp", "moon"])
def test_with_methods_that_keep_or_send_more(client: str, tmp_path: Path, warm_ray: Any) -> None:
    changes: dict[str, Any] = {"client": [client], "upload": ["error_feedback", {"top_k": 0.1}]}
    changes["local"] = {"momentum": 0.0, "weight_decay": 0.0}
    changes["rounds"] = {"participation": 1.0 if client in ("fedamp", "apple") else 0.4}
    local = simulate(tiny(**changes), tmp_path / "local")
    engine = {"ray": {"clients_per_actor": 4}}
    assert simulate(tiny(**changes, engine=engine), tmp_path / "ray", make_engine=warm_ray).sha256() == local.sha256()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"upload": [{"top_k": 0.1}, "error_feedback"]}, "upload.1.error_feedback: corrects .* List it first"),
        ({"upload": ["error_feedback"]}, "and nothing does. Add a compressor, such as top_k"),
        ({"upload": ["error_feedback", {"rand_k": {"unbiased": True}}]}, "error_feedback would amplify"),
        ({"upload": ["powersgd", "qsgd"]}, "upload.0.powersgd: sends factors .* List it last"),
        ({"upload": ["qsgd", "qsgd"]}, "upload: 'qsgd' is listed 2 times"),
        ({"upload": ["error_feedback", "sign"], "weighting": [{"fedldf": 2}]}, "know before it sends what fedldf lets"),
        ({"download": ["error_feedback", "sign"]}, "is for uploads"),
        (
            {"download": ["bf16"], "client": ["fedamp"], "rounds": {"participation": 1.0}},
            "download: .* fedamp sends each",
        ),
        ({"upload": [{"top_k": 0.0}]}, r"upload.0.top_k.fraction: must be a number > 0 and <= 1, but is 0"),
        ({"server": ["qsgd"]}, "It belongs under 'upload'"),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tiny(**changes)


def test_a_number_that_fp16_does_not_have() -> None:
    with pytest.raises(ClientFailure, match=r"model/w0 has an element beyond 65504, the greatest of fp16\. Use bf16"):
        sent([0.0, 7e4], "fp16")


@dataclass(frozen=True)
class Halved(Compressor):
    """A transform as a user writes it: every element halved, as one byte of a code."""

    def encode(self, part: Part, sender: Any) -> None:
        part.values, part.bits = part.values / 2, 8


@dataclass(frozen=True)
class Short(Compressor):
    def encode(self, part: Part, sender: Any) -> None:
        part.values = part.values[:1]


def test_one_from_outside(tmp_path: Path, warm_ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It travels to actors; one that loses elements is refused before the run starts."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setitem(TRANSFORMS, "halved", Halved)
    monkeypatch.setitem(TRANSFORMS, "short", Short)
    half = {"step_size": {"eta": 0.5}}
    halved = simulate(tiny(upload=[{"halved": {"least": 0}}], rounds={"total": 1}), tmp_path / "halved")
    on_ray = tiny(upload=[{"halved": {"least": 0}}], rounds={"total": 1}, engine={"ray": {"clients_per_actor": 2}})
    assert simulate(on_ray, tmp_path / "ray", make_engine=warm_ray).sha256() == halved.sha256()
    P = halved.server.layers.P
    assert (table(tmp_path / "halved", "traffic")["up_params"] == P).all()
    stepped = simulate(tiny(server=[half], rounds={"total": 1}), tmp_path / "stepped")
    torch.testing.assert_close(halved.server.value[:P], stepped.server.value[:P], rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match=r"upload: .*Short.encode left a tensor \[1\] .* as part.values"):
        simulate(tiny(upload=["short"]), tmp_path / "short")
