from case import Case, State, Traced
from reference import aggregate, tensors, train


def recompute(round_: Traced) -> State:
    """With one epoch of fine-tuning: an epoch more, by the same optimiser, in an order of its own."""
    server = tensors(round_.before)
    for client in round_.clients:
        tuned, trained = client.steps[: len(client.steps) // 2], client.steps[len(client.steps) // 2 :]
        assert sum(map(len, tuned)) == sum(map(len, trained)) == client.samples
    return aggregate([train(round_.federation, server, c.steps, round_.lr) for c in round_.clients], round_.p)


# At most two float32 steps of fine-tuning and two of training.
FINETUNE = Case(
    "finetune", {"client": [{"finetune": {"ft_epochs": 1}}], "local": {"batch_size": 24}},
    {"client": [{"finetune": {"ft_epochs": 0}}]}, {"client": [{"finetune": {"ft_epochs": 1}}]},
    recompute=recompute, tolerance=5e-6,
)  # fmt: skip
