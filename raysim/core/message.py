"""What a client sends, tensor by tensor, and how many bytes that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from raysim.core.bounds import NonNegativeInt
from raysim.core.hooks import form, misused
from raysim.core.layers import LayerMap, TensorSpec
from raysim.core.method import Method
from raysim.core.rng import stream_of
from raysim.lazy import Tensor, torch

FLOAT = INDEX = 4  # bytes
COSTS = ("payload", "positions", "scales")


@dataclass(eq=False)
class Part:
    """One tensor of a message: the values that are sent, as they are received, and what they cost."""

    of: str  # "model", or the name of a further vector
    spec: TensorSpec
    target: Tensor  # [n] at first what there is to send, at the end what is received
    values: Tensor  # [m] float32
    index: Tensor | None = None  # [m] int64, ascending: where the values stand among the n; None: everywhere
    index_is_known: bool = False  # to the receiver as well
    bits: int = 32  # of each value
    entries: int | None = None  # numbers that are sent, where these are not the values
    scales: int = 0  # bytes of norms and bounds

    @property
    def name(self) -> str:
        """Of one tensor of one vector in the message."""
        return f"{self.of}/{self.spec.name}"

    def keep(self, index: Tensor) -> None:
        """Send no more than the values at `index` (ascending)."""
        if len(index) < len(self.values):
            self.index = index if self.index is None else self.index[index]
            self.index_is_known = False
            self.values = self.values[index]

    def decoded(self) -> Tensor:
        """[n] what is received."""
        if self.index is None:
            return self.values
        return torch.zeros_like(self.target).index_copy_(0, self.index, self.values)

    def costs(self) -> tuple[int, int, int]:
        """Bytes of the `COSTS`: values side by side in as few bytes as hold them; positions as a list or as a bitmap of the
        tensor, whichever is shorter."""
        n, m = len(self.target), len(self.values) if self.entries is None else self.entries
        positions = min(_bytes(m * (n - 1).bit_length()), _bytes(n))
        free = self.index is None or self.index_is_known
        return _bytes(m * self.bits), 0 if free else positions, self.scales


def _bytes(bits: int) -> int:
    return -(-bits // 8)


class Sender(Protocol):
    """Whose message it is: the `LocalRun` of a client, or the server."""

    def generator(self, purpose: str) -> torch.Generator:
        """Its random stream for `purpose` in this round."""
        ...

    def state(self, method: Any) -> Any:
        """What it keeps for `method` from round to round."""
        ...


@dataclass(frozen=True)
class Transform(Method):
    """Changes a message on its way, and says what it costs; a stack is applied in list order, each around the next.

    Its fields are the paper's hyper-parameters. What it keeps is made by `new_state`, as with a `ClientMethod`.
    """

    role: ClassVar[str] = "transform"
    corrects: ClassVar[bool] = False
    """Whether it sends later what those that follow it lose."""
    encodes_models: ClassVar[bool] = False
    """Whether a whole model survives it; else the server encodes what has changed."""

    def new_state(self, layers: LayerMap) -> Any:
        """What a sender keeps, before its first message: a dataclass of tensors and numbers, or None."""
        return None

    def apply(self, message: Message, sender: Sender, rest: Callable[[], None]) -> None:
        """Change the values of `message.parts`, then call `rest`, which applies the transforms that follow. Afterwards each
        part's `target` is what is received."""
        raise NotImplementedError


@dataclass(frozen=True)
class Compressor(Transform):
    """A transform that encodes one tensor after the other."""

    least: NonNegativeInt = field(default=256, kw_only=True)
    """Tensors with fewer elements are sent as they are."""

    def encode(self, part: Part, sender: Sender) -> None:
        """Replace `part.values` by what is received of them, and set what they cost."""
        raise NotImplementedError

    def apply(self, message: Message, sender: Sender, rest: Callable[[], None]) -> None:
        for part in message.parts:
            if len(part.target) >= self.least:
                self.encode(part, sender)
                places = part.target if part.index is None else part.index
                values: Any = part.values
                if not isinstance(values, torch.Tensor) or values.shape != places.shape:
                    way = f"It must be a tensor {[*places.shape]}; part.keep(index) sends fewer"
                    raise misused(self.encode, f"left {form(values)} as part.values", way)
        rest()

    def draws(self, part: Part, sender: Sender) -> Tensor:
        """[m] numbers from [0, 1), uniform and independent, from the sender's stream."""
        stream = sender.generator(f"message {stream_of(self)}")
        return torch.rand(len(part.values), generator=stream).to(part.values.device)


