"""When a round in which clients failed cannot go on without them."""

from __future__ import annotations

from collections.abc import Sequence

from raysim.config import RoundsConfig
from raysim.core.event import Event
from raysim.core.failures import Cause
from raysim.engine.dispatcher import ClientResults, TrainedCohort
from raysim.errors import Explained


class RoundFailed(Explained, RuntimeError):
    """A round that cannot be completed: clients could not be trained, or the new model is not finite."""


def check_results(found: ClientResults, nodes: Sequence[str], doing: str, rounds: RoundsConfig) -> list[Event]:
    """The clients that were left out, and why; `nodes` are the machines of the hosts, `doing` says when it was.

    Raises `RoundFailed` where one failed for the code's or the machine's reasons, or for its own and none may.
    """
    failed: list[Event] = []
    messages: dict[Cause | None, str] = {}  # of the first client for each cause
    for client, result in sorted(found.results.items()):
        if result.status != "ok":
            node = nodes[found.hosts[client]]
            failed.append(Event("client", f"client {client}, {doing}, node {node}: {result.status}", client, node))
            messages.setdefault(result.cause, failed[-1].message)

    if message := messages.get("code"):
        raise RoundFailed(f"an error in a client's code ends the run.\n{message}")
    if message := messages.get("machine"):
        hint = "Free the resource; a smaller batch, model or cohort needs less memory"
        raise RoundFailed(f"out of resources while training a client.\n{message}\n{hint}.")
    if failed and rounds.on_client_failure == "stop":
        raise RoundFailed(f"a client failed, and rounds.on_client_failure is stop.\n{messages['client']}")
    return failed


def check_trained(
    trained: TrainedCohort, nodes: Sequence[str], rounds: RoundsConfig, least: int
) -> list[Event]:  # fmt: skip
    """`check_results` of a round's training; `least` of them must come back."""
    failed = check_results(trained, nodes, f"round {trained.round_info.t + 1}", rounds)
    came = len(trained.clients)
    if trained.asked and came < least:
        raise RoundFailed(
            f"{came} of the {len(trained.asked)} clients of round {trained.round_info.t + 1} came back, and rounds.min_clients is "
            f"{least}.\n"
            f"{failed[0].message if failed else ''}"
        )
    return failed
