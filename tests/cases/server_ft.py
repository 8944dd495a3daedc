import torch
import torch.nn.functional as F
from case import Case, State, Traced, fedavg
from reference import forward, inputs, parameters, tensors

# A convolution's bias before BatchNorm has no effect: its gradient is rounding alone, which Adam makes a whole step of.
SETTING = {"data": {"proxy": {"samples": 24}}, "model": {"options": {"bias": False}}}


def trained(round_: Traced, loss, epochs: int = 2, lr: float = 1e-3) -> dict[str, torch.Tensor]:
    """Adam from the aggregate on `loss(logits, images, labels)`; statistics follow the batches."""
    state = tensors(fedavg(round_))
    leaves = {n: state[n].requires_grad_() for n in parameters(state)}
    adam = torch.optim.Adam(leaves.values(), lr=lr, betas=(0.5, 0.999))
    for rows in round_.proxy_batches:
        images, labels = inputs(round_.federation, rows)
        logits, statistics = forward(state, images, train=True)
        adam.zero_grad()
        loss(logits, images, labels).backward()
        adam.step()
        state |= statistics
    assert len(round_.proxy_batches) == 2 * epochs
    return {n: tensor.detach() for n, tensor in state.items()}


def recompute(round_: Traced) -> State:
    state = trained(round_, lambda logits, images, labels: F.cross_entropy(logits, labels))
    return {n: tensor.numpy() for n, tensor in state.items()}


def step(**settings: object) -> dict:
    return {"server": [{"server_ft": {"batch_size": 16, **settings}}], **SETTING}


SERVER_FT = Case(
    "server_ft", step(), step(epochs=0), step(epochs=1), SETTING, recompute=recompute,
)  # fmt: skip
