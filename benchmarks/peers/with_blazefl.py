"""BlazeFL: its FedAvg with clients in threads, as many as the others have processes."""

import copy
from collections.abc import Iterator

import torch
from blazefl.contrib.fedavg import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer
from blazefl.core import ModelSelector, PartitionedDataset
from shared import Work, given
from torch import Tensor, nn
from turns import Turns


class Batches:
    """A client's samples in a new order, cut into batches: a data loader's work, without its cost."""

    def __init__(self, work: Work, client: int, generator: torch.Generator | None):
        rows = client * work.samples + torch.randperm(work.samples, generator=generator)
        self.dataset, self.batch = (work.x[rows], work.y[rows]), work.batch

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(tensor.split(self.batch) for tensor in self.dataset), strict=True)


class Clients(PartitionedDataset):
    def __init__(self, work: Work):
        self.work = work

    def get_dataset(self, type_: str, cid: int | None) -> None:
        raise NotImplementedError  # BlazeFL asks for batches alone

    def set_dataset(self, type_: str, cid: int | None, dataset: object) -> None:
        raise NotImplementedError

    def get_dataloader(
        self, type_: str, cid: int | None, batch_size: int | None, generator: torch.Generator | None = None
    ) -> Batches:  # fmt: skip
        return Batches(self.work, cid, generator)


class Models(ModelSelector):
    def __init__(self, model: nn.Module):
        self.model = model

    def select_model(self, model_name: str) -> nn.Module:
        return copy.deepcopy(self.model)


def main() -> None:
    work, turns = given(), Turns()
    models, clients = Models(work.model), Clients(work)
    server = FedAvgBaseServerHandler(
        models, "given", clients, turns.rounds, work.clients, work.cohort / work.clients, "cpu", work.batch, work.seed
    )
    trainer = FedAvgThreadPoolClientTrainer(
        models, "given", clients, "cpu", work.clients, 1, work.batch, work.lr, work.seed, work.processes
    )
    trainer.progress_fn = lambda futures: futures  # no bar is drawn
    for ran in range(turns.rounds):
        turns.after(ran, list)
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for package in trainer.uplink_package():
            server.load(package)
    turns.after(turns.rounds, lambda: (p.detach().numpy() for p in server.model.parameters()))


if __name__ == "__main__":
    main()
