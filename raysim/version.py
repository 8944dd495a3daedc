"""The version of raysim, read by the build."""

__version__ = "0.1.0"
