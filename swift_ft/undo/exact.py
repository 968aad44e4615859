"""Steps that store the residuals of their own inverse, a bucket of parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_ft.undo.compiled import Kernel, Workspace, is_compilable, record
from swift_ft.undo.records import ParamUpdate
from swift_ft.undo.residual import Residual
from swift_ft.undo.rules.rule import PARAM, Rule
from swift_ft.undo.slices import ParamSlice, ParamTensors, local, packed, slice_elements, sliced
from swift_ft.undo.snapshot import size_bytes
from swift_ft.undo.update import GroupUpdate, buckets, invert, split_by_kernel

_ALIGNMENT = 64

_LISTED = 4
"""In every fourth list of slices, residuals of parameters are listed if that is shorter than a byte per
element. It nearly always is, and saves more than the others need for what a byte cannot hold. More often
would take too long."""

_FEW = 1 / 16
"""The share of listed residuals up to which a list is shorter: it takes 8 bytes for one."""

BUCKET_BYTES = 25 * 2**20
"""Bytes of values before the step that are held at a time; a larger parameter makes its own bucket."""


class Residuals:
    """The memory of residuals and of one bucket, kept from step to step.

    Allocating memory takes several times as long as writing to it.

    Attributes:
        compiled: inverses are compiled where they can be.
        workspace: what compiled inverses write to.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled
        self.workspace = Workspace()
        self._all: dict[tuple[int, str], Residual] = {}
        self._bucket = torch.empty(0, dtype=torch.uint8)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Flat copies of tensors of one device, valid until the next call."""
        sizes = [-(-size_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        device = tensors[0].device if tensors else self._bucket.device
        if self._bucket.numel() < sum(sizes) or self._bucket.device != device:
            self._bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        copies, at = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            flat = self._bucket[at : at + size_bytes(tensor)].view(tensor.dtype)
            flat.view(tensor.shape).copy_(tensor)
            copies.append(flat)
            at += size
        return copies

    def empty(self, param: Tensor, key: str) -> Residual:
        """An empty residual for one part of one parameter."""
        residual = self._all.setdefault((id(param), key), Residual())
        residual.clear()
        return residual


def step_with_residuals(
    update: GroupUpdate, step: Callable[[Sequence[Tensor]], None], residuals: Residuals
) -> None:
    """Steps all parameters of an update and stores their residuals.

    Args:
        update: the update, recorded but not made yet.
        step: applies the optimizer to some of the parameters.
        residuals: where the residuals' memory comes from.
    """
    changed, update.gradient_changed = update.gradient_changed, False  # each bucket restores its gradients
    for bucket in _chunks(update, in_ranges=residuals.compiled):
        if not (residuals.compiled and can_be_cut(update.rule, bucket[0])):
            with _residuals_stored(update, bucket, None, residuals, changed):
                step([entry.param for entry in bucket])
            continue
        (entry,) = bucket
        counters = counters_of(entry)
        for within in ranges_of(entry):
            with _residuals_stored(update, bucket, within, residuals, changed):
                step_range(update.optimizer, entry, within, counters, step)


def _chunks(update: GroupUpdate, in_ranges: bool) -> Iterator[list[ParamUpdate]]:
    """Parameters that are stepped at once. One that is stepped in ranges is alone."""
    chunk: list[ParamUpdate] = []
    total = 0
    for entry in update.entries:
        size = entry.param.numel() * entry.param.element_size() * (1 + len(update.rule.keys))
        alone = in_ranges and can_be_cut(update.rule, entry)
        if chunk and (total + size > BUCKET_BYTES or alone):
            yield chunk
            chunk, total = [], 0
        chunk.append(entry)
        total += size
        if alone:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


@contextmanager
def _residuals_stored(
    update: GroupUpdate,
    bucket: Sequence[ParamUpdate],
    within: slice | None,
    residuals: Residuals,
    changed: bool,
) -> Iterator[None]:
    """Stores the residuals of the step that is made inside, of some parameters or a range of one."""
    with torch.no_grad():
        before = _values_before(update, bucket, within, residuals)
        grads = [_part(entry.grad.detach(), within).clone() for entry in bucket] if changed else []
    yield
    with torch.no_grad():
        for entry, grad in zip(bucket, grads, strict=bool(grads)):
            _part(entry.grad.detach(), within).copy_(grad)
        _store(update, bucket, within, before, residuals)


def _part(tensor: Tensor, within: slice | None) -> Tensor:
    return tensor if within is None else tensor.view(-1)[within]


def _values_before(
    update: GroupUpdate, bucket: Sequence[ParamUpdate], within: slice | None, residuals: Residuals
) -> list[dict[str, Tensor]]:
    """Flat copies of everything that the rule will have to compute: by part, for each entry."""
    found = []
    for index, entry in enumerate(bucket):
        if entry.fully_journaled:
            continue
        if PARAM not in entry.journaled:
            found.append((index, PARAM, _part(local(entry.param), within)))
        for key in () if entry.fresh else update.rule.keys:
            value = (entry.state or {}).get(key)
            if isinstance(value, Tensor) and key not in entry.journaled:
                found.append((index, key, _part(local(value), within)))
    before: list[dict[str, Tensor]] = [{} for _ in bucket]
    copies = residuals.copies([value for _, _, value in found])
    for (index, key, _), copy in zip(found, copies, strict=True):
        before[index][key] = copy
    return before


@dataclass(frozen=True, slots=True)
class _Stepped:
    """Parameters, or a range of one, that one call of a rule can take together, after their step.

    Attributes:
        update: their update.
        entries: their records.
        before: for each, by part that the rule computes, flat copies of the values before the step.
        steps: their step counters after the step.
        within: the range; None if the parameters are whole.
    """

    update: GroupUpdate
    entries: Sequence[ParamUpdate]
    before: Sequence[Mapping[str, Tensor]]
    steps: Sequence[float]
    within: slice | None

    @property
    def start(self) -> int:
        """The first element of the range; 0 if the parameters are whole."""
        return self.within.start if self.within else 0

    def residual(self, slice_: ParamSlice, key: str) -> Residual:
        """The residual of one part of a parameter, to be filled."""
        return (self.entries[slice_.index].residual or {})[key]

    def values_before(self, slice_: ParamSlice) -> dict[str, Tensor]:
        """A slice's values before the step, by part."""
        end = slice_.offset + slice_.param.numel()
        return {key: value[slice_.offset : end] for key, value in self.before[slice_.index].items()}

    def lists(self, number: int) -> bool:
        """Whether parameters' residuals in a list of slices are listed, if they are few."""
        return (self.start // slice_elements(self.entries[0].param.device) + number) % _LISTED == 0


def _store(
    update: GroupUpdate,
    bucket: Sequence[ParamUpdate],
    within: slice | None,
    before: Sequence[dict[str, Tensor]],
    residuals: Residuals,
) -> None:
    """Inverts what the step left behind, slice by slice, and stores what is missing."""
    values = {id(entry): value for entry, value in zip(bucket, before, strict=True)}
    begins = within is None or within.start == 0
    for entries in buckets([entry for entry in bucket if not entry.fully_journaled], update.state_keys):
        for entry in entries if begins else ():
            entry.residual = {key: residuals.empty(entry.param, key) for key in values[id(entry)]}
        parts = update.parts(entries)
        if within:
            parts = [part.within(within) for part in parts]
        before_each = [values[id(entry)] for entry in entries]
        stepped = _Stepped(update, entries, before_each, update.steps(entries), within)
        if residuals.compiled and begins:
            _choose_kernels(stepped, parts)
        by_kernel, others = split_by_kernel(entries, parts)
        _store_eagerly(stepped, others)
        for kernel, those in by_kernel.items():
            _store_compiled(stepped, kernel, those, residuals.workspace)


def _choose_kernels(stepped: _Stepped, parts: Sequence[ParamTensors]) -> None:
    """Notes in each entry the kernel that inverts it, for its undo; one for all with the same numbers."""
    update = stepped.update
    for part in parts:
        tensors = update.tensors([part.whole()], stepped.entries, stepped.steps)
        if is_compilable(update.rule, tensors):
            computed = tuple(stepped.before[part.index])
            key = (computed, tensors.steps[0], *tensors.notes[0].items())
            if key not in update.kernels:
                update.kernels[key] = record(update.rule, tensors, update.hyper.values, computed)
            stepped.entries[part.index].kernel = update.kernels[key]


def _store_eagerly(stepped: _Stepped, parts: Sequence[ParamTensors]) -> None:
    """The rule inverts copies."""
    update = stepped.update
    for number, slices in enumerate(sliced(parts, update.rule.elementwise)):
        copies = [_copy(slice_, stepped) for slice_ in slices]
        invert(
            update.rule,
            update.tensors(copies, stepped.entries, stepped.steps),
            update.hyper.values,
            update.wide,
        )
        for slice_ in copies:
            for key, before in stepped.values_before(slice_).items():
                result = (slice_.param if key == PARAM else slice_.state[key]).reshape(-1)
                few = _FEW if key == PARAM and stepped.lists(number) else 0.0
                stepped.residual(slice_, key).store(stepped.start + slice_.offset, before, result, few)


def _store_compiled(
    stepped: _Stepped, kernel: Kernel, parts: Sequence[ParamTensors], workspace: Workspace
) -> None:
    """One pass inverts, subtracts, and marks what a byte cannot hold."""
    for slices in packed([_as_inverted(part, stepped) for part in parts]):
        before = [stepped.values_before(slice_) for slice_ in slices]
        first, size = slices[0], slices[0].param.numel()
        full = size == slice_elements(kernel.numbers.device)
        tried = {PARAM} if full and stepped.lists(first.offset // size) else set()
        # the bytes of a full slice are written where they stay
        rooms = {
            key: stepped.residual(first, key).room(stepped.start + first.offset, first.param)
            for key in kernel.computed
            if full and key not in tried
        }
        workspace.run(kernel, slices, before, rooms)
        at = 0
        for slice_, values in zip(slices, before, strict=True):
            end, offset = at + slice_.param.numel(), stepped.start + slice_.offset
            for key in kernel.computed:
                residual, small = stepped.residual(slice_, key), rooms.get(key)
                if small is None:
                    small = workspace.small[key][at:end]
                    if key in tried and residual.keep_if_few(offset, small, values[key], _FEW):
                        continue
                    small = residual.room(offset, small).copy_(small)
                residual.keep(offset, small, values[key])
            at = end


def _as_inverted(part: ParamTensors, stepped: _Stepped) -> ParamTensors:
    """The tensors that a kernel reads. A journaled parameter already has its value before the step."""
    entry = stepped.entries[part.index]
    if PARAM not in entry.journaled:
        return part
    param = _part(local(entry.snapshots[PARAM].value), stepped.within)
    return ParamTensors(part.index, param, part.grad, part.state)


def _copy(slice_: ParamSlice, stepped: _Stepped) -> ParamSlice:
    """Copies for a rule to work on. A journaled parameter already has its value before the step."""
    param, entry = slice_.param, stepped.entries[slice_.index]
    if PARAM in entry.journaled:
        flat = _part(local(entry.snapshots[PARAM].value), stepped.within).reshape(-1)
        param = flat[slice_.offset : slice_.offset + param.numel()].view(param.shape)
    state = {key: value.clone() for key, value in slice_.state.items()}
    return ParamSlice(slice_.index, param.clone(), slice_.grad, state, slice_.offset)


# Ranges of a large parameter, to which an optimizer is applied one after the other.
#
# A step, the copies before it and the inverse behind it take longer from memory than from a cache. So an
# elementwise optimizer is applied to a range of a cache's size, which is inverted before the next range. A
# range is a parameter of its own to the optimizer, with views of the gradient and of the state.


def can_be_cut(rule: Rule, entry: ParamUpdate) -> bool:
    """Whether ranges of a parameter can be updated, and are worth it: on a CPU, and larger than a slice."""
    param, grad = entry.param, entry.grad
    size = param.numel()
    if param.device.type != "cpu" or size <= slice_elements(param.device):
        return False
    if not rule.elementwise or entry.fresh or entry.fully_journaled or hasattr(param, "_local_tensor"):
        return False
    state = [value for value in (entry.state or {}).values() if isinstance(value, Tensor)]
    if not all(value.is_contiguous() and value.is_floating_point() for value in (param, grad, *state)):
        return False
    return grad.numel() == size and all(value.numel() in (1, size) for value in state)


def ranges_of(entry: ParamUpdate) -> Iterator[slice]:
    """The ranges of a parameter, in order."""
    size, limit = entry.param.numel(), slice_elements(entry.param.device)
    for at in range(0, size, limit):
        yield slice(at, min(at + limit, size))


def counters_of(entry: ParamUpdate) -> dict[str, Tensor]:
    """Copies of the step counter and of other single numbers in a parameter's state, before the step."""
    return {
        key: value.clone()
        for key, value in (entry.state or {}).items()
        if isinstance(value, Tensor) and value.numel() == 1
    }


def step_range(
    optimizer: Optimizer,
    entry: ParamUpdate,
    within: slice,
    counters: dict[str, Tensor],
    step: Callable[[Sequence[Tensor]], None],
) -> None:
    """Steps one range of a parameter. The first one advances the parameter's own counters.

    Args:
        optimizer: the parameter's.
        entry: a parameter that :func:`can_be_cut`.
        within: the range.
        counters: those before the step.
        step: applies the optimizer to some parameters.
    """
    param = _view(entry.param, within)
    param.grad = _view(entry.grad, within)
    first = within.start == 0
    held: dict[str, Any] = {}
    for key, value in (entry.state or {}).items():
        if key in counters:
            held[key] = value if first else counters[key].clone()
        else:
            held[key] = _view(value, within) if isinstance(value, Tensor) else value
    given = dict(held)
    optimizer.state[param] = held
    try:
        step([param])
    finally:
        held = optimizer.state.pop(param)
    for key, value in held.items():
        if isinstance(given.get(key), Tensor) and key not in counters:
            if value is not given[key]:
                given[key].copy_(value)
        elif first:
            optimizer.state[entry.param][key] = value


def _view(tensor: Tensor, within: slice) -> Tensor:
    return tensor.detach().view(-1)[within]
