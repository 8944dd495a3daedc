"""The one error that wrong data raises."""

from raysim.errors import Explained


class DataError(Explained, ValueError):
    """Data or a partition that cannot be used. The message names the file and the row (rows and lines count from 0)
    where there is one, and says what to change."""
