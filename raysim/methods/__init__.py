"""The catalogue: every method by its name in a configuration. A new method is one file and one line here."""

from raysim.core.client import ClientMethod
from raysim.core.server import ServerStep, Weighting
from raysim.methods.fedala import FedALA
from raysim.methods.fedavg import FedAvg, StepSize
from raysim.methods.fedldf import FedLDF
from raysim.methods.fedlws import FedLWS
from raysim.methods.scaffold import SCAFFOLD

CLIENTS: dict[str, type[ClientMethod]] = {
    "fedala": FedALA,
    "scaffold": SCAFFOLD,
}

WEIGHTINGS: dict[str, type[Weighting]] = {
    "fedavg": FedAvg,
    "fedldf": FedLDF,
}

STEPS: dict[str, type[ServerStep]] = {
    "step_size": StepSize,
    "fedlws": FedLWS,
}
