from case import Case, State, Traced, fedavg, minus


def recompute(round_: Traced) -> State:
    """Momentum 0.9 since the first round."""
    velocity = dict.fromkeys(round_.parameters, 0.0)
    for earlier in (round_.at(0), round_.at(1), round_):
        update = minus(fedavg(earlier), earlier.before)
        velocity = {n: 0.9 * v + update[n] for n, v in velocity.items()}
    return fedavg(round_) | {n: round_.before[n] + v for n, v in velocity.items()}


FEDAVGM = Case(
    "fedavgm", {"server": ["fedavgm"]}, {"server": [{"fedavgm": 0}]}, {"server": [{"fedavgm": 0.1}]},
    recompute=recompute,
)  # fmt: skip
