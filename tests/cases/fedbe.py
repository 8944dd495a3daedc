from hashlib import blake2b

import numpy as np
import torch
from case import Case, State, Traced, fedavg, minus
from cases.feddf import distilled
from cases.server_ft import SETTING
from reference import parameters, tensors

# A model's parameters in the order of its modules, in which the noise was drawn.
ORDER = [
    "conv1.conv.weight", "conv1.norm.weight", "conv1.norm.bias",
    "conv2.conv.weight", "conv2.norm.weight", "conv2.norm.bias", "head.weight", "head.bias",
]  # fmt: skip


def recompute(round_: Traced) -> State:
    """Clients, their average and two models sampled around them teach, sharpened by temperature 0.5."""
    before, average = round_.before, fedavg(round_)
    updates = [minus(c.model, before) for c in round_.clients]
    assert sorted(ORDER) == sorted(parameters(before))
    # The server's stream is named by (seed, round, -1, purpose).
    name = f"{round_.federation.config.seed}/{round_.t}/-1/fedbe".encode()
    seed = int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 1
    stream = torch.Generator().manual_seed(seed)
    sampled = []
    for _ in range(2):
        noise = torch.randn(sum(before[n].size for n in ORDER), generator=stream).double().numpy()
        model, start = dict(average), 0
        for n in ORDER:
            lengths = [np.linalg.norm(u[n]) for u in updates]
            units = np.stack([u[n] / length for u, length in zip(updates, lengths, strict=True)])
            deviation = np.sqrt(np.maximum((units**2).mean(0) - units.mean(0) ** 2, 1e-5))
            eps = noise[start : start + before[n].size].reshape(before[n].shape)
            model[n] = before[n] + np.mean(lengths) * (units.mean(0) + 0.1 * deviation * eps)
            start += before[n].size
        sampled.append(model)
    teachers = [tensors(m) for m in (*(c.model for c in round_.clients), average, *sampled)]
    return distilled(round_, teachers, temperature=0.5, student=1.0)


# Not channels-last, where a convolution's weights are stored, and their noise drawn, in another order.
PLAIN = {**SETTING, "model": {**SETTING["model"], "memory_format": "contiguous"}}


def step(**settings: object) -> dict:
    fields = {"epochs": 2, "batch_size": 16, "samples": 2, "temperature": 0.5, **settings}
    return {"server": [{"fedbe": fields}], **PLAIN}


FEDBE = Case("fedbe", step(), step(epochs=0), step(epochs=1), PLAIN, recompute=recompute)
