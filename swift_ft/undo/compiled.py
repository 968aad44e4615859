"""Inverses as one compiled pass over memory (``exact="compiled"``).

Each operation of a rule reads and writes whole tensors, so an inverse and its residuals take thirty passes.
:func:`record` lets the rule run once on symbols. ``torch.compile`` makes one loop of what it did, of the
differences, and of the bytes that are kept. Numbers such as the learning rate are inputs: a kernel lasts as
long as the rule does the same operations.

The step and the undo call the same kernel, because two kernels for one formula need not round alike. Its
inputs always have :func:`slice_elements` elements: it is compiled once, and all elements meet the same
instructions.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from swift_ft.undo.residual import NOT_A_BYTE, bits
from swift_ft.undo.rules.rule import PARAM, Rule, Tensors
from swift_ft.undo.slices import ParamSlice, ParamTensors, packed, slice_elements

_logger = logging.getLogger(__name__)

_FORMULAS: dict[str, Callable[..., Any]] = {
    "_foreach_add": lambda a, b, alpha=None: a + (b if alpha is None else alpha * b),
    "_foreach_mul": operator.mul,
    "_foreach_div": operator.truediv,
    "_foreach_addcmul": lambda a, b, c, size=None: a + (b * c if size is None else size * (b * c)),
    "_foreach_addcdiv": lambda a, b, c, size=None: a + (b / c if size is None else size * (b / c)),
    "_foreach_neg": operator.neg,
    "_foreach_sqrt": torch.sqrt,
    "_foreach_sign": torch.sign,
    "_foreach_reciprocal": torch.reciprocal,
    "_foreach_clamp_min": torch.maximum,
}
"""The operations of rules that can be compiled. A rule that uses another one is not compiled."""

_COMPILED: dict[_Trace, Callable[..., None] | None] = {}
"""Compiled functions, for all optimizers of the process. None where ``torch.compile`` failed."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A compiled inverse, and the numbers that it computes with.

    Attributes:
        run: the compiled function.
        numbers: float32, on the kernel's device.
        computed: the parts whose values before the step it computes.
        state: the keys of the state that it reads.
    """

    run: Callable[..., None]
    numbers: Tensor
    computed: tuple[str, ...]
    state: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Trace:
    """The operations of a rule on one parameter; equal traces share a compiled function.

    A value is named by its place: first the inputs, then one for each operation.

    Attributes:
        inputs: how many tensors are read.
        operations: each a key of ``_FORMULAS`` and its operands: a value's place, or ``-1 - n`` for number n.
        keywords: for each operation the name of its last operand, or an empty string.
        results: the values before the step.
        elements: how many each tensor has.
        device: where the tensors are.
    """

    inputs: int
    operations: tuple[tuple[str, tuple[int, ...]], ...]
    keywords: tuple[str, ...]
    results: tuple[int, ...]
    elements: int
    device: torch.device


class Workspace:
    """The memory that kernels write their results to, and read short slices from.

    Attributes:
        inverse: by part, int32: the bits of the inverse.
        small: by part, int8: the bits before the step minus those of the inverse, or ``NOT_A_BYTE``.
    """

    def __init__(self) -> None:
        self.inverse: dict[str, Tensor] = {}
        self.small: dict[str, Tensor] = {}
        self._inputs: dict[str, Tensor] = {}

    def run(
        self,
        kernel: Kernel,
        slices: Sequence[ParamSlice],
        before: Sequence[Mapping[str, Tensor]],
        small: Mapping[str, Tensor],
    ) -> None:
        """Computes the results for some slices, one behind the other, together at most one slice's size.

        Args:
            kernel: what to compute.
            slices: flat views of what a step left behind; only read.
            before: for each slice, by computed part, the values before the step.
            small: by part, memory of a full slice to use in place of ``self.small``.
        """
        size, device = slice_elements(kernel.numbers.device), kernel.numbers.device
        for memory, dtype in ((self.inverse, torch.int32), (self.small, torch.int8)):
            for key in kernel.computed:
                if key not in memory or memory[key].device != device:
                    memory[key] = torch.empty(size, dtype=dtype, device=device)
        inputs = [
            self._joined(PARAM, [slice_.param for slice_ in slices], size),
            self._joined("grad", [slice_.grad for slice_ in slices], size),
            *(self._joined(key, [slice_.state[key] for slice_ in slices], size) for key in kernel.state),
        ]
        for key in kernel.computed:
            old = self._joined(f"before {key}", [values[key] for values in before], size)
            inputs += [bits(old), self.inverse[key], small.get(key, self.small[key])]
        kernel.run(kernel.numbers, *inputs)

    def _joined(self, name: str, tensors: Sequence[Tensor], size: int) -> Tensor:
        """One tensor of the full size: the only one if it is, or a copy of all, with old values behind."""
        if tensors[0].numel() == size:
            return tensors[0]
        memory = self._inputs.get(name)
        if memory is None or memory.device != tensors[0].device:
            memory = self._inputs[name] = torch.zeros(size, device=tensors[0].device)
        torch.cat(list(tensors), out=memory[: sum(tensor.numel() for tensor in tensors)])
        return memory


def invert_compiled(kernel: Kernel, parts: Sequence[ParamTensors]) -> None:
    """Inverts parameters and their state in place, with the bits that the step found.

    Args:
        kernel: what the step used.
        parts: what the step left behind.
    """
    workspace, device = Workspace(), kernel.numbers.device
    zero = torch.zeros(slice_elements(device), device=device)
    for slices in packed(parts):
        before = [dict.fromkeys(kernel.computed, zero[: slice_.param.numel()]) for slice_ in slices]
        workspace.run(kernel, slices, before, {})
        at = 0
        for slice_ in slices:
            end = at + slice_.param.numel()
            for key in kernel.computed:
                target = slice_.param if key == PARAM else slice_.state[key]
                bits(target).copy_(workspace.inverse[key][at:end])
            at = end


def is_compilable(rule: Rule, tensors: Tensors) -> bool:
    """Whether a parameter's update is of a kind that is compiled: elementwise, in float32, not its first."""
    values = [*tensors.params, *tensors.grads, *(value for part in tensors.state.values() for value in part)]
    return (
        rule.elementwise
        and not tensors.fresh
        and not tensors.gradient_changed
        and all(
            value.dtype == torch.float32 and value.is_contiguous() and value.numel() == values[0].numel() > 0
            for value in values
        )
    )


