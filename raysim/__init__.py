"""raysim: federated learning simulated with Ray actors and PyTorch."""

__version__ = "0.1.0"