class Message:
    """An update [S] and further vectors [P], both changed in place. Parameters are encoded; buffers, and vectors of another
    size, are sent as they are."""

    def __init__(
        self, update: Tensor, layers: LayerMap, vectors: Mapping[str, Tensor] | None = None, sent: Tensor | None = None,
        private: str | None = None,
    ):  # fmt: skip
        """Of `update` the elements `sent` [S] (bool; None: all), without the layers `private`."""
        vectors = vectors or {}
        self.layers = layers
        self.costs = whole(layers, sent)  # [3, T + Tb] bytes of the model, by `COSTS`
        self.vector_costs = np.zeros(3, np.int64)
        self.vector_costs[0] = bytes_of(vectors)
        self._masked: dict[Part, tuple[Tensor, Tensor]] = {}
        stays = layers.where(private).tolist() if private else [False] * len(layers.tensors)
        self.costs[:, stays] = 0
        specs = [spec for spec, own in zip(layers.tensors[: layers.T], stays, strict=False) if spec.size and not own]
        self.parts = [part for spec in specs if len((part := self._part("model", spec, update, sent)).target)]
        for name, vector in vectors.items():
            if vector.shape == (layers.P,) and vector.dtype == torch.float32:
                self.parts += [self._part(name, spec, vector, None) for spec in specs]

    def _part(self, of: str, spec: TensorSpec, vector: Tensor, sent: Tensor | None) -> Part:
        place = vector[spec.start : spec.stop]
        mask = None if sent is None else sent[spec.start : spec.stop]
        target = place if mask is None else place[mask]
        part = Part(of, spec, target, target)
        if mask is not None:
            self._masked[part] = place, mask
        return part

    def within(self, part: Part, vector: Tensor) -> Tensor:
        """The elements [n] of `vector` [P] that stand where those of `part` do; a view where that can be."""
        place = vector[part.spec.start : part.spec.stop]
        return place[self._masked[part][1]] if part in self._masked else place

    def put(self, part: Part, vector: Tensor, elements: Tensor) -> None:
        """Write `elements` [n] where `within` reads them."""
        place = vector[part.spec.start : part.spec.stop]
        place[self._masked[part][1] if part in self._masked else slice(None)] = elements

    def encode(self, transforms: Sequence[Transform], sender: Sender) -> None:
        """Apply the transforms; then the vectors are what is received, and the costs are what that takes."""
        if transforms:
            transforms[0].apply(self, sender, lambda: self.encode(transforms[1:], sender))
            return
        column = {spec.name: i for i, spec in enumerate(self.layers.tensors)}
        for part in self.parts:
            costs = part.costs()
            if part.of == "model":
                self.costs[:, column[part.spec.name]] = costs
            else:
                self.vector_costs += (costs[0] - FLOAT * len(part.target), *costs[1:])
            if part.values is not part.target:
                part.target.copy_(part.decoded())
            if part in self._masked:
                place, mask = self._masked[part]
                place[mask] = part.target


def bytes_of(vectors: Mapping[str, Tensor]) -> int:
    """Bytes of vectors that are sent as they are."""
    return sum(vector.numel() * vector.element_size() for vector in vectors.values())


def whole(layers: LayerMap, sent: Tensor | None = None) -> np.ndarray:
    """[3, T + Tb] bytes, by `COSTS`, of tensors that are sent as they are; of each the elements `sent` [S], if not all."""
    costs = np.zeros((3, len(layers.tensors)), np.int64)
    sizes = layers.sizes.numpy() if sent is None else [int(sent[s.start : s.stop].sum()) for s in layers.tensors]
    costs[0] = FLOAT * np.asarray(sizes)
    return costs