def record(
    rule: Rule, tensors: Tensors, hyper: Mapping[str, Any], computed: tuple[str, ...]
) -> Kernel | None:
    """The kernel of a rule's inverse. The first of its kind takes seconds: it is compiled.

    Args:
        rule: the rule.
        tensors: one parameter's.
        hyper: the group's values as the step used them.
        computed: the parts to compute.

    Returns:
        None if the rule does something that is not known here, or nothing can be compiled on this machine.
    """
    device, keys = tensors.params[0].device, tuple(tensors.state)
    recording = _Recording(device, inputs=2 + len(keys))
    symbols = {key: _Symbol(recording, place) for place, key in enumerate((PARAM, "grad", *keys))}
    standing_in: Any = {key: [symbol] for key, symbol in symbols.items()}
    state = {key: standing_in[key] for key in keys}
    try:
        rule.invert(
            replace(tensors, params=standing_in[PARAM], grads=standing_in["grad"], state=state), hyper
        )
    except (TypeError, AttributeError):  # an operation, or an attribute, that symbols do not have
        return None
    trace = recording.trace([symbols[key].place for key in computed])
    if trace not in _COMPILED:
        _COMPILED[trace] = _compiled(trace, len(recording.numbers))
    run = _COMPILED[trace]
    if run is None:
        return None
    return Kernel(run, torch.tensor(recording.numbers, dtype=torch.float32, device=device), computed, keys)


