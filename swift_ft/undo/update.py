"""One update of some parameters of a group: its record, and how it is undone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_ft.errors import UndoError
from swift_ft.torch_core.optimizers import picks_foreach
from swift_ft.torch_core.shards import laid_out_as
from swift_ft.torch_core.tensors import all_versions_of, version_of
from swift_ft.undo.compiled import Kernel, invert_compiled
from swift_ft.undo.copies import Copies
from swift_ft.undo.records import ParamUpdate, Record, updates_one_by_one
from swift_ft.undo.residual import Residual
from swift_ft.undo.rules.rule import PARAM, Rule, Tensors, number
from swift_ft.undo.slices import ParamSlice, ParamTensors, local, sliced
from swift_ft.undo.snapshot import Hyper


@dataclass
class GroupUpdate:
    """An update of parameters of one group, by one call of the optimizer's step.

    Attributes:
        optimizer: the optimizer.
        rule: how its updates are inverted.
        hyper: the group's values as the step used them.
        exact: an undo restores every bit.
        copied: all that the step may change was copied; the rule has nothing to do.
        gradient_changed: the kernel wrote into the gradients.
        kernels: compiled inverses, by what differs between parameters; None where there is none.
    """

    optimizer: Optimizer
    rule: Rule
    hyper: Hyper
    exact: bool
    copied: bool = False
    gradient_changed: bool = False
    kernels: dict[object, Kernel | None] = field(default_factory=dict)
    _record: Record | None = None  # until the entries are made of it
    _entries: list[ParamUpdate] = field(default_factory=list)

    @classmethod
    def before(
        cls,
        optimizer: Optimizer,
        group: dict[str, Any],
        params: Iterable[Tensor],
        rule: Rule,
        exact: bool,
        copies: Copies | None = None,
    ) -> GroupUpdate:
        """Records what the step will overwrite.

        Args:
            optimizer: the optimizer.
            group: a parameter group.
            params: parameters of it that are about to be updated; those without a gradient are skipped.
            rule: the optimizer's rule.
            exact: whether an undo has to restore every bit.
            copies: where copies go that take the place of residuals; None if there are to be none.
        """
        update = cls(optimizer, rule, Hyper(group), exact)
        record = _recorded(optimizer, params, rule)
        if not record.params:
            return update
        hyper = update.hyper.values
        if type(rule).changes_gradient is not Rule.changes_gradient:
            update.gradient_changed = rule.changes_gradient(hyper, _uses_foreach(hyper, record.params))
        if copies is not None and not (record.has_sparse or hyper.get("differentiable")):
            update.copied = record.copy(copies, with_gradients=update.gradient_changed)
        entries = None if update.copied else updates_one_by_one(record, rule, hyper, exact)
        if entries is None:
            update._record = record
        else:
            update._entries = entries
        return update

    @property
    def entries(self) -> list[ParamUpdate]:
        """The parameters' updates, in the group's order. A step that nobody undoes makes none, as a rule."""
        if self._record is not None:
            self._entries, self._record = self._record.updates(), None
        return self._entries

    @property
    def params(self) -> list[Tensor]:
        """The parameters that are updated, in the group's order."""
        return [param for param, _ in self.pairs()]

    def pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Each of them with its gradient."""
        if self._record is not None:
            return zip(self._record.params, self._record.grads, strict=True)
        return [(entry.param, entry.grad) for entry in self._entries]

    @property
    def stores_residuals(self) -> bool:
        """Whether the step has to store what the inverse loses."""
        return self.exact and not self.copied and any(True for _ in self.pairs())

    def forget(self, parameters: Collection[Tensor]) -> None:
        """Drops the updates of some parameters."""
        self._entries = [entry for entry in self.entries if entry.param not in parameters]

    def after(self) -> None:
        """Records the version counters of parameters and gradients after the step."""
        if (record := self._record) is not None:
            record.versions = all_versions_of([*record.params, *record.grads])
        for entry in self._entries:
            entry.versions = (version_of(entry.param), version_of(entry.grad))

    @property
    def wide(self) -> bool:
        """The kernel computes in float32 for all dtypes, and rounds once."""
        return bool(self.hyper.values.get("fused"))

    def check(self, entries: Iterable[ParamUpdate]) -> None:
        """Refuses if parameters or gradients were changed after the step.

        Raises:
            UndoError: something was changed.
        """
        for entry in entries:
            if entry.fully_journaled and not self.copied:
                continue
            for name, tensor, version in zip(
                ("parameter", "gradient"), (entry.param, entry.grad), entry.versions, strict=True
            ):
                if version_of(tensor) != version:
                    raise UndoError(
                        f"A {name} of shape {tuple(tensor.shape)} was changed after the step, so the step "
                        "cannot be undone: call undo() before anything else writes to it.",
                        part=name,
                    )

    def undo(self, entries: Sequence[ParamUpdate]) -> None:
        """Undoes the updates of some or all parameters of this group."""
        computed = [entry for entry in entries if not entry.fully_journaled]
        for entry in computed:  # before the rule, which reads it; the other snapshots follow after
            if PARAM in entry.snapshots:
                entry.snapshots.pop(PARAM).restore()
        for bucket in buckets(computed, self.state_keys):
            self._invert(bucket)
        for entry in entries:
            self._restore(entry)

    def parts(self, entries: Sequence[ParamUpdate]) -> list[ParamTensors]:
        """The tensors that the rule works on, as they are after the step."""
        return [
            ParamTensors(
                index,
                local(entry.param),
                local(laid_out_as(entry.grad, entry.param)),
                {key: local(self.optimizer.state[entry.param][key]) for key in self.state_keys(entry)},
            )
            for index, entry in enumerate(entries)
        ]

    def tensors(
        self, slices: Sequence[ParamSlice], entries: Sequence[ParamUpdate], steps: Sequence[float]
    ) -> Tensors:
        """The slices as a rule takes them."""
        first = entries[slices[0].index]
        return Tensors(
            params=[slice_.param for slice_ in slices],
            grads=[slice_.grad for slice_ in slices],
            state={key: [slice_.state[key] for slice_ in slices] for key in slices[0].state},
            steps=[steps[slice_.index] for slice_ in slices],
            notes=[self._notes(entries[slice_.index]) for slice_ in slices],
            fresh=first.fresh,
            journaled=first.journaled,
            gradient_changed=self.gradient_changed,
            exact=self.exact,
        )

    def steps(self, entries: Sequence[ParamUpdate]) -> list[float]:
        """The step counters after the step; one transfer for all that are on a device."""
        counters = [self.optimizer.state.get(entry.param, {}).get("step", 0.0) for entry in entries]
        on_device = [c for c in counters if isinstance(c, Tensor) and c.device.type != "cpu"]
        if len(on_device) == len(counters) and len({c.device for c in on_device}) == 1:
            return [float(value) for value in torch.stack(on_device).tolist()]
        return [number(counter) for counter in counters]

    def _invert(self, entries: Sequence[ParamUpdate]) -> None:
        parts, steps = self.parts(entries), self.steps(entries)
        by_kernel, others = split_by_kernel(entries, parts)
        for kernel, those in by_kernel.items():
            invert_compiled(kernel, those)
        for slices in sliced(others, self.rule.elementwise):
            invert(self.rule, self.tensors(slices, entries, steps), self.hyper.values, self.wide)
        for part, entry in zip(parts, entries, strict=True):
            for key, residual in (entry.residual or {}).items():
                target = part.param if key == PARAM else part.state[key]
                _apply(residual, target)

    def _restore(self, entry: ParamUpdate) -> None:
        for saved in entry.snapshots.values():
            saved.restore()
        if entry.state is None:
            self.optimizer.state.pop(entry.param, None)
            return
        state = self.optimizer.state[entry.param]
        state.clear()
        state.update(entry.state)
        if isinstance(step := state.get("step"), Tensor):
            step.sub_(1)
        for key in self.rule.small:
            if key in entry.notes and isinstance(state.get(key), Tensor):
                state[key].copy_(entry.notes[key])

    def state_keys(self, entry: ParamUpdate) -> tuple[str, ...]:
        """The keys of the state, after the step, that the rule works on."""
        state = self.optimizer.state.get(entry.param, {})
        return tuple(key for key in self.rule.keys if isinstance(state.get(key), Tensor))

    def _notes(self, entry: ParamUpdate) -> dict[str, float]:
        notes = {key: number(value) for key, value in entry.notes.items()}
        for key in self.rule.left_behind:
            notes[key] = number(self.optimizer.state[entry.param][key])
        return notes


def invert(rule: Rule, tensors: Tensors, hyper: Mapping[str, Any], wide: bool) -> None:
    """Inverts in place; in float32 where the kernel computed in that.

    Args:
        rule: the rule.
        tensors: what the update left behind.
        hyper: the group's values as the step used them.
        wide: whether the kernel rounds to the parameter's dtype at its end only.
    """
    if not wide or tensors.params[0].dtype not in (torch.float16, torch.bfloat16):
        rule.invert(tensors, hyper)
        return
    wider = Tensors(
        params=[param.float() for param in tensors.params],
        grads=[grad.float() for grad in tensors.grads],
        state={key: [value.float() for value in values] for key, values in tensors.state.items()},
        steps=tensors.steps,
        notes=tensors.notes,
        fresh=tensors.fresh,
        journaled=tensors.journaled,
        gradient_changed=tensors.gradient_changed,
        exact=tensors.exact,
    )
    rule.invert(wider, hyper)
    torch._foreach_copy_(tensors.params, wider.params)
    for key, values in tensors.state.items():
        torch._foreach_copy_(values, wider.state[key])


def _recorded(optimizer: Optimizer, params: Iterable[Tensor], rule: Rule) -> Record:
    """The parameters with a gradient, and what there is of them before the step."""
    record = Record([], [], [], rule.keys)
    for param in params:
        if (grad := param.grad) is not None:
            held = optimizer.state.get(param)
            record.params.append(param)
            record.grads.append(grad)
            record.states.append(None if held is None else dict(held))
    return record


def buckets(entries: Sequence[ParamUpdate], state_keys: Any) -> Iterator[list[ParamUpdate]]:
    """Entries that one call of a rule can take together."""
    buckets: dict[Any, list[ParamUpdate]] = {}
    for entry in entries:
        kind = (entry.fresh, entry.journaled, state_keys(entry), entry.param.device, entry.param.dtype)
        buckets.setdefault((*kind, entry.grad.dtype), []).append(entry)
    yield from buckets.values()


def split_by_kernel(
    entries: Sequence[ParamUpdate], parts: Sequence[ParamTensors]
) -> tuple[dict[Kernel, list[ParamTensors]], list[ParamTensors]]:
    """Parts with a compiled inverse, by that, and the others."""
    by_kernel: dict[Kernel, list[ParamTensors]] = {}
    others = []
    for part in parts:
        kernel = entries[part.index].kernel
        if kernel is None:
            others.append(part)
        else:
            by_kernel.setdefault(kernel, []).append(part)
    return by_kernel, others


def _apply(residual: Residual, target: Tensor) -> None:
    if target.is_contiguous():
        residual.apply(target.view(-1))
    else:
        flat = target.contiguous().view(-1)
        residual.apply(flat)
        target.copy_(flat.view(target.shape))


def _uses_foreach(hyper: Mapping[str, Any], params: Iterable[Tensor]) -> bool:
    if hyper.get("fused"):
        return False
    if hyper.get("foreach") is not None:
        return bool(hyper["foreach"])
    return picks_foreach(params, differentiable=bool(hyper.get("differentiable")))
