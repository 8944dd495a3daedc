"""A pass through a model, recorded once and then repeated without autograd.

Half of a small model's step is Python and autograd around PyTorch's operators, which are the same in every step of most
models. So the first pass on batches of a shape is recorded below autograd. The others call the same operators on the same
storage in the same order: their bits are the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from raysim.core.graph import Graph

if TYPE_CHECKING:
    from raysim.core.task import Task

Made = tuple[Tensor, Any, Any]  # of a pass: its loss, latents, and losses of samples, detached
Pass = Callable[..., Made]  # of a batch x, y and what else it reads; and, if it is a descent, of the rate
KNOWN = ("torch", "torchvision", "raysim")  # packages whose code runs the same operators in every step
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
ATEN = torch.ops.aten
SAME = (ATEN.detach.default, ATEN.alias.default)  # return what they were given
OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
DIRECT = {  # Python's own bindings of frequent operators are called faster
    ATEN._log_softmax.default: torch._log_softmax,
    ATEN._log_softmax_backward_data.default: torch._log_softmax_backward_data,
    ATEN.add_.Tensor: torch.Tensor.add_,
    ATEN.addmm.default: torch.addmm,
    ATEN.addmm_.default: torch.Tensor.addmm_,
    ATEN.mm.default: torch.mm,
    ATEN.relu.default: torch.relu,
    ATEN.sum.dim_IntList: torch.sum,
    ATEN.t.default: torch.t,
    ATEN.view.default: torch.Tensor.view,
    ATEN.zero_.default: torch.Tensor.zero_,
}


def known(model: nn.Module, task: Task, penalties: Iterable[Callable[..., Any]] = ()) -> bool:
    """Whether no code of a user is in the forward of `model`, in the loss of `task` or in `penalties`."""
    code: list[Any] = [type(task), *map(type, model.modules()), *penalties]
    code += [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    for part, hooks in itertools.product([*model.modules(), *model.parameters()], HOOKS):
        code += (getattr(part, hooks, None) or {}).values()
    return all(getattr(part, "__module__", "").partition(".")[0] in KNOWN for part in code)


class Tapes:
    """The recorded passes of one model, by the forms of their batches."""

    def __init__(self, storage: Iterable[Tensor], descent: tuple[Tensor, Tensor] | None = None, graphs: bool = False):
        """`storage`: tensors that stay where they are, such as the model's. `descent`: its parameters and gradient [P], if
        steps may be descents. `graphs`: whether passes become CUDA graphs."""
        self._storage = {tensor.untyped_storage().data_ptr() for tensor in storage}
        self._views: dict[Hashable, Tensor] = {}  # of the storage, which all tapes share
        self._known: dict[Hashable, Pass | None] = {}  # None: cannot be recorded
        self._descent, self._graphs = descent, graphs
        self._pool: Any = None  # memory of the graphs, which all share
        self.refusals: set[str] = set()  # why not

    @property
    def descend(self) -> bool:
        """Whether they may be asked for descents."""
        return self._descent is not None

    def run(self, step: Pass, key: Hashable, x: Tensor, *others: Tensor, rate: float | None = None) -> Made:
        """`step(x, *others)`, from a tape if there is one. Whatever else changes what it does is in `key`. With a `rate` the
        parameters move by it against the gradient, which is used up."""
        if x.requires_grad:  # so that nothing a tape names does, and it needs no `no_grad`, which is slow
            return self._moved(step(x, *others), rate)
        key = key, x.shape, x.stride(), x.dtype, *[(other.shape, other.stride(), other.dtype) for other in others]
        ids = [*map(id, (x, *others))]
        if len({*ids}) < len(ids):  # a tape of these would read one for the other
            key = *key, *map(ids.index, ids)
        if rate is not None:
            key = *key, "descent"
        if key not in self._known:
            return self._recorded(step, key, (x, *others), rate)
        if (tape := self._known[key]) is None:
            return self._moved(step(x, *others), rate)
        return tape(x, *others) if rate is None else tape(x, *others, rate)

    def _recorded(self, step: Pass, key: Hashable, inputs: tuple[Tensor, ...], rate: float | None) -> Made:
        """The first pass of its kind."""
        moves = None if rate is None or self._descent is None else _Moves(*self._descent, rate)
        with _Recorder(inputs, self._storage, self._views, moves) as recorder:
            made = step(*inputs)
        try:
            tape = recorder.tape(made)
        except _Unrecordable as error:
            self._known[key] = None
            self.refusals.add(str(error))
            return self._moved(made, rate)
        if self._graphs:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            tape = Graph(tape, inputs, self._pool)
        self._known[key] = tape
        if moves is not None:
            moves.take_effect()
        return made

    def _moved(self, made: Made, rate: float | None) -> Made:
        """What a pass has made, after whose gradient the parameters now move."""
        if rate is not None and self._descent is not None:
            params, grad = self._descent
            params.add_(grad, alpha=-rate)
        return made


class _Unrecordable(Exception):
    """Another step may do something else."""


@dataclass(frozen=True)
class _Line:
    assigned: str  # what stands before the call
    call: str
    kept: bool  # even where nothing uses what it returns


class _Moves:
    """The parameters [P] of a descent while its first pass is recorded: each moves as soon as its gradient is known."""

    def __init__(self, params: Tensor, grad: Tensor, rate: float):
        self.params, self.grad, self.rate = params, grad, rate
        self._moved = params.clone()  # of a pass that cannot be recorded, nothing must have moved
        self._ranges: list[tuple[int, int]] = []  # of the storage, which have moved

    def of(self, part: Tensor, operator: Any, terms: Sequence[Tensor]) -> Tensor:
        """Move the parameters of which `part` is the gradient by what the operator adds; returns their view."""
        offset = part.storage_offset() - self.grad.storage_offset()
        view = part.shape, part.stride()
        operator(self._moved.as_strided(*view, offset), *terms, alpha=-self.rate)
        target = self.params.as_strided(*view, self.params.storage_offset() + offset)
        self._ranges.append(_range(target))
        return target

    def check(self, read: Tensor) -> None:
        """Raises `_Unrecordable` where a tensor that is read has moved, or is the gradient."""
        if _same_storage(read, self.grad):
            raise _Unrecordable("a step reads its gradient")
        start, stop = _range(read)
        if _same_storage(read, self.params) and any(start < b and a < stop for a, b in self._ranges):
            raise _Unrecordable("a step reads parameters whose gradient it has computed")

    def take_effect(self) -> None:
        self.params.copy_(self._moved)


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _range(tensor: Tensor) -> tuple[int, int]:
    """Where in its storage the tensor begins, and where it has ended."""
    start = int(tensor.storage_offset())
    return start, start + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


class _Recorder(TorchDispatchMode):
    """Writes the operators that are called while it is entered as the source of a function of the inputs, and, if it is a
    descent, of the rate."""

    def __init__(
        self, inputs: Sequence[Tensor], storage: set[int], views: dict[Hashable, Tensor], moves: _Moves | None = None
    ):  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs = [f"x{i}" for i in range(len(inputs))]
        self._moves = moves
        self._names = WeakTensorKeyDictionary(dict(zip(inputs, self._inputs, strict=True)))
        self._storage, self._views, self._count = storage, views, 0
        self._values: dict[str, Any] = {}  # what the source names beside variables
        self._lines: list[_Line] = []
        self._refusal: _Unrecordable | None = None
        self._constants: list[Tensor] = []  # of ones
        self._product: tuple[Tensor, ...] = ()  # the last product of matrices, and what it is of

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch's default imports its compiler, which takes two seconds."""
        return False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operator(*args, **(kwargs or {}))
        if self._refusal is None:
            try:
                self._lines += self._written(operator, args, kwargs or {}, made)
            except _Unrecordable as error:
                self._refusal = error
        return made

    def _written(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> list[_Line]:
        """The line, if there is one, of an operator that has `made` something of its arguments."""
        tags = {*operator.tags}
        if OF_VALUES & tags:
            raise _Unrecordable(f"what {operator} returns, or its shape, depends on values")
        if operator is ATEN.ones_like.default:  # the gradient of the loss by itself
            self._constants.append(made)
            self._names[made] = self._value(torch.ones_like(made))
            return []
        if args and isinstance(args[0], torch.Tensor):
            if operator._schema.is_mutable and any(_same_storage(args[0], ones) for ones in self._constants):
                raise _Unrecordable(f"{operator} changes what is taken for a constant")
            if operator._schema.is_mutable and any(_same_storage(args[0], part) for part in self._product):
                self._product = ()
            if self._moves is not None and _same_storage(args[0], self._moves.grad):
                return self._moving(self._moves, operator, *args, **kwargs)
        if operator is ATEN.mm.default:
            self._product = (made, *args)
        elif operator is ATEN.add_.Tensor and self._adds_product(*args):
            operator, args = ATEN.addmm_.default, (args[0], *self._product[1:])
        terms = [*map(self._term, args), *(f"{name}={self._term(value)}" for name, value in kwargs.items())]
        if operator in SAME:
            self._names[made] = terms[0]
            return []
        several = isinstance(made, list | tuple)
        parts = made if several else [made]
        if operator.is_view and terms[0][0] == "c":  # of storage that stays
            for part in parts:
                self._names[part] = self._value(part.detach())
            return []
        targets = [*map(self._target, parts)]
        assigned = f"{', '.join(targets)}{',' * several} = " if any(target != "_" for target in targets) else ""
        call = f"{self._value(DIRECT.get(operator, operator))}({', '.join(terms)})"
        return [_Line(assigned, call, operator._schema.is_mutable or torch.Tag.nondeterministic_seeded in tags)]

    def _moving(self, moves: _Moves, operator: Any, part: Tensor, *terms: Any, **kwargs: Any) -> list[_Line]:
        """The line of an operator that changes a part of the gradient: what it adds there moves the parameters."""
        if operator is ATEN.zero_.default:
            return []
        if operator is not ATEN.add_.Tensor or kwargs:
            raise _Unrecordable(f"{operator} is called on the gradient")
        if self._is_product(*terms) and part.shape == terms[0].shape:
            operator, terms = ATEN.addmm_.default, self._product[1:]
        target = moves.of(part, operator, terms)
        named = ", ".join([self._value(target), *map(self._term, terms)])
        return [_Line("", f"{self._value(DIRECT[operator])}({named}, alpha=-rate)", True)]

    def _is_product(self, term: Any) -> bool:
        """Whether it is the last product of matrices."""
        if not self._product or not isinstance(term, torch.Tensor):
            return False
        product = self._product[0]
        return (product.data_ptr(), product.shape, product.stride()) == (term.data_ptr(), term.shape, term.stride())

    def _adds_product(self, total: Tensor, term: Tensor, *_: Any) -> bool:
        """Whether the last product was just added to zeros, and can be computed there: with the same bits, and no copy."""
        if not self._is_product(term) or total.shape != term.shape:
            return False
        factors, sum_ = self._product[1:], total.clone()
        total.zero_().addmm_(*factors)
        fused = torch.equal(total, sum_) and torch.equal(total.signbit(), sum_.signbit())
        total.copy_(sum_)
        return fused

    def _target(self, made: Tensor | None) -> str:
        """The variable for what an operator has made; none for what it has changed."""
        if made is None or made in self._names:
            return "_"
        self._count += 1
        self._names[made] = f"t{self._count}"
        return f"t{self._count}"

    def _term(self, value: Any) -> str:
        """How the source names an argument."""
        if isinstance(value, torch.Tensor):
            if self._moves is not None:
                self._moves.check(value)
            if value not in self._names:
                if value.untyped_storage().data_ptr() not in self._storage:
                    raise _Unrecordable(f"a tensor {[*value.shape]} is neither of the model nor made in the step")
                self._names[value] = self._value(value.detach())
            return str(self._names[value])
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._term, value))}]"
        if isinstance(value, torch.Generator):
            raise _Unrecordable("it draws from a generator of its own")
        return repr(value) if value is None or type(value) in (bool, int) else self._value(value)

    def _value(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            value = self._views.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), value)
        name = f"c{len(self._values)}"
        self._values[name] = value
        return name

    def tape(self, made: tuple[Tensor, Any, Any]) -> Pass:
        """What was recorded while `made` was, as a function. Raises `_Unrecordable`."""
        if self._refusal is not None:
            raise self._refusal
        lines = [*self._lines, _Line("", f"return {', '.join(map(self._term, made))}", True)]
        needed, code = set[str](), list[str]()
        for line in reversed(lines):
            used, assigned = (set(re.findall(r"\bt\d+", part)) for part in (line.call, line.assigned))
            if line.kept or assigned & needed:
                done = ", ".join(sorted((used | assigned) - needed))  # memory is given back as soon as it was
                needed |= used
                code.append(f"{line.assigned}{line.call}" + (f"; del {done}" if done and code else ""))
        inputs = [*self._inputs, *["rate"] * (self._moves is not None)]
        source = "\n ".join([f"def tape({', '.join(inputs)}):", *reversed(code)])
        exec(compile(source, "<tape>", "exec"), self._values)
        tape: Pass = self._values["tape"]
        return tape
