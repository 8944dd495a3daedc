"""Which hosts merge the partial sums of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Host = TypeVar("Host")


def schedule(hosts: Sequence[Host], nodes: Sequence[str], fan_in: int, turn: int = 0) -> list[list[list[Host]]]:
    """Who merges whom: levels of groups of at most `fan_in` neighbours, first within each machine, then across.

    The first host of a group merges it and goes on to the next level; with each `turn` it is another one.
    """
    levels = []
    current = list(zip(hosts, nodes, strict=True))
    for within_machine in (True, False):
        while True:
            groups: list[list[tuple[Host, str]]] = []
            for host, node in current:
                joins = groups and len(groups[-1]) < fan_in and (not within_machine or groups[-1][0][1] == node)
                if joins:
                    groups[-1].append((host, node))
                else:
                    groups.append([(host, node)])
            if len(groups) == len(current):
                break
            groups = [group[turn % len(group) :] + group[: turn % len(group)] for group in groups]
            levels.append([[host for host, _ in group] for group in groups if len(group) > 1])
            current, turn = [group[0] for group in groups], turn // max(map(len, groups))
    return levels
