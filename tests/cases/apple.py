import numpy as np
from case import Case, State, Traced
from cases.fedamp import ALL, LOCAL
from reference import aggregate, gradient, inputs, parameters, tensors

ETA2, MU = 0.02, 0.5


def recompute(round_: Traced) -> State:
    """With L = 1, T = 3: in round 2 λ_t = (cos(2π/3) + 1)/2 = 1/4."""
    local, cores = round_.federation.config.local, []
    for client in round_.clients:
        bank = {i: tensors(model) for i, model in round_.bank.items()}
        core, pi, velocity = bank[client.id], client.before["apple.pi"], {}
        names = parameters(core)
        for rows in client.steps:
            w = {**core, **{n: sum(pi[i] * model[n] for i, model in bank.items()) for n in names}}
            G, statistics = gradient(w, *inputs(round_.federation, rows))
            slopes = [sum(float((G[n] * bank[i][n]).sum()) for n in names) for i in range(len(pi))]
            for n in names:
                step = pi[client.id] * G[n] + local.weight_decay * core[n]
                velocity[n] = local.momentum * velocity[n] + step if n in velocity else step
                core[n] = core[n] - round_.lr * velocity[n]
            core |= statistics
            pi = pi - ETA2 * (np.array(slopes) + 0.25 * MU * (pi - round_.p))
        np.testing.assert_allclose(client.after["apple.pi"], pi, rtol=0, atol=5e-6)
        cores.append(core)
    return aggregate(cores, round_.p)


# At most three float32 steps a client.
APPLE = Case(
    "apple", {"client": [{"apple": {"eta2": ETA2, "mu": MU, "L": 1.0}}], "rounds": ALL, "local": {"batch_size": 24}},
    {**LOCAL, "client": [{"apple": {"eta2": 0.0, "initial": "own"}}]},
    {**LOCAL, "client": [{"apple": {"eta2": 1e-3, "initial": "own"}}]}, LOCAL, recompute=recompute,
)  # fmt: skip
