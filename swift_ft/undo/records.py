"""Records of an update, made before it: all that the step overwrites."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from swift_ft.torch_core.tensors import sparse_indices
from swift_ft.undo.compiled import Kernel
from swift_ft.undo.copies import Copies
from swift_ft.undo.residual import Residual
from swift_ft.undo.rules.rule import GRADIENT, PARAM, Rule
from swift_ft.undo.snapshot import AnySnapshot, PartCopy, RowSnapshot, Snapshot

_NOTHING: dict[str, Any] = {}
"""Shared by all updates without snapshots or notes, because a step must cost little; never written to."""


@dataclass(slots=True)
class ParamUpdate:
    """One parameter's update.

    Attributes:
        param: the parameter.
        grad: the gradient that the step used; a reference, never a copy.
        state: the parameter's state before the step, the dictionary copied and the tensors not; None if
            there was no such dictionary.
        fresh: the state held no tensor that the rule knows.
        fully_journaled: all parts have snapshots; the rule has nothing to do.
        journaled: parts that cannot be inverted.
        snapshots: values before the step of the journaled parts that existed.
        notes: scalars before the step.
        residual: the error of the inverse, by part.
        kernel: the compiled inverse that the residual belongs to; None if the rule itself computed it.
        versions: torch's counts of in-place changes of parameter and gradient after the step.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Any] | None
    fresh: bool
    fully_journaled: bool
    journaled: frozenset[str]
    snapshots: dict[str, AnySnapshot]
    notes: dict[str, Any]
    residual: dict[str, Residual] | None = None
    kernel: Kernel | None = None
    versions: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class Record:
    """Parameters of a group that are about to be updated, before anything is noted of each.

    All lists have one item for each parameter.

    Attributes:
        params: the parameters.
        grads: their gradients, by reference.
        states: their states before the step, the dictionaries copied and the tensors not; None where there
            was none.
        keys: tensors of the state that the rule knows.
        copies: of all that :meth:`_changing` names, in its order; None if there are none.
        with_gradients: the kernel writes into the gradients, which are copied as well.
        versions: torch's counts of changes after the step: of all parameters, then of all gradients.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any] | None]
    keys: Sequence[str]
    copies: list[Tensor] | None = None
    with_gradients: bool = False
    versions: list[int] = field(default_factory=list)

    @property
    def has_sparse(self) -> bool:
        """Whether a gradient names some of the rows only."""
        return any(grad.is_sparse for grad in self.grads)

    def copy(self, memory: Copies, *, with_gradients: bool) -> bool:
        """Copy all that the step may change, apart from step counters. False if that is too much."""
        self.with_gradients = with_gradients
        self.copies = memory.take([tensor for _, _, tensor in self._changing()])
        return self.copies is not None

    def is_fresh(self, number: int) -> bool:
        """Whether a parameter's state holds no tensor that the rule knows."""
        state = self.states[number]
        return not state or all(state.get(key) is None for key in self.keys)

    def updates(self) -> list[ParamUpdate]:
        """The same, parameter by parameter: none has notes of its own."""
        copied = self.copies is not None
        snapshots = self._snapshots()
        return [
            ParamUpdate(
                param,
                grad,
                state,
                self.is_fresh(number),
                fully_journaled=copied,
                journaled=frozenset(),
                snapshots=snapshots[number] if copied else _NOTHING,
                notes=_NOTHING,
                versions=self._versions(number),
            )
            for number, (param, grad, state) in enumerate(
                zip(self.params, self.grads, self.states, strict=True)
            )
        ]

    def _versions(self, number: int) -> tuple[int, int]:
        if not self.versions:  # the step was not made yet
            return (0, 0)
        return self.versions[number], self.versions[len(self.params) + number]

    def _changing(self) -> Iterator[tuple[int, str, Tensor]]:
        """All that the step may change: the parameter's number, a name for the part, the tensor."""
        for number, (param, state) in enumerate(zip(self.params, self.states, strict=True)):
            yield number, PARAM, param
            if self.with_gradients:
                yield number, GRADIENT, self.grads[number]
            for key, value in (state or {}).items():
                if key != "step" and isinstance(value, Tensor):  # that is counted back
                    yield number, f"state.{key}", value

    def _snapshots(self) -> list[dict[str, AnySnapshot]]:
        found: list[dict[str, AnySnapshot]] = [{} for _ in self.params]
        if self.copies is not None:
            for (number, name, tensor), copy in zip(self._changing(), self.copies, strict=True):
                found[number][name] = PartCopy(tensor, copy)
        return found


