"""Three machines with a network between them, of which one is slow: namespaces on this machine, each with a Ray node."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from conftest import play, tiny

from raysim.config import from_dict, to_dict
from raysim.store import tables

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from machines import Machines, missing

RESNET = {
    "name": "resnet",
    "seed": 3,
    "data": {
        "name": {"synthetic": {"samples": 24, "test_samples": 8, "shape": [3, 32, 32], "classes": 4}},
        "partition": {"iid_equal": {"clients": 6}},
    },
    "model": {"name": "resnet18"},
    "rounds": {"total": 1},  # later shares follow the speed of the machines, which here is chance
    "local": {"batch_size": 4, "lr": 0.01},
    "server": ["fedlws"],
    "engine": {"ray": {"clients_per_actor": 2}},
}
MODEL = 11_173_962 * 4  # bytes of a ResNet-18 for ten classes, to a thousandth

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module")
def machines():
    with Machines(3, jobs=True, rates={2: "1gbit"}) as machines:
        yield machines


def test_a_job_from_another_machine_has_the_same_bits_and_sends_few_bytes(machines, tmp_path):
    """The head plays it. Its two neighbours are sent two models a round, the global one and the mean from which FedLWS
    measures; they send back two sums, and hand on what they have merged of the others'."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job/resnet.yaml").write_text(yaml.safe_dump(RESNET))
    job = ["ray", "job", "submit", "--address", machines.jobs_at, "--working-dir", tmp_path / "job"]
    before = machines.sent()
    said = machines.run(1, *job, "--", "raysim", "run", "resnet.yaml", "--out", tmp_path / "run")
    assert "succeeded" in said
    sent = [(after - first) / MODEL for first, after in zip(before, machines.sent(), strict=True)]
    here = play(from_dict(RESNET | {"engine": "local"}), tmp_path / "local")
    assert json.loads((tmp_path / "run/result.json").read_text())["sha256"] == here.sha256()
    rounds, sums, others = 1, 2, 2
    needed = others * rounds * 2  # the model and the mean of each round
    # The last model is tested wherever there is work, and a part of the clients may be merged elsewhere.
    assert needed <= sent[0] <= needed + others + rounds * sums + 0.3
    # Each of the others sends a sum, and what is merged is handed on once; the clients' models would be eight.
    assert rounds * sums * others <= sent[1] + sent[2] <= rounds * sums * (others + 1) + 0.3


def test_a_link_that_goes_down_in_a_round_changes_no_bit(machines, tmp_path):
    config = tiny(
        data={"name": {"synthetic": {"samples": 1600, "shape": [1, 8, 8], "classes": 4}}}, client=["scaffold"],
        local={"momentum": 0.0, "weight_decay": 0.0, "epochs": 4}, rounds={"total": 4, "checkpoint_every": 2},
        engine={"ray": {"clients_per_actor": 1}},
    )  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(to_dict(config)))
    command = ["raysim", "run", tmp_path / "tiny.yaml", "--address", machines.address, "--out", tmp_path / "run"]
    with machines.popen(0, *command) as process:
        assert any(line.startswith("round 2/4") for line in process.stdout)
        machines.link(2, up=False)
        said = process.stdout.read()
        assert process.wait() == 0, said
    machines.link(2, up=True)
    here = play(tiny(**{**to_dict(config), "engine": "local"}), tmp_path / "local")
    assert json.loads((tmp_path / "run/result.json").read_text())["sha256"] == here.sha256()
    [event] = tables.read(tmp_path / "run", "events").to_pylist()
    assert "its node is gone" in event["message"]
    rows = tables.read(tmp_path / "run", "clients").to_pylist()
    assert [len({row["node"] for row in rows if row["round"] == t}) for t in (0, 3)] == [3, 2]
