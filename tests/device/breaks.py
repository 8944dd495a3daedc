"""A client method whose import gives the process the emulated device: so actors get theirs, as they unpickle it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from device import emulated

from raysim.core.client import ClientMethod, LocalRun

emulated.install()


@dataclass(frozen=True)
class Breaks(ClientMethod):
    """In round `t` the device breaks under the first client that takes its second step; `folder` remembers that it did."""

    folder: str
    t: int = 1 << 30

    def observe_grad(self, run: LocalRun) -> None:
        if run.t != self.t or run.steps != 1:
            return
        try:
            os.mkdir(f"{self.folder}/broken")
        except FileExistsError:
            return
        emulated.break_after(0)