def updates_one_by_one(
    record: Record, rule: Rule, hyper: Mapping[str, Any], exact: bool
) -> list[ParamUpdate] | None:
    """Record what differs between parameters, or cannot be inverted.

    Args:
        record: the parameters.
        rule: the optimizer's.
        hyper: the group's values.
        exact: whether residuals will be stored.

    Returns:
        The updates; None where there is nothing to note but what the record holds already.
    """
    same_for_all = type(rule).journaled_for is Rule.journaled_for
    journaled = rule.journaled(hyper, exact) if same_for_all else frozenset[str]()
    notes_any = bool(rule.small) or type(rule).note is not Rule.note
    fully = _fully_journaled(record, rule, hyper)
    if same_for_all and not journaled and not notes_any and not any(fully):
        return None
    updates = []
    for number, (param, grad, state) in enumerate(
        zip(record.params, record.grads, record.states, strict=True)
    ):
        if not same_for_all:
            journaled = rule.journaled_for(param, state or {}, hyper, exact)
        notes = rule.note(param, state or {}, hyper) if notes_any else _NOTHING
        update = ParamUpdate(
            param, grad, state, record.is_fresh(number), fully[number], journaled, _NOTHING, notes
        )
        if fully[number]:
            _snapshot_all(update, rule, hyper)
        elif journaled:
            _snapshot_parts(update)
        updates.append(update)
    return updates


def _fully_journaled(record: Record, rule: Rule, hyper: Mapping[str, Any]) -> list[bool]:
    """Of each parameter, whether no formula describes its update."""
    own = type(rule).is_fully_journaled is not Rule.is_fully_journaled
    wrong_kernels = bool(hyper.get("fused")) and (own or bool(rule.unreliable_kernels))
    if not rule.shardable or hyper.get("differentiable") or wrong_kernels:
        return [
            grad.is_sparse or rule.is_fully_journaled(param, hyper)
            for param, grad in zip(record.params, record.grads, strict=True)
        ]
    return [grad.is_sparse for grad in record.grads]


def _snapshot_parts(entry: ParamUpdate) -> None:
    entry.snapshots = {}
    for key in entry.journaled - {GRADIENT}:
        tensor = entry.param if key == PARAM else (entry.state or {}).get(key)
        if isinstance(tensor, Tensor):
            entry.snapshots[key] = Snapshot.of(tensor)


def _snapshot_all(entry: ParamUpdate, rule: Rule, hyper: Mapping[str, Any]) -> None:
    """Copies parameter and state, or only the rows that a sparse gradient names."""
    entry.snapshots = {}
    whole = {PARAM: entry.param}
    whole |= {key: value for key, value in (entry.state or {}).items() if isinstance(value, Tensor)}
    if _names_rows(entry.grad) and rule.touches_rows_only(hyper):
        rows = torch.unique(sparse_indices(entry.grad)[0])
        for key, value in whole.items():
            if value.shape == entry.param.shape:
                entry.snapshots[key] = RowSnapshot.of(value, rows)
    else:
        scalars = {"step", *rule.small}  # counted back, or noted
        entry.snapshots.update(
            {key: Snapshot.of(value) for key, value in whole.items() if key not in scalars}
        )


def _names_rows(grad: Tensor) -> bool:
    """Whether a gradient is sparse in its rows, and in nothing else."""
    return grad.layout is torch.sparse_coo and grad.sparse_dim() == 1
