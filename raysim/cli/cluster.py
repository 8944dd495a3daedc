"""`raysim up` and `raysim down`: a cluster that stays from one run to the next."""

from __future__ import annotations

from typing import Annotated

import typer

from raysim.api.errors import reported
from raysim.printable import printable


def up(
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="With Ray's dashboard; its address is printed.")
    ] = False,
) -> None:
    """Start a Ray cluster on this machine and leave it running. Later runs reuse it and start in seconds. Only you can use it."""
    with reported():
        from raysim.engine.ray import keeper

        cluster, said = keeper.up(dashboard)
        print(
            printable(f"{said}A cluster is up at {cluster.address}. Runs join it; `raysim down` ends it.", lines=True)
        )


def down() -> None:
    """End the cluster that `raysim up` started, and all runs on it; `raysim resume` continues them."""
    with reported():
        from raysim.engine.ray import keeper

        cluster = keeper.down()
        print(printable(f"ended the cluster at {cluster.address}") if cluster else "There is no cluster.")
