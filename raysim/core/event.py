"""What went wrong in a round, and what was done about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Event:
    """A row of the table `events`, and a line in the terminal."""

    of: Literal["client", "actor", "driver", "run"]  # what failed
    message: str
    client: int | None = None
    node: str | None = None
