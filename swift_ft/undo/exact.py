"""Steps that store the residuals of their own inverse, a bucket of parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from swift_ft.undo.journal import size_bytes
from swift_ft.undo.pieces import Piece, gathered, local
from swift_ft.undo.residual import Residual
from swift_ft.undo.rule import PARAM
from swift_ft.undo.update import Entry, GroupUpdate, buckets, inverted

_ALIGNMENT = 64

_LISTED = 4
"""One in so many lists of pieces looks whether a list of its parameters' residuals is shorter than a byte
per element. It nearly always is, and makes up for what the others' bytes cannot hold; but it takes time."""

__all__ = ["BUCKET_BYTES", "Residuals", "stepped"]

BUCKET_BYTES = 25 * 2**20
"""Bytes of values before the step that are held at a time; a larger parameter makes its own bucket."""


class Residuals:
    """The memory of residuals and of one bucket, kept from step to step.

    Fresh memory costs several times what writing to it costs.
    """

    def __init__(self) -> None:
        self._all: dict[tuple[int, str], Residual] = {}
        self._bucket = torch.empty(0, dtype=torch.uint8)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Flat copies of tensors of one device, good until the next call."""
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


def stepped(update: GroupUpdate, step: Callable[[Sequence[Tensor]], None], residuals: Residuals) -> None:
    """Steps all parameters of an update and stores their residuals.

    Args:
        update: the update, remembered and not made yet.
        step: applies the optimizer to some of the parameters.
        residuals: where the residuals' memory comes from.
    """
    changed, update.gradient_changed = update.gradient_changed, False  # it is undone at once
    for bucket in _chunks(update):
        with torch.no_grad():
            before = _values_before(update, bucket, residuals)
            grads = [entry.grad.detach().clone() for entry in bucket] if changed else []
        step([entry.param for entry in bucket])
        with torch.no_grad():
            for index, grad in enumerate(grads):
                bucket[index].grad.copy_(grad)
            _store(update, bucket, before, residuals)


def _chunks(update: GroupUpdate) -> Iterator[list[Entry]]:
    chunk: list[Entry] = []
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
    update: GroupUpdate, bucket: Sequence[Entry], residuals: Residuals
) -> list[dict[str, Tensor]]:
    """Flat copies of all that the rule will have to compute, by part, for each entry."""
    found = []
    for index, entry in enumerate(bucket):
        if entry.journaled:
            continue
        if PARAM not in entry.kept:
            found.append((index, PARAM, local(entry.param)))
        for key in () if entry.fresh else update.rule.keys:
            value = (entry.state or {}).get(key)
            if isinstance(value, Tensor) and key not in entry.kept:
                found.append((index, key, local(value)))
    before: list[dict[str, Tensor]] = [{} for _ in bucket]
    copies = residuals.copies([value for _, _, value in found])
    for (index, key, _), copy in zip(found, copies, strict=True):
        before[index][key] = copy
    return before


def _store(
    update: GroupUpdate, bucket: Sequence[Entry], before: Sequence[dict[str, Tensor]], residuals: Residuals
) -> None:
    """Inverts copies of what the step left behind, piece by piece, and stores what is missing."""
    values = {id(entry): value for entry, value in zip(bucket, before, strict=True)}
    for entries in buckets([entry for entry in bucket if not entry.journaled], update.state_keys):
        for entry in entries:
            entry.residual = {key: residuals.empty(entry.param, key) for key in values[id(entry)]}
        steps = update.steps(entries)
        for number, pieces in enumerate(gathered(update.parts(entries), update.rule.elementwise)):
            copies = [_copy(piece, entries[piece.index]) for piece in pieces]
            inverted(update.rule, update.tensors(copies, entries, steps), update.hyper.values, update.wide)
            for piece in copies:
                entry = entries[piece.index]
                for key, residual in (entry.residual or {}).items():
                    result = (piece.param if key == PARAM else piece.state[key]).reshape(-1)
                    was = values[id(entry)][key][piece.offset : piece.offset + result.numel()]
                    residual.store(
                        piece.offset, was, result, mostly_zero=key == PARAM and number % _LISTED == 0
                    )


def _copy(piece: Piece, entry: Entry) -> Piece:
    """Copies for a rule to work on; a parameter that is journaled has its value before the step already."""
    param = piece.param
    if PARAM in entry.kept:
        flat = local(entry.journal[PARAM].value).reshape(-1)
        param = flat[piece.offset : piece.offset + param.numel()].view(param.shape)
    state = {key: value.clone() for key, value in piece.state.items()}
    return Piece(piece.index, param.clone(), piece.grad, state, piece.offset)
