"""What raysim's own errors have in common, and the one of settings."""

from __future__ import annotations

from collections.abc import Sequence


class Explained:
    """An exception whose message says what is wrong and the way out. A notebook shows that in place of a traceback."""

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows."""
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class ConfigError(Explained, Exception):
    """A configuration that cannot run. `faults` has one line each: `FILE: path.to.field: what is wrong.`"""

    def __init__(self, faults: str | Sequence[str]):
        self.faults = (faults,) if isinstance(faults, str) else tuple(faults)
        super().__init__(self.faults)  # the argument as given: it must survive pickling between Ray processes

    def __str__(self) -> str:
        return "\n".join(self.faults)
