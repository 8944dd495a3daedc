from case import Case, State, Traced, fedavg, minus, norm


def recompute(round_: Traced) -> State:
    """With strength 0.1: the decay is followed from the first round on."""
    decay, names = 0.0, round_.parameters
    for earlier in (round_.at(0), round_.at(1), round_):
        moved = norm(minus(fedavg(earlier), earlier.before), names)
        decay = 0.1 * decay + 0.9 * 0.1 * moved / norm(earlier.before, names)
    after = fedavg(round_)
    return after | {n: after[n] - decay * round_.before[n] for n in names}


AWD = Case(
    "awd", {"server": [{"awd": 0.1}]}, {"server": [{"awd": 0}]}, {"server": [{"awd": 0.01}]}, recompute=recompute
)
