"""FedALA and its module ALA."""

import pytest
import torch
from conftest import simulate, table, tiny
from quadratics import Quadratics, quadratics
from runs import STAGES, batches, local_run, loss, perceptron, slope
from torch import nn
from toy import vector

from raysim.config import ConfigError, from_dict
from raysim.core.layers import LayerMap
from raysim.core.local_run import ClientState
from raysim.federation import Federation
from raysim.federation.round import evaluate_personal
from raysim.methods.fedala import FedALA, has_settled
from raysim.methods.fedrep import FedRep
from raysim.models import MODELS, Inputs, build
from raysim.models.staged import classifier, stage
from raysim.store import tables

SMALL = {
    "data": {"name": {"synthetic": {"samples": 96, "shape": [1, 8, 8], "classes": 4}},
             "partition": {"dirichlet_counts": {"alpha": 0.8, "clients": 4, "min_size": 12}}},
    "rounds": {"total": 3, "participation": 1.0, "evaluate_every": 3}, "local": {"batch_size": 16},
}  # fmt: skip
QUICK = {"threshold": 1e9}  # settled as soon as more than ten losses are known
EVERYBODY = {"client": [{"fedala": {"clients": "all", **QUICK}}]}
HERE = {"data": {"client_test_frac": 0.25}, "evaluate": {"personal": "after_init"}}


def again(method, *, previous=None, more=(), **settings):
    """A run of a client whose last model [S] is `previous`, some other one by default."""
    other = perceptron(seed=7).value.clone() if previous is None else previous
    return local_run([method, *more], state=ClientState(previous=other), **settings)


@quadratics()
def test_golden_numbers():
    """Θ_i = (1, 1), Θ = (1.5, 0.5), W = (1, 1), η_w = 0.5, loss ½ ‖Θ̂‖²; the second W is clipped."""
    method = FedALA(eta=0.5)
    federation = Quadratics([method], [[1.0, 1.0]], [[0.0, 0.0]])
    run = federation.run(0, [1.5, 0.5])
    run.client_state.previous = vector([1.0, 1.0])
    run.state(method).settled = True  # one pass over one batch
    run.stack.start(run)
    assert run.state(method).weights.tolist() == pytest.approx([0.625, 1.0])
    assert run.params.tolist() == pytest.approx([1.3125, 0.5])


def test_the_weights_follow_the_slope_of_the_loss():
    """Finite differences over W of L(Θ_i + (Θ − Θ_i) ⊙ W) on one batch, in the head and in the last two stages."""
    for layers in (1, 2):
        method = FedALA(eta=0.3, layers=layers, fraction=1.0)
        run = again(method, batch_size=24)
        run.state(method).settled = True
        old, new = run.previous.clone(), run.received.clone()
        top = run.layers.top(layers)
        W = torch.full_like(old[top], 0.5)
        run.state(method).weights = W.clone()
        run.stack.start(run)

        def at(weights, top=top, old=old, new=new, run=run):
            mixed = torch.cat([new[: top.start], old[top] + (new[top] - old[top]) * weights])
            return loss(run, mixed, *run.data.train)

        expected = (W - 0.3 * slope(at, W)).clamp(0, 1)
        assert torch.allclose(run.state(method).weights, expected, atol=1e-9)
        assert (run.state(method).weights - W).abs().max() > 1e-3
        mixed = old[top] + (new[top] - old[top]) * expected
        assert torch.allclose(run.params[top], mixed, atol=1e-9)
        assert torch.equal(run.params[: top.start], new[: top.start])  # the lower layers are overwritten


def test_without_a_rate_the_download_is_taken_bit_for_bit(ran):
    fedavg = ran().server.value
    assert torch.equal(ran(client=[{"fedala": {"eta": 0.0}}]).server.value, fedavg)
    assert not torch.equal(ran(client=[{"fedala": QUICK}]).server.value, fedavg)


def test_learning_takes_no_draws_from_dropout(tmp_path, monkeypatch):
    """With dropout too the training after an idle ALA is FedAvg's."""

    def net(inputs):
        return classifier(inputs, {"fc1": stage(flatten=nn.Flatten(), linear=nn.Linear(64, 9), drop=nn.Dropout(0.5))})

    monkeypatch.setitem(MODELS, "net", net)
    ours, fedavg = (
        simulate(tiny(client=stack, model={"name": "net"}), tmp_path / str(stack)).server.value
        for stack in ([{"fedala": {"eta": 0.0}}], [])
    )
    assert torch.equal(ours, fedavg)


