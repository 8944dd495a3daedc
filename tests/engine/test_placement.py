"""How many actors, on which nodes, with what share; and what is said of what does not fit."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysim.engine.ray.placement import GPU_HOSTS, HOST_BYTES, Node, Placement, PlacementError, Resources, place

GIB = 2**30


def placed(
    cohort: int = 10, clients_per_actor="auto", gpu_per_client="auto", threads: int = 1, cpus: float = 8,
    gpus: float = 0, memory: float = 64 * GIB, model_bytes: int = 4_000_000, training_bytes: int = 0,
    nodes: tuple[Node, ...] = (),
) -> Placement:  # fmt: skip
    resources = Resources(nodes or (Node("a", cpus, gpus, memory),))
    return place(
        resources, cohort, clients_per_actor, gpu_per_client, threads, model_bytes, training_bytes=training_bytes
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # auto: as many actors as CPUs carry, never more than clients
        ({}, (8, 1, 0)),
        ({"cohort": 3}, (3, 1, 0)),
        ({"threads": 3}, (2, 3, 0)),
        ({"threads": 16}, (1, 8, 0)),
        ({"cpus": 0.5}, (1, 0.5, 0)),
        # by clients_per_actor: the last actor may have fewer; they share the CPUs there are
        ({"clients_per_actor": 1}, (10, 0.8, 0)),
        ({"clients_per_actor": 4}, (3, 1, 0)),
        ({"clients_per_actor": 10}, (1, 1, 0)),
        ({"clients_per_actor": 99}, (1, 1, 0)),
        # GPUs: by default divided among the actors, an actor on one GPU at most; 0 leaves them alone
        ({"gpus": 2}, (8, 1, 0.25)),
        ({"gpus": 2, "cohort": 1}, (1, 1, 1)),
        ({"gpus": 1, "clients_per_actor": 1}, (10, 0.8, 0.1)),
        ({"gpus": 2, "gpu_per_client": 0}, (8, 1, 0)),
        # a share limits the number of actors, whatever was asked
        ({"gpus": 2, "gpu_per_client": 0.5}, (4, 1, 0.5)),
        ({"gpus": 1, "gpu_per_client": 1}, (1, 1, 1)),
        ({"gpus": 2, "gpu_per_client": 0.25, "clients_per_actor": 2}, (5, 1, 0.25)),
        ({"gpus": 2, "gpu_per_client": 0.5, "clients_per_actor": 1}, (4, 1, 0.5)),
        # shares of thirds: three to a GPU, not 3.33
        ({"gpus": 2, "gpu_per_client": 0.3}, (6, 1, 0.3)),
        ({"gpus": 3, "gpu_per_client": 0.6}, (3, 1, 0.6)),
        ({"gpus": 2, "cohort": 3}, (3, 1, 0.5)),  # not 2/3, of which a GPU holds one
        # what is left of GPUs: 1.5 is one and a half
        ({"gpus": 0.5, "gpu_per_client": 0.25}, (2, 1, 0.25)),
        ({"gpus": 1.5, "gpu_per_client": 0.5}, (3, 1, 0.5)),
        ({"gpus": 1.5, "gpu_per_client": 0.6}, (1, 1, 0.6)),
        ({"gpus": 0.5, "cohort": 2}, (2, 1, 0.25)),
        # more actors a GPU than pay are not started unless asked for
        ({"gpus": 1, "cpus": 64, "cohort": 64}, (GPU_HOSTS, 1, 1 / GPU_HOSTS)),
        # memory: as many processes as fit beside the updates of the cohort
        ({"memory": 4 * HOST_BYTES}, (3, 1, 0)),
        ({"clients_per_actor": 1, "memory": 4 * HOST_BYTES}, (3, 1, 0)),
        # ... and what training takes, except on GPUs, which have memory of their own; one actor is tried
        ({"memory": 5 * HOST_BYTES, "training_bytes": HOST_BYTES}, (2, 1, 0)),
        ({"memory": 5 * HOST_BYTES, "training_bytes": 9 * HOST_BYTES}, (1, 1, 0)),
        ({"memory": 5 * HOST_BYTES, "training_bytes": HOST_BYTES, "gpus": 1}, (3, 1, 1 / 3)),
    ],
)
def test_one_node(asked, expected):
    found = placed(**asked)
    assert (found.hosts, found.cpus, found.gpus) == pytest.approx(expected)
    wanted = -(-10 // asked["clients_per_actor"]) if "clients_per_actor" in asked else found.hosts
    assert bool(found.note) == (found.hosts < wanted)


HEAD, WORKER = Node("head", 8, 0, 64 * GIB), Node("worker", 8, 1, 64 * GIB)


@pytest.mark.parametrize(
    ("nodes", "asked", "expected"),
    [
        # on a mixed cluster all clients train on the same kind of device
        ((HEAD, WORKER), {"cohort": 16}, ({"worker": 8}, 1, 1 / 8)),
        ((HEAD, WORKER), {"cohort": 16, "gpu_per_client": 0}, ({"head": 8, "worker": 8}, 1, 0)),
        ((HEAD, WORKER), {"cohort": 4, "gpu_per_client": 0}, ({"head": 2, "worker": 2}, 1, 0)),
        # no actor spans nodes
        ((Node("a", 3), Node("b", 3)), {"threads": 2}, ({"a": 1, "b": 1}, 2, 0)),
        ((Node("a", 1), Node("b", 3)), {"threads": 2}, ({"b": 1}, 2, 0)),
        ((Node("a", 4), Node("b", 1)), {"cohort": 5}, ({"a": 4, "b": 1}, 1, 0)),
        ((Node("a", 2), Node("b", 1)), {"cohort": 6, "clients_per_actor": 1}, ({"a": 4, "b": 2}, 0.5, 0)),
        ((Node("a", 8, 0.5), Node("b", 8, 0.5)), {"gpu_per_client": 0.5}, ({"a": 1, "b": 1}, 1, 0.5)),
        ((Node("a", 9, 4), Node("b", 9, 1)), {"cohort": 5}, ({"a": 4, "b": 1}, 1, 1)),
    ],
)
def test_several_nodes(nodes, asked, expected):
    found = placed(nodes=nodes, **asked)
    assert (dict(Counter(found.nodes)), found.cpus, found.gpus) == expected


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"model_bytes": 10 * GIB}, "10 clients a round need 100.0 GiB .*64.0 GiB of memory; lower rounds.part"),
        ({"memory": GIB / 2}, "of memory"),
        ({"gpu_per_client": 2, "gpus": 8}, "gpu_per_client is 2, but a client trains on one GPU"),
        ({"gpu_per_client": 0.5}, r"finds 1 CPUs and 0.5 of a GPU.*has node a \(8 CPUs free\)"),
        ({"gpu_per_client": 0.5, "gpus": 0.3}, r"0.5 of a GPU.*has node a \(8 CPUs and 0.3 GPUs free\)"),
        ({"nodes": (Node("a", 0), Node("b", 0))}, r"finds 1 CPUs.*node a \(0 CPUs free\), node b \(0 CPUs free\)"),
    ],
)
def test_what_does_not_fit(asked, sentence):
    with pytest.raises(PlacementError, match=sentence):
        placed(**asked)


NODES = st.builds(
    Node, st.uuids().map(str), st.floats(0, 64), st.sampled_from([0, 0.3, 0.5, 1, 1.5, 2, 8]), st.floats(0, 512 * GIB)
)  # fmt: skip


@given(
    cohort=st.integers(1, 300), clients_per_actor=st.one_of(st.just("auto"), st.integers(1, 400)),
    gpu_per_client=st.one_of(st.just("auto"), st.sampled_from([0, 0.1, 0.25, 0.3, 0.5, 0.7, 1])),
    threads=st.integers(1, 8), nodes=st.lists(NODES, min_size=1, max_size=4), model_bytes=st.integers(4, 400_000_000),
    training=st.sampled_from([0, GIB, 40 * GIB]),
)  # fmt: skip
def test_what_is_placed_fits(cohort, clients_per_actor, gpu_per_client, threads, nodes, model_bytes, training):
    """Either it says why not, or every node has what its actors reserve."""
    try:
        found = place(
            Resources(tuple(nodes)), cohort, clients_per_actor, gpu_per_client, threads, model_bytes, training_bytes=training
        )  # fmt: skip
    except PlacementError:
        return
    wanted = cohort if clients_per_actor == "auto" else -(-cohort // clients_per_actor)
    assert 1 <= found.hosts <= wanted
    assert bool(found.note) == (clients_per_actor != "auto" and found.hosts < wanted)
    assert 0 < found.cpus <= threads
    assert 0 <= found.gpus <= 1
    assert bool(found.gpus) == (any(node.gpus for node in nodes) if gpu_per_client == "auto" else gpu_per_client > 0)
    for node in nodes:
        hosts = found.nodes.count(node.id)
        assert hosts * found.cpus <= node.cpus * (1 + 1e-9)
        assert hosts * HOST_BYTES <= node.memory
        assert found.gpus or hosts <= 1 or hosts * (HOST_BYTES + training) <= node.memory
        if found.gpus:
            whole, rest = divmod(node.gpus, 1)
            assert hosts <= whole * int(1 / found.gpus + 1e-9) + int(rest / found.gpus + 1e-9)
    assert found.hosts * HOST_BYTES + cohort * model_bytes <= sum(node.memory for node in nodes)
