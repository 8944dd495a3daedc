"""Tables and figures of what runs have written. Imports neither the engine nor PyTorch."""

from importlib import import_module

from raysim.errors import Explained


class ReportError(Explained, Exception):
    """A figure or report cannot be shown: there is no such run or figure, or the run has not recorded what it needs."""


class NoData(ReportError):
    """The runs have not recorded what a figure shows."""


class NoTable(ReportError, KeyError):
    """A run has no table of that name."""

    __str__ = Exception.__str__  # a KeyError would quote it


class MissingExtra(Explained, ImportError):
    """A package of an extra, such as `raysim[report]`, is not installed."""


def need(*modules: str, extra: str = "report") -> None:
    """Raise `MissingExtra` where one of the modules, such as matplotlib.figure, is missing; `extra` would install it."""
    for module in modules:
        try:
            import_module(module)
        except ImportError:
            package = module.partition(".")[0]
            what = "figures and reports need" if extra == "report" else f"{extra} needs"
            raise MissingExtra(f"{what} {package}: pip install 'raysim[{extra}]'") from None
