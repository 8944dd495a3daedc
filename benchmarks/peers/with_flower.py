"""Flower: a ClientApp and its FedAvg strategy in the simulation runtime, messages in memory."""

import random

import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from shared import given
from torch.optim import SGD
from turns import Turns

client, server = ClientApp(), ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    work = given()
    model = work.model
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = SGD(model.parameters(), lr=work.lr)
    client, t = context.node_config["partition-id"], message.content["config"]["server-round"]
    samples = work.shuffled(int(client), int(t))
    for x, y in zip(*(tensor.split(work.batch) for tensor in samples), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    arrays, metrics = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": work.samples})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def serve(grid: Grid, context: Context) -> None:
    work, turns = given(), Turns()
    random.seed(work.seed)  # from which Flower samples the clients

    def evaluate(ran: int, arrays: ArrayRecord) -> None:  # Flower calls it before the first round, too
        turns.after(ran, arrays.to_numpy_ndarrays)

    strategy = FedAvg(work.cohort / work.clients, 0.0, min_available_nodes=work.clients)
    strategy.start(grid, ArrayRecord(work.model.state_dict()), turns.rounds, evaluate_fn=evaluate)


def main() -> None:
    work = given()
    resources = {
        "init_args": {"address": "local", "num_cpus": work.processes, "num_gpus": 0},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server, client, num_supernodes=work.clients, backend_config=resources)


if __name__ == "__main__":
    import with_flower  # as a module: what Ray's actors cannot import is sent to them with every message

    with_flower.main()