def test_zero_weights_ignore_the_download():
    method = FedALA(eta=0.0, layers=9)  # more stages than there are: all
    run = again(method)
    run.state(method).weights = torch.zeros_like(run.params)
    run.stack.start(run)
    assert torch.equal(run.params, run.previous)


def test_nothing_happens_where_the_models_do_not_differ():
    """As in the first round, or to a client that has none."""
    for run in (again(FedALA(), previous=local_run([]).received), local_run([FedALA()])):
        run.stack.start(run)
        assert torch.equal(run.params, run.received)
        assert (run.state(run.stack.methods[0]).settled, run.orders) == (False, [])


def test_first_until_it_settles_then_one_pass():
    method = FedALA(**QUICK)
    run = again(method)
    run.stack.start(run)
    assert len(batches(run, "ala")) == 11 * 3  # int(0.8 · 24) = 19 samples: 8, 8, 3
    following = local_run([method], state=run.client_state, t=1)
    following.stack.start(following)
    assert len(batches(following, "ala")) == 3
    endless = again(FedALA(threshold=0.0))
    endless.stack.start(endless)
    assert len(batches(endless, "ala")) == 100 * 3


@pytest.mark.parametrize("in_training", [False, True])
@pytest.mark.parametrize("own", [None, False, True])
def test_a_shorter_last_batch_is_left_out_as_in_training_or_as_asked(own, in_training):
    run = again(FedALA(drop_last=own, **QUICK), samples=27, drop_last=in_training)
    run.stack.start(run)
    sizes = [8, 8] if (in_training if own is None else own) else [8, 8, 5]  # of int(0.8 · 27) = 21 samples
    assert [len(rows) for rows in batches(run, "ala")] == 11 * sizes
    run.fit()
    assert [len(rows) for rows in batches(run, "batches")] == ([8, 8, 8] if in_training else [8, 8, 8, 3])


def test_the_last_batch_of_every_epoch_is_noted(tmp_path):
    """The first time until it settles, then as often as asked; it costs the simulated method nothing."""
    method = FedALA(epochs=6, **QUICK)
    run = again(method)
    mixed: list[torch.Tensor] = []  # Θ̂ of every batch

    def remembered(x, y, real=run.gradient, **kwargs):
        mixed.append(run.params.clone())
        return real(x, y, **kwargs)

    run.gradient = remembered
    run.stack.start(run)
    [note] = run.notes
    assert (note.method, note.name, note.axes, note.clients) == ("fedala", "loss", ("client", "epoch"), (0,))
    x, y = run.data.train
    last = zip(mixed[2::3], batches(run, "ala")[2::3], strict=True)  # three batches an epoch
    assert note.value.tolist() == [pytest.approx([loss(run, w, x[rows], y[rows]).item() for w, rows in last])]
    assert note.value.shape == (1, 11)
    following = local_run([method], state=run.client_state, t=1)
    following.stack.start(following)
    assert following.notes[0].value.shape == (1, 6)

    folders = {method: tmp_path / method for method in ("fedavg", "fedala")}
    simulate(tiny(**SMALL), folders["fedavg"])
    simulate(tiny(client=[{"fedala": QUICK}], **SMALL), folders["fedala"])
    notes, traffic = table(folders["fedala"], "notes"), [table(f, "traffic")["bytes"] for f in folders.values()]
    assert [(notes["round"] == t).sum() for t in range(3)] == [0, 4 * 11, 4]  # all four clients take part
    assert notes["index"][notes["client"] == 2].tolist() == [*range(11), 0]
    assert (traffic[0] == traffic[1]).all()


def test_it_may_begin_later():
    """Before, the download is taken; then the first optimisation is due."""
    for t, passes in ((4, 0), (5, 11)):
        run = again(FedALA(start_round=5, **QUICK), t=t)
        run.stack.start(run)
        assert len(batches(run, "ala")) == 3 * passes
        assert torch.equal(run.params, run.received) == (t == 4)


def test_settled_means_that_the_last_ten_losses_hardly_differ():
    assert not has_settled([1.0] * 10, 0.1)
    assert has_settled([1.0] * 11, 0.1)
    assert has_settled([9.0] + [1.0] * 10, 0.1)
    wavy = [0.0] + [1.0, 1.2] * 5  # population deviation 0.1, sample deviation 0.105
    assert has_settled(wavy, 0.1001)
    assert not has_settled(wavy, 0.0999)
    assert has_settled([float("nan")] * 100, 0.1)


