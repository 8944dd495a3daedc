"""pfl-research: FederatedAveraging on its simulated backend, as many processes of it as PFL_WORKER_ADDRESSES names."""

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset, get_user_sampler
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from shared import Work, given
from torch import Tensor, nn
from turns import Turns


class Network(nn.Module):
    """The model with the two methods that pfl calls."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        return {}  # pfl evaluates every client of the first round, whether it is asked to or not: this costs nothing


class Turn(TrainingProcessCallback):
    def __init__(self, turns: Turns):
        self.turns = turns

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self._after(0, model)
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self._after(central_iteration + 1, model)
        return False, Metrics()

    def _after(self, ran: int, model: PyTorchModel) -> None:
        self.turns.after(ran, lambda: (p.detach().numpy() for p in model.pytorch_model.parameters()))


def clients(work: Work, turns: Turns) -> FederatedDataset:
    sampler = get_user_sampler("minimize_reuse", list(range(work.clients)))
    return FederatedDataset(lambda client: PyTorchTensorDataset(work.shuffled(client, turns.ran)), sampler)


def main() -> None:
    work, turns = given(), Turns()
    np.random.seed(work.seed)  # the processes are to sample the same clients
    network = Network(work.model)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=turns.rounds, evaluation_frequency=turns.rounds + 1, train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(clients(work, turns), clients(work, turns), [WeightByDatapoints()]),
        model=PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch
        ),
        callbacks=[Turn(turns)],
    )  # fmt: skip


if __name__ == "__main__":
    main()
