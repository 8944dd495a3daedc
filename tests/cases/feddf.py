import torch
from case import Case, State, Traced
from cases.server_ft import SETTING, trained
from reference import forward, tensors


def distilled(round_: Traced, teachers: list[dict[str, torch.Tensor]], temperature: float, student: float) -> State:
    """KL(softmax(mean of teachers' logits / temperature) ‖ softmax(student's logits / student)), mean of samples."""

    def loss(logits, images, labels):
        mean = torch.stack([forward(teacher, images, train=False)[0] for teacher in teachers]).mean(0)
        q = (mean / temperature).softmax(1)
        return (q * (q.log() - (logits / student).log_softmax(1))).sum(1).mean()

    return {n: tensor.numpy() for n, tensor in trained(round_, loss).items()}


def recompute(round_: Traced) -> State:
    """The clients, in eval mode, teach with the same weight."""
    return distilled(round_, [tensors(c.model) for c in round_.clients], 2.0, 2.0)


def step(**settings: object) -> dict:
    return {"server": [{"feddf": {"epochs": 2, "batch_size": 16, "temperature": 2.0, **settings}}], **SETTING}


FEDDF = Case("feddf", step(), step(epochs=0), step(epochs=1), SETTING, recompute=recompute)