def test_weights_stay_between_zero_and_one():
    method = FedALA(eta=1e4, threshold=1e9)
    run = again(method)
    run.stack.start(run)
    weights = run.state(method).weights
    assert set(weights.tolist()) == {0.0, 1.0}


def test_the_samples_are_drawn_once_a_round():
    """At random, the same for all epochs; `window`: neighbours in stored order. Rows of a later round are others."""
    for window in (False, True):
        rows = []
        for t in (0, 1):
            run = again(FedALA(window=window, **QUICK), t=t)
            run.stack.start(run)
            epochs = torch.cat(batches(run, "ala")).view(11, 19)
            assert (epochs == epochs[0]).all()
            assert len(set(epochs[0].tolist())) == 19
            rows.append(epochs[0].tolist())
        assert all((sorted(r) == r and r[-1] - r[0] == 18) == window for r in rows)
        assert rows[0] != rows[1]


def test_frozen_after_the_first_time():
    method = FedALA(freeze=True, **QUICK)
    run = again(method)
    run.stack.start(run)
    weights = run.state(method).weights.clone()
    following = local_run([method], state=run.client_state, t=1, received=perceptron(seed=3).value.clone())
    following.stack.start(following)
    assert torch.equal(following.state(method).weights, weights)
    assert batches(following, "ala") == []
    top = following.layers.top(1)
    old, new = following.previous[top], following.received[top]
    assert torch.allclose(following.params[top], old + (new - old) * weights, atol=1e-15)


def test_tensors_count_what_the_released_code_counts():
    """2 tensors are a stage here; 0 are all; 1 is the bias alone."""

    def started(**fields):
        run = again(FedALA(**fields))
        run.stack.start(run)
        return run.params.clone()

    assert torch.equal(started(tensors=2), started(layers=1))
    assert torch.equal(started(tensors=4), started(layers=2))
    assert torch.equal(started(tensors=0), started(layers=STAGES))
    assert not torch.equal(started(tensors=1), started(layers=1))


@pytest.mark.parametrize(
    ("name", "inputs", "tensors", "sizes"),
    [
        ("fedavg_cnn", Inputs((1, 28, 28), 10), [2, 4, 6, 8], [5_130, 529_930, 581_194, 582_026]),
        ("fasttext", Inputs((200,), 4, 98_635), [2, 4, 5], [132, 1_188, 3_157_508]),
        (
            "resnet18_imagenet", Inputs((3, 64, 64), 10), [2, 17, 32, 47, 59, 62],
            [5_130, 8_398_858, 10_498_570, 11_024_138, 11_172_106, 11_181_642],
        ),
    ],
)  # fmt: skip
def test_p_counts_blocks(name, inputs, tensors, sizes):
    """The p map and the numbers of W."""
    with torch.device("meta"):  # only shapes count
        layers = LayerMap.of(build(name, inputs))
    for p, (count, size) in enumerate(zip(tensors, sizes, strict=True), 1):
        assert layers.top(p) == layers.top_tensors(count) == slice(layers.P - size, layers.P)


def test_only_the_top_is_differentiated():
    method = FedALA(**QUICK)
    run = again(method)
    run.stack.start(run)
    assert not run.grad[: run.layers.top(1).start].any()


def test_statistics_are_as_if_it_had_not_been(tmp_path):
    """The running statistics in which training begins are the downloaded ones."""
    from case import Traced

    federation = simulate(tiny(client=[{"fedala": QUICK}], record={"traces": [3]}), tmp_path)
    round_ = Traced(tmp_path, 2, federation)
    statistics = [n for n in round_.before if n not in round_.parameters]
    learned = [c for c in round_.clients if "fedala.weights" in c.after]
    assert statistics
    assert learned
    for client in learned:
        assert all((client.init[n] == round_.before[n]).all() for n in statistics)


def test_all_clients_mix_every_round(ran):
    """`clients: all`: everybody keeps a model; who was not drawn keeps the mix that it would have started from."""
    cohort, every = ran(client=[{"fedala": QUICK}]), ran(**EVERYBODY)
    assert sorted(every.engine.client_states) == list(range(8))
    assert len(cohort.engine.client_states) < 8
    drawn = set(tables.read(every.folder, "clients")["client"].to_pylist())
    top = every.server.layers.top(1)
    assert drawn != set(range(8))
    for k in set(range(8)) - drawn:  # these have only ever mixed
        kept = every.engine.client_states[k]
        assert kept["fedala.settled:scalar"]
        assert kept["fedala.weights"].shape == (top.stop - top.start,)
        assert not (kept["previous"] == every.server.value.numpy()).all()
    assert not torch.equal(every.server.value, cohort.server.value)


