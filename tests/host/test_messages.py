"""What an engine and its hosts tell each other."""

import numpy as np
import pytest

from raysim.core.local_run import RoundInfo
from raysim.host.messages import ClientResult, TrainReply, TrainRequest


def arrays(number: float) -> dict[str, np.ndarray]:
    return {"value": np.full(3, number)}


@pytest.mark.parametrize("asked", [(), ("state",), ("model", "trace"), ("state", "model", "trace")])
def test_a_reply_is_taken_apart_into_the_objects_that_were_asked_for(asked):
    """In the order of the request, with nothing for a client that failed; the rest is as small as numbers."""
    clients = (7, 2, 5)
    request = TrainRequest(
        RoundInfo(0, 0, 1, 8, 0.1), clients, return_states="state" in asked, return_models="model" in asked,
        trace="trace" in asked,
    )  # fmt: skip
    results = {
        c: ClientResult("ok", steps=c, **{part: arrays(10 * c + i) for i, part in enumerate(asked)}) for c in (2, 7)
    }
    results[5] = ClientResult("it failed")
    sums = {(0, 2): (np.ones(4), (True,))}
    small, sent, *rest = TrainReply(results, 1.0, 2.0, sums).detach(request)
    assert sent is sums
    assert 2 + len(rest) == request.objects
    expected = [results[c] for c in clients for _ in asked]
    assert all(
        array is getattr(result, part) for array, result, part in zip(rest, expected, asked * len(clients), strict=True)
    )
    assert {c: (result.status, result.steps) for c, result in small.results.items()} == {
        7: ("ok", 7), 2: ("ok", 2), 5: ("it failed", 0)
    }  # fmt: skip
    assert small.sums == {}
    assert all((r.state, r.model, r.trace) == (None, None, None) for r in small.results.values())
    assert results[7].state is not None or "state" not in asked  # the reply itself stays as it was
