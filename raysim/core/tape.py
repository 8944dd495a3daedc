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

if TYPE_CHECKING:
    from raysim.core.task import Task

Pass = Callable[..., tuple[Tensor, Any, Any]]
"""Of a batch x, y and what else it reads: its loss, latents, and losses of samples, detached."""
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
    ATEN.ones_like.default: torch.ones_like,
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

    def __init__(self, storage: Iterable[Tensor]):
        """`storage`: tensors that stay where they are, such as the model's."""
        self._storage = {tensor.untyped_storage().data_ptr() for tensor in storage}
        self._views: dict[Hashable, Tensor] = {}  # of the storage, which all tapes share
        self._known: dict[Hashable, Pass | None] = {}  # None: cannot be recorded
        self.refusals: set[str] = set()  # why not

    def run(self, step: Pass, key: Hashable, x: Tensor, *others: Tensor) -> tuple[Tensor, Any, Any]:
        """`step(x, *others)`, from a tape if there is one. Whatever else changes what it does is in `key`."""
        if x.requires_grad:  # so that nothing a tape names does, and it needs no `no_grad`, which is slow
            return step(x, *others)
        key = key, x.shape, x.stride(), x.dtype, *[(other.shape, other.stride(), other.dtype) for other in others]
        ids = [*map(id, (x, *others))]
        if len({*ids}) < len(ids):  # a tape of these would read one for the other
            key = *key, *map(ids.index, ids)
        if key in self._known:
            return (self._known[key] or step)(x, *others)
        with _Recorder((x, *others), self._storage, self._views) as recorder:
            made = step(x, *others)
        try:
            self._known[key] = recorder.tape(made)
        except _Unrecordable as error:
            self._known[key] = None
            self.refusals.add(str(error))
        return made


class _Unrecordable(Exception):
    """Another step may do something else."""


@dataclass(frozen=True)
class _Line:
    assigned: str  # what stands before the call
    call: str
    kept: bool  # even where nothing uses what it returns


class _Recorder(TorchDispatchMode):
    """Writes the operators that are called while it is entered as the source of a function of the inputs."""

    def __init__(self, inputs: Sequence[Tensor], storage: set[int], views: dict[Hashable, Tensor]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs = [f"x{i}" for i in range(len(inputs))]
        self._names = WeakTensorKeyDictionary(dict(zip(inputs, self._inputs, strict=True)))
        self._storage, self._views, self._count = storage, views, 0
        self._values: dict[str, Any] = {}  # what the source names beside variables
        self._lines: list[_Line] = []
        self._refusal: _Unrecordable | None = None
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

    def _adds_product(self, total: Tensor, term: Tensor, *_: Any) -> bool:
        """Whether the last product was just added to zeros, and can be computed there: with the same bits, and no copy."""
        if not self._product or not isinstance(term, torch.Tensor):
            return False
        product, *factors = self._product
        same = product.data_ptr(), product.shape, product.stride()
        if same != (term.data_ptr(), term.shape, term.stride()) or total.shape != term.shape:
            return False
        sum_ = total.clone()
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
        source = "\n ".join([f"def tape({', '.join(self._inputs)}):", *reversed(code)])
        exec(compile(source, "<tape>", "exec"), self._values)
        tape: Pass = self._values["tape"]
        return tape