class _Symbol:
    """Stands for a tensor while a rule is recorded: torch hands its functions over to it."""

    def __init__(self, recording: _Recording, place: int) -> None:
        self.recording = recording
        self.place = place
        self.device = recording.device

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.__name__
        if name.removesuffix("_") not in _FORMULAS:
            return NotImplemented
        (target,), *_ = args
        place = target.recording.note(name.removesuffix("_"), args, kwargs or {})
        if not name.endswith("_"):
            return [_Symbol(target.recording, place)]
        target.place = place
        return None


class _Recording:
    """The operations of a rule on one parameter, and the numbers in them."""

    def __init__(self, device: torch.device, inputs: int) -> None:
        self.device = device
        self.numbers: list[float] = []
        self._inputs = inputs
        self._operations: list[tuple[str, tuple[int, ...]]] = []
        self._keywords: list[str] = []

    def note(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Notes an operation on lists of one tensor, or numbers; returns the place of its result."""
        operands = tuple(self._operand(given) for given in (*args, *kwargs.values()))
        self._operations.append((name, operands))
        self._keywords.append(next(iter(kwargs), ""))
        return self._inputs + len(self._operations) - 1

    def trace(self, results: Sequence[int]) -> _Trace:
        """The trace of all operations so far."""
        return _Trace(
            self._inputs,
            tuple(self._operations),
            tuple(self._keywords),
            tuple(results),
            slice_elements(self.device),
            self.device,
        )

    def _operand(self, given: Any) -> int:
        if isinstance(given, (list, tuple)):
            (given,) = given
        if isinstance(given, _Symbol):
            return given.place
        self.numbers.append(float(given))
        return -len(self.numbers)


def _compiled(trace: _Trace, numbers: int) -> Callable[..., None] | None:
    """The compiled function of a trace; None, with a warning, where nothing can be compiled.

    Without guards: :class:`Workspace` sees to it that size, dtypes and device are always the same.
    """
    guards: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    run = torch.compile(_graph(trace), fullgraph=True, dynamic=False, options=guards)
    size, device = trace.elements, trace.device
    inputs = [torch.zeros(size, device=device) for _ in range(trace.inputs)]
    for _ in trace.results:
        inputs += [torch.zeros(size, dtype=d, device=device) for d in (torch.int32, torch.int32, torch.int8)]
    _logger.info(
        "This optimizer's inverse is compiled now, for all its steps: takes some seconds.",
        extra={"event": "undo_compiled"},
    )
    try:
        run(torch.zeros(numbers, device=device), *inputs)
    except (RuntimeError, OSError, ImportError) as error:
        reason = getattr(error, "inner_exception", error)  # of torch's errors
        _logger.warning(
            'torch.compile fails here (%s), so exact="compiled" does what exact=True does: install a C++ '
            "compiler (g++) on this machine, and Python's headers.",
            f"{type(reason).__name__}: {reason}".splitlines()[0],
            extra={"event": "undo_not_compiled"},
        )
        return None
    return run


def _graph(trace: _Trace) -> fx.GraphModule:
    """A trace as a function of the numbers, the inputs, and memory for results.

    For each result: the bits before the step, memory for those of the inverse, and for their differences.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)

    def taken(name: str) -> Any:
        return fx.Proxy(graph.placeholder(name), tracer)

    numbers = taken("numbers")
    values = [taken(f"input_{place}") for place in range(trace.inputs)]
    for (name, places), keyword in zip(trace.operations, trace.keywords, strict=True):
        operands = [values[place] if place >= 0 else numbers[-1 - place] for place in places]
        named = {keyword: operands.pop()} if keyword else {}
        values.append(_FORMULAS[name](*operands, **named))
    for index, place in enumerate(trace.results):
        inverse = values[place].view(torch.int32)
        difference = taken(f"before_{index}") - inverse
        taken(f"inverse_{index}").copy_(inverse)
        is_byte = difference.clamp(NOT_A_BYTE + 1, 127) == difference
        taken(f"small_{index}").copy_(torch.where(is_byte, difference, NOT_A_BYTE).to(torch.int8))
    graph.output(None)
    return fx.GraphModule(torch.nn.Module(), graph)
