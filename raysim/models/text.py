"""Text classifiers over token indices, 0 being the padding, and a model of the next token.

They return logits, as every model here: the log-softmax that the papers' code adds before its cross-entropy changes
nothing, for cross-entropy applies it itself and log-softmax of log-probabilities is the identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.core.bounds import Count, Probability
from raysim.lazy import nn
from raysim.models.staged import Inputs, classifier, stage

if TYPE_CHECKING:
    from raysim.models.model import Model


def fasttext(inputs: Inputs) -> Model:
    """FedALA's fastText (Joulin et al. 2017), 32-d; 3 157 508 parameters at 98 635 tokens and 4 classes."""
    from raysim.models.modules import MeanEmbedding

    embedding = MeanEmbedding(inputs.tokens(), 32, padding_idx=0)
    return classifier(inputs, {"embedding": embedding, "hidden": nn.Linear(32, 32)})


def text_cnn(inputs: Inputs, embedding: Count = 32, dropout: Probability = 0.8) -> Model:
    """FedLWS's TextCNN (Kim 2014), 100 filters of 3, 4 and 5 tokens; 1 063 904 parameters at 32 000 tokens, C = 4."""
    from raysim.models.modules import NGramConvs

    stages = {
        "embedding": nn.Embedding(inputs.tokens(), embedding, padding_idx=0),
        "ngrams": stage(convs=NGramConvs(embedding, 100, lengths=(3, 4, 5)), dropout=nn.Dropout(dropout)),
    }
    return classifier(inputs, stages)


def char_gru(inputs: Inputs, embedding: Count = 32, hidden: Count = 128) -> Model:
    """Ours, for next-token prediction: a GRU with an output at each position; 71 385 parameters at 57 characters."""
    from raysim.models.modules import Recurrent

    stages = {
        "embedding": nn.Embedding(inputs.tokens(), embedding),
        "recurrent": Recurrent(embedding, hidden, batch_first=True),
    }
    return classifier(inputs, stages)
