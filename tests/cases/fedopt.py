from collections.abc import Callable

import numpy as np
from case import Case, State, Traced, fedavg, minus


def recompute(
    eta: float, beta1: float, second: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Callable[[Traced], State]:
    """With epsilon 1e-3: both moments since the first round; no bias correction."""

    def rule(round_: Traced) -> State:
        m, s = dict.fromkeys(round_.parameters, 0.0), dict.fromkeys(round_.parameters, 1e-6)
        for earlier in (round_.at(0), round_.at(1), round_):
            d = minus(fedavg(earlier), earlier.before)
            m = {n: beta1 * m[n] + (1 - beta1) * d[n] for n in m}
            s = {n: second(s[n], d[n] ** 2) for n in s}
        return fedavg(round_) | {n: round_.before[n] + eta * m[n] / (np.sqrt(s[n]) + 1e-3) for n in m}

    return rule


def collapsing(name: str, epsilon: float, **betas: float) -> dict:
    """As epsilon grows beyond the updates, a step of size epsilon tends to theirs."""
    return {"server": [{name: {"eta": epsilon, "epsilon": epsilon, "initial": 0, "beta1": 0, **betas}}]}


FEDADAGRAD = Case(
    "fedadagrad", {"server": ["fedadagrad"]}, collapsing("fedadagrad", 1e8), collapsing("fedadagrad", 1.0),
    recompute=recompute(0.1, 0.0, lambda s, squared: s + squared),
)  # fmt: skip
FEDADAM = Case(
    "fedadam", {"server": ["fedadam"]}, collapsing("fedadam", 1e8, beta2=0), collapsing("fedadam", 1.0, beta2=0),
    recompute=recompute(0.01, 0.9, lambda s, squared: 0.99 * s + 0.01 * squared),
)  # fmt: skip
FEDYOGI = Case(
    "fedyogi", {"server": ["fedyogi"]}, collapsing("fedyogi", 1e8, beta2=0), collapsing("fedyogi", 1.0, beta2=0),
    recompute=recompute(0.01, 0.9, lambda s, squared: s - 0.01 * squared * np.sign(s - squared)),
)  # fmt: skip
