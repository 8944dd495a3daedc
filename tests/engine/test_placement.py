"""How many actors, with what share; and what is said of what does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysim.engine.ray.placement import HOST_BYTES, Placement, PlacementError, Resources, place

GIB = 2**30


def placed(
    cohort: int = 10, clients_per_actor="auto", gpu_per_client="auto", threads: int = 1, cpus: float = 8,
    gpus: float = 0, memory: float = 64 * GIB, model_bytes: int = 4_000_000,
) -> Placement:  # fmt: skip
    return place(Resources(cpus, gpus, memory), cohort, clients_per_actor, gpu_per_client, threads, model_bytes)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # auto: as many actors as CPUs carry, never more than clients
        ({}, Placement(8, 1, 0)),
        ({"cohort": 3}, Placement(3, 1, 0)),
        ({"threads": 3}, Placement(2, 3, 0)),
        ({"threads": 16}, Placement(1, 8, 0)),
        ({"cpus": 0.5}, Placement(1, 0.5, 0)),
        # by clients_per_actor: the last actor may have fewer; they share the CPUs there are
        ({"clients_per_actor": 1}, Placement(10, 0.8, 0)),
        ({"clients_per_actor": 4}, Placement(3, 1, 0)),
        ({"clients_per_actor": 10}, Placement(1, 1, 0)),
        ({"clients_per_actor": 99}, Placement(1, 1, 0)),
        # GPUs: by default divided among the actors, an actor on one GPU at most; 0 leaves them alone
        ({"gpus": 2}, Placement(8, 1, 0.25)),
        ({"gpus": 2, "cohort": 1}, Placement(1, 1, 1)),
        ({"gpus": 1, "clients_per_actor": 1}, Placement(10, 0.8, 0.1)),
        ({"gpus": 2, "gpu_per_client": 0}, Placement(8, 1, 0)),
        # a share limits the number of actors, if that is free
        ({"gpus": 2, "gpu_per_client": 0.5}, Placement(4, 1, 0.5)),
        ({"gpus": 1, "gpu_per_client": 1}, Placement(1, 1, 1)),
        ({"gpus": 2, "gpu_per_client": 0.25, "clients_per_actor": 2}, Placement(5, 1, 0.25)),
        # shares of thirds: three to a GPU, not 3.33
        ({"gpus": 2, "gpu_per_client": 0.3}, Placement(6, 1, 0.3)),
        ({"gpus": 3, "gpu_per_client": 0.6}, Placement(3, 1, 0.6)),
        ({"gpus": 2, "cohort": 3}, Placement(3, 1, 0.5)),  # not 2/3, of which a GPU holds one
        # memory: as many processes as fit beside the updates of the cohort
        ({"memory": 4 * HOST_BYTES}, Placement(3, 1, 0)),
    ],
)
def test_placement(asked, expected):
    assert placed(**asked) == expected


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"model_bytes": 10 * GIB}, "10 clients a round need 100.0 GiB .*64.0 GiB of memory; lower rounds.part"),
        ({"memory": GIB / 2}, "of memory"),
        ({"clients_per_actor": 1, "memory": 4 * GIB}, "clients_per_actor: 1 makes 10 actors .*4.0 GiB .*say auto"),
        ({"gpu_per_client": 2, "gpus": 8}, "gpu_per_client is 2, but a client trains on one GPU"),
        ({"gpu_per_client": 0.5}, "asks for .* GPUs, but the cluster has 0"),
        ({"gpu_per_client": 0.5, "gpus": 2, "clients_per_actor": 1}, "0.5 for 10 actors asks for 5 GPUs.*has 2; lower"),
        ({"gpu_per_client": 0.6, "gpus": 2, "clients_per_actor": 4}, "0.6 for 3 actors"),  # one to a GPU, not 3.33
    ],
)
def test_what_does_not_fit(asked, sentence):
    with pytest.raises(PlacementError, match=sentence):
        placed(**asked)


@given(
    cohort=st.integers(1, 500), clients_per_actor=st.one_of(st.just("auto"), st.integers(1, 600)),
    gpu_per_client=st.one_of(st.just("auto"), st.sampled_from([0, 0.1, 0.25, 0.3, 0.5, 0.7, 1])),
    threads=st.integers(1, 8), cpus=st.floats(0.5, 128), gpus=st.integers(0, 8), memory=st.floats(GIB, 512 * GIB),
    model_bytes=st.integers(4, 400_000_000),
)  # fmt: skip
def test_what_is_placed_fits(cohort, clients_per_actor, gpu_per_client, threads, cpus, gpus, memory, model_bytes):
    """Either it says why not, or Ray can place all actors, which together have room for every client."""
    try:
        found = place(Resources(cpus, gpus, memory), cohort, clients_per_actor, gpu_per_client, threads, model_bytes)
    except PlacementError:
        return
    assert 1 <= found.hosts <= cohort
    if clients_per_actor != "auto":
        assert (found.hosts - 1) * clients_per_actor < cohort <= found.hosts * clients_per_actor
    assert found.hosts * found.cpus <= cpus * (1 + 1e-9)
    assert 0 < found.cpus <= threads
    assert 0 <= found.gpus <= 1
    if found.gpus:
        assert found.hosts <= gpus * int(1 / found.gpus + 1e-9)
    assert found.hosts * HOST_BYTES + cohort * model_bytes <= memory
