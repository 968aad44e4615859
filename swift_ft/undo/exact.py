"""Steps that store the residuals of their own inverse, a bucket of parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from swift_ft.undo.residual import Residual
from swift_ft.undo.rules.rule import PARAM
from swift_ft.undo.slices import ParamSlice, local, sliced
from swift_ft.undo.snapshot import size_bytes
from swift_ft.undo.update import GroupUpdate, ParamUpdate, buckets, invert

_ALIGNMENT = 64

_LISTED = 4
"""In every fourth list of slices, residuals of parameters are listed if that is shorter than a byte per
element. It nearly always is, and saves more than the others need for what a byte cannot hold. More often
would take too long."""

__all__ = ["BUCKET_BYTES", "Residuals", "step_with_residuals"]

BUCKET_BYTES = 25 * 2**20
"""Bytes of values before the step that are held at a time; a larger parameter makes its own bucket."""


class Residuals:
    """The memory of residuals and of one bucket, kept from step to step.

    Allocating memory takes several times as long as writing to it.
    """

    def __init__(self) -> None:
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
    for bucket in _chunks(update):
        with torch.no_grad():
            before = _values_before(update, bucket, residuals)
            grads = [entry.grad.detach().clone() for entry in bucket] if changed else []
        step([entry.param for entry in bucket])
        with torch.no_grad():
            for index, grad in enumerate(grads):
                bucket[index].grad.copy_(grad)
            _store(update, bucket, before, residuals)


def _chunks(update: GroupUpdate) -> Iterator[list[ParamUpdate]]:
    chunk: list[ParamUpdate] = []
    total = 0
    for entry in update.entries:
        size = entry.param.numel() * entry.param.element_size() * (1 + len(update.rule.keys))
        if chunk and total + size > BUCKET_BYTES:
            yield chunk
            chunk, total = [], 0
        chunk.append(entry)
        total += size
    if chunk:
        yield chunk


def _values_before(
    update: GroupUpdate, bucket: Sequence[ParamUpdate], residuals: Residuals
) -> list[dict[str, Tensor]]:
    """Flat copies of everything that the rule will have to compute: by part, for each entry."""
    found = []
    for index, entry in enumerate(bucket):
        if entry.fully_journaled:
            continue
        if PARAM not in entry.journaled:
            found.append((index, PARAM, local(entry.param)))
        for key in () if entry.fresh else update.rule.keys:
            value = (entry.state or {}).get(key)
            if isinstance(value, Tensor) and key not in entry.journaled:
                found.append((index, key, local(value)))
    before: list[dict[str, Tensor]] = [{} for _ in bucket]
    copies = residuals.copies([value for _, _, value in found])
    for (index, key, _), copy in zip(found, copies, strict=True):
        before[index][key] = copy
    return before


def _store(
    update: GroupUpdate,
    bucket: Sequence[ParamUpdate],
    before: Sequence[dict[str, Tensor]],
    residuals: Residuals,
) -> None:
    """Inverts copies of what the step left behind, slice by slice, and stores what is missing."""
    values = {id(entry): value for entry, value in zip(bucket, before, strict=True)}
    for entries in buckets([entry for entry in bucket if not entry.fully_journaled], update.state_keys):
        for entry in entries:
            entry.residual = {key: residuals.empty(entry.param, key) for key in values[id(entry)]}
        steps = update.steps(entries)
        for number, slices in enumerate(sliced(update.parts(entries), update.rule.elementwise)):
            copies = [_copy(slice_, entries[slice_.index]) for slice_ in slices]
            invert(update.rule, update.tensors(copies, entries, steps), update.hyper.values, update.wide)
            for slice_ in copies:
                entry = entries[slice_.index]
                for key, residual in (entry.residual or {}).items():
                    result = (slice_.param if key == PARAM else slice_.state[key]).reshape(-1)
                    was = values[id(entry)][key][slice_.offset : slice_.offset + result.numel()]
                    residual.store(
                        slice_.offset, was, result, mostly_zero=key == PARAM and number % _LISTED == 0
                    )


def _copy(slice_: ParamSlice, entry: ParamUpdate) -> ParamSlice:
    """Copies for a rule to work on. A journaled parameter already has its value before the step."""
    param = slice_.param
    if PARAM in entry.journaled:
        flat = local(entry.snapshots[PARAM].value).reshape(-1)
        param = flat[slice_.offset : slice_.offset + param.numel()].view(param.shape)
    state = {key: value.clone() for key, value in slice_.state.items()}
    return ParamSlice(slice_.index, param.clone(), slice_.grad, state, slice_.offset)