def test_only_clients_that_train_are_sent_what_to_send(ran):
    """FedLDF's mask, one bit a layer, goes to the cohort; the model goes to all."""
    run = ran(**EVERYBODY, weighting=[{"fedldf": 2}])
    traffic, layers = table(run.folder, "traffic"), run.server.layers
    drawn = {*zip(*map(table(run.folder, "clients").get, ("round", "client")), strict=True)}
    masks = [-(-layers.L // 8) * (who in drawn) for who in zip(traffic["round"], traffic["client"], strict=True)]
    assert 0 < len(drawn) < len(masks)
    assert traffic["down_masks"].tolist() == masks
    assert (traffic["down_params"] == 4 * layers.P).all()


def test_all_clients_mix_to_the_same_bits_on_ray(ran, tmp_path, warm_ray):
    remote = simulate(tiny(**EVERYBODY, engine={"ray": {"clients_per_actor": 2}}), tmp_path, make_engine=warm_ray)
    assert remote.sha256() == ran(**EVERYBODY).sha256()


def test_its_state_survives_a_restart(ran, tmp_path):
    """`clients: all`, interrupted after two rounds: clients that were only initialised are saved, too."""
    config = tiny(**EVERYBODY, rounds={"checkpoint_every": 1})
    first = Federation(config, tmp_path)
    first.step()
    first.step()
    first.close()
    assert simulate(config, tmp_path, resume=True).sha256() == ran(**EVERYBODY).sha256()


def test_under_a_personal_head_the_range_counts_downwards_from_the_body():
    method = FedALA(**QUICK)
    run = again(method, more=[FedRep()])
    head = torch.linspace(-1, 1, 15, dtype=torch.float64)
    run.client_state.personal = head
    run.stack.start(run)
    body_top = run.layers.top(1, "body")
    assert run.state(method).weights.shape == (28,)  # the second hidden layer, 6 → 4
    assert torch.equal(run.params[: body_top.start], run.received[: body_top.start])
    assert not torch.equal(run.params[body_top], run.received[body_top])
    assert torch.equal(run.params[run.layers.span("head")], head)


def test_what_a_client_would_start_from_is_what_is_tested(tmp_path):
    """Evaluation mixes for everybody, draws what the round will draw, and leaves no trace."""
    federation = simulate(tiny(client=[{"fedala": QUICK}], **HERE), tmp_path / "tested")
    untested = simulate(tiny(client=[{"fedala": QUICK}], data=HERE["data"]), tmp_path / "untested")
    assert federation.sha256() == untested.sha256()
    scores = evaluate_personal(federation.run, 3)[0]
    assert scores == evaluate_personal(federation.run, 3)[0]
    zero = simulate(tiny(client=[{"fedala": {"eta": 0.0}}], **HERE), tmp_path / "zero")
    assert len(scores) == 8
    assert scores != evaluate_personal(zero.run, 3)[0]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"fraction": 0.0}, r"fedala\.fraction: .* > 0 and <= 1"),
        ({"epochs": 0}, r"fedala\.epochs: .* > 0"),
        ({"layers": 0}, r"fedala\.layers: .* > 0"),
        ({"tensors": -1}, r"fedala\.tensors: .* >= 0 or null"),
    ],
)
def test_refused(fields, why):
    with pytest.raises(ConfigError, match=why):
        tiny(client=[{"fedala": fields}])


def test_the_preset_of_the_released_code():
    config = from_dict(
        {
            "preset": "official_001",
            "data": {
                "name": {"synthetic": {"samples": 260, "shape": [1, 8, 8], "classes": 4}},
                "partition": {"dirichlet_capped": {"clients": 4, "alpha": 0.5}},
            },
            "model": {"name": "tiny_bn_cnn"}, "rounds": {"total": 2}, "local": {"lr": 0.1}, "client": ["fedala"],
            "engine": "local",
        }
    )  # fmt: skip
    assert config.client == (FedALA(tensors=2, window=True, clients="all", threshold=0.1, drop_last=False),)
    assert (config.model.bn_stats, config.evaluate.personal) == ("local", "after_init")
    assert (config.local.batch_size, config.local.drop_last, config.data.client_test_frac) == (10, True, 0.25)
