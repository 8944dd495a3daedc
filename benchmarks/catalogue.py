"""One setting of every method of the catalogue, for the benchmarks that run them all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

PROXY = {"data": {"proxy": {"samples": 100}}}  # of the test set, on which these methods are then not tested


@dataclass(frozen=True)
class Setting:
    """How one method is run beside FedAvg, and why it takes longer or reaches less, where it does."""

    role: str  # client | weighting | server: the list that it stands in
    work: str  # what it does beyond FedAvg: this explains its seconds a round
    fields: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)  # of other sections, by their name
    everyone: bool = False  # all clients take part in every round
    personal: bool = False  # judged by the clients' own models, each on its client's test samples
    note: str = ""  # why it ends below FedAvg on the quickstart data, should it do so
    cure: dict[str, Any] = field(default_factory=dict)  # fields with which it then learns ...
    cure_changes: dict[str, dict[str, Any]] = field(default_factory=dict)  # ... or other sections

    @property
    def cured(self) -> Setting | None:
        """The setting in which it learns, where the plain one may not."""
        if not self.cure and not self.cure_changes:
            return None
        return replace(self, fields=self.fields | self.cure, changes=self.changes | self.cure_changes, note="")

    def sections(self, name: str) -> dict[str, Any]:
        """The parts of a configuration that make a run use the method."""
        return {self.role: [{name: self.fields}], **self.changes}


def client(work: str, **rest: Any) -> Setting:
    return Setting("client", work, **rest)


def weighting(work: str, **rest: Any) -> Setting:
    return Setting("weighting", work, **rest)


def server(work: str, **rest: Any) -> Setting:
    return Setting("server", work, **rest)


VANISHES = (
    "as long as the mean of ten clients' models is worse than chance, shrinking it lowers the proxy loss: gamma ends near 0.8 "
    "round after round, and the model vanishes before it has learned; gamma_clamp or lr: 0.002 keeps it"
)
BOUND = {"gamma_clamp": [1.0, 1.1]}

SETTINGS: dict[str, Setting] = {
    # Objectives: one global model.
    "fedprox": client("one vector operation a step"),
    "feddyn": client("two vector operations a step, one a round on the server"),
    "scaffold": client(
        "one vector operation a step; a second vector comes and goes", cure_changes={"local": {"lr": 0.05}},
        note="a client meets its control again after some ten rounds; at this learning rate the model has moved on so far "
        "that it misleads",
    ),
    "sgdm": client("the momentum: one vector operation a step", fields={"rho": 0.5}),
    "fedbabu": client(
        "less: the head has no gradient",
        note="the head stays as it was drawn, so the body must learn ten classes under ten random directions",
    ),
    "moon": client("two more forward passes a step, of the global and of the client's last model"),
    "fedadp": client("a norm of every neuron after training", note="a fifth of the neurons moves each round"),
    # Personalized: models of the clients' own.
    "fedala": client("once settled, a forward pass and the head's gradient over 80 % of the samples", personal=True),
    "finetune": client("its further local epochs", fields={"ft_epochs": 1}, personal=True),
    "perfedavg": client("two gradients a step, each over one of two batches: half the steps", personal=True),
    "fedrep": client(
        "its further epochs, in which only the head has a gradient", fields={"head_epochs": 1}, personal=True,
        note="a client's head learns from its own samples alone, some fourteen, and only in the five of 50 rounds in which the "
        "client is drawn",
    ),
    "pfedme": client(
        "its inner steps: so many gradients a batch", fields={"inner_steps": 3}, changes={"local": {"lr": 0.05}},
        personal=True, note="w follows θ by lr · lam, which must stay below 1: it is run at a quarter of the learning rate",
        cure_changes={"local": {"lr": 0.05, "epochs": 20}},
    ),
    "ditto": client(
        "the epochs of the personal model", fields={"epochs": 1}, personal=True, cure={"epochs": 10, "lam": 1.0},
        note="a client's own model trains for an epoch on some fourteen samples, and only in the five of 50 rounds in which the "
        "client is drawn",
    ),
    "fedamp": client(
        "one vector operation a step; pairwise distances of all models, and their mixing", everyone=True, personal=True,
    ),
    "fedphp": client("one more forward pass a step, of the private model, and kernels between latents", personal=True),
    "fedfomo": client(
        "a forward pass of every model received over the validation samples",
        fields={"models": 5}, changes={"data": {"client_val_frac": 0.2}}, personal=True,
        note="no model gathers what all learn: a client, drawn five times in 50 rounds, mixes a few models that it judges on "
        "two or three validation samples; its accuracy still grows, to 0.62 after 200 rounds",
    ),
    "apple": client(
        "all clients' models mixed, and as many inner products, in every step", everyone=True, personal=True,
        note="each core moves by its own share of the mix, at first one in N, of a step",
    ),
    "partialfed": client(
        "two models mixed in every step, and their inner products with the gradient", personal=True,
        cure={"logits": [5.0, 0.0]},
        note="at first a layer is as often the client's own, which is some ten rounds old, as the global one",
    ),
    # Weights.
    "fedavg": weighting("nothing: uniform weights", fields={"weights": "uniform"}),
    "feddisco": weighting("nothing: numbers on the server"),
    "ldawa": weighting("a cosine for each tensor after training"),
    "fednova": weighting("nothing: numbers on the server"),
    "ccn": weighting("one forward pass over the client's samples after training"),
    "fedldf": weighting("a norm of every layer after training; a sum over fewer models", fields={"top_n": 4}),
    "random_layer": weighting("less: a sum over fewer models", fields={"n": 4}),
    "hdfl": weighting("less: a sum over fewer models", fields={"n": 4}),
    "median": weighting("every coordinate sorted"),
    "trimmed_mean": weighting("every coordinate sorted"),
    "multi_krum": weighting("inner products of all clients' updates", fields={"f": 2}),
    "fedlaw": weighting(
        "its epochs over the proxy samples on the server", fields={"epochs": 20}, changes=PROXY, note=VANISHES, cure=BOUND
    ),
    "attentive_law": weighting("its epochs over the proxy samples on the server", fields={"epochs": 20}, changes=PROXY),
    "adaptive_gws": weighting(
        "its epochs over the proxy samples on the server", fields={"epochs": 20}, changes=PROXY, note=VANISHES, cure=BOUND
    ),
    # Server steps.
    "step_size": server("one vector operation a round", fields={"eta": 1.2}),
    "fedavgm": server(
        "one vector operation a round", cure={"beta": 0.5},
        note="with beta 0.9 the updates of ten clients count tenfold in sum, while those of the next rounds come from other "
        "clients and point elsewhere: the model is thrown about",
    ),
    "fedadagrad": server("some vector operations a round"),
    "fedadam": server("some vector operations a round"),
    "fedyogi": server("some vector operations a round"),
    "fedlws": server("one more sum over the models and their distances from it, a round", fields={"beta": 0.03}),
    "fixed_shrink": server("one vector operation a round", fields={"gamma": 0.99}),
    "awd": server("two norms and one vector operation a round"),
    "adadecay": server("some vector operations a round"),
    "server_ft": server("its epochs over the proxy samples on the server", fields={"epochs": 2}, changes=PROXY),
    "feddf": server(
        "every model's logits of the proxy samples; its epochs over them on the server", fields={"epochs": 5}, changes=PROXY
    ),
    "fedbe": server(
        "every model's logits of the proxy samples; its epochs over them on the server", fields={"epochs": 5}, changes=PROXY
    ),
}  # fmt: skip
