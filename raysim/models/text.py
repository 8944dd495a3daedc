"""Text classifiers over token indices, 0 being the padding, and a model of the next token.

They return logits, as every model here: the log-softmax that the papers' code adds before its cross-entropy changes
nothing, for cross-entropy applies it itself and log-softmax of log-probabilities is the identity.
"""

import torch
from torch import Tensor, nn

from raysim.models.staged import Inputs, Model, classifier, stage


class MeanEmbedding(nn.Embedding):
    """Tokens [B, T] -> their mean embedding [B, E], over all T positions: the papers' code counts the padding too."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).mean(dim=1)


class NGramConvs(nn.ModuleList):
    """Embeddings [B, T, E] -> the maximum over time of every filter of every convolution, [B, filters]."""

    def __init__(self, embedding: int, filters: int, lengths: tuple[int, ...]) -> None:
        super().__init__(nn.Conv1d(embedding, filters, n) for n in lengths)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT  # [B, E, T]
        return torch.cat([conv(x).relu().amax(dim=2) for conv in self], dim=1)


def fasttext(inputs: Inputs) -> Model:
    """FedALA's fastText (Joulin et al. 2017), 32-d; 3 157 508 parameters at 98 635 tokens and 4 classes."""
    embedding = MeanEmbedding(inputs.tokens(), 32, padding_idx=0)
    return classifier(inputs, {"embedding": embedding, "hidden": nn.Linear(32, 32)})


def text_cnn(inputs: Inputs, embedding: int = 32, dropout: float = 0.8) -> Model:
    """FedLWS's TextCNN (Kim 2014), 100 filters of 3, 4 and 5 tokens; 1 063 904 parameters at 32 000 tokens, C = 4."""
    stages = {
        "embedding": nn.Embedding(inputs.tokens(), embedding, padding_idx=0),
        "ngrams": stage(convs=NGramConvs(embedding, 100, lengths=(3, 4, 5)), dropout=nn.Dropout(dropout)),
    }
    return classifier(inputs, stages)


class Recurrent(nn.GRU):
    """Embeddings [B, T, E] -> the states after every position, [B, T, H]."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # without the last states
        states: Tensor = super().forward(x)[0]
        return states


def char_gru(inputs: Inputs, embedding: int = 32, hidden: int = 128) -> Model:
    """Ours, for next-token prediction: a GRU with an output at each position; 71 385 parameters at 57 characters."""
    stages = {
        "embedding": nn.Embedding(inputs.tokens(), embedding),
        "recurrent": Recurrent(embedding, hidden, batch_first=True),
    }
    return classifier(inputs, stages)
