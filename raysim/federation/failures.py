"""When a round in which clients failed cannot be played without them."""

from __future__ import annotations

from collections.abc import Sequence

from raysim.config import RoundsConfig
from raysim.core.event import Event
from raysim.core.failures import Cause
from raysim.engine.scheduler import TrainedCohort


class RoundFailed(RuntimeError):
    """A round that cannot be played: clients could not be trained, or the new model is not finite."""


def failed_clients(trained: TrainedCohort, nodes: Sequence[str]) -> list[Event]:
    """The clients that were left out, and why; `nodes` are the machines of the hosts."""
    number, left_out = trained.round_info.t + 1, []
    for client, result in sorted(trained.results.items()):
        if result.status != "ok":
            node = nodes[trained.trained_by[client]]
            message = f"client {client}, round {number}, node {node}: {result.status}"
            left_out.append(Event("client", message, client, node))
    return left_out


def check_trained(trained: TrainedCohort, nodes: Sequence[str], rounds: RoundsConfig) -> None:
    """Raises `RoundFailed` where a client failed for the code's or the machine's reasons, or too many for their own."""
    failed = failed_clients(trained, nodes)
    messages: dict[Cause | None, str] = {}  # of the first client for each cause
    for event in reversed(failed):
        assert event.client is not None
        messages[trained.results[event.client].cause] = event.message

    if message := messages.get("code"):
        raise RoundFailed(f"an error in a client's training ends the run.\n{message}")
    if message := messages.get("machine"):
        hint = "Once the machine has what it lacks, resume the run; a smaller batch, model or cohort needs less memory"
        raise RoundFailed(f"the machine could not train a client.\n{message}\n{hint}.")
    if failed and rounds.on_client_failure == "stop":
        raise RoundFailed(f"a client failed, and rounds.on_client_failure is stop.\n{messages['client']}")
    came = len(trained.clients)
    if trained.asked and came < rounds.min_clients:
        least = f"rounds.min_clients is {rounds.min_clients}"
        raise RoundFailed(
            f"{came} of the {len(trained.asked)} clients of round {trained.round_info.t + 1} came back, and {least}.\n"
            f"{messages.get('client', '')}"
        )
