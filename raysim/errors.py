"""What raysim's own errors have in common."""


class Explained:
    """An exception whose message says what is wrong and the way out. A notebook shows that in place of a traceback."""

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows."""
        return [f"{type(self).__name__}: {self}"]
