"""One update of some parameters of a group: what is remembered of it, and how it is taken back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach  # torch's own choice between its kernels

from swift_ft.errors import UndoError
from swift_ft.undo.journal import Hyper, Kept, Rows, Saved
from swift_ft.undo.pieces import Parts, Piece, gathered, local
from swift_ft.undo.registry import touches_rows_only
from swift_ft.undo.residual import Residual
from swift_ft.undo.rule import GRADIENT, PARAM, Rule, Tensors, number

__all__ = ["Entry", "GroupUpdate", "buckets", "inverted"]


_NOTHING: dict[str, Any] = {}
"""Shared by all updates that need no journal or notes: a step must cost little; never written to."""


@dataclass(slots=True)
class Entry:
    """One parameter's update.

    Attributes:
        param: the parameter.
        grad: the gradient that the step used; a reference, never a copy.
        state: the parameter's state before the step, the dictionary copied and the tensors not; None if
            there was no such dictionary.
        fresh: no tensor that the rule knows was in it.
        journaled: the whole update comes from the journal, the rule has nothing to do.
        kept: parts that cannot be inverted.
        journal: values before the step of those parts that existed.
        notes: scalars before the step.
        residual: what the inverse misses, by part.
        versions: torch's counts of in-place changes of parameter and gradient after the step.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Any] | None
    fresh: bool
    journaled: bool
    kept: frozenset[str]
    journal: dict[str, Saved]
    notes: dict[str, Any]
    residual: dict[str, Residual] | None = None
    versions: tuple[int, int] = (0, 0)


@dataclass
class GroupUpdate:
    """An update of parameters of one group, by one call of the optimizer's step.

    Attributes:
        optimizer: the optimizer.
        rule: how its updates are inverted.
        hyper: the group's values as the step used them.
        exact: residuals are stored.
        entries: the parameters' updates, in the group's order.
        gradient_changed: the kernel wrote into the gradients.
    """

    optimizer: Optimizer
    rule: Rule
    hyper: Hyper
    exact: bool
    entries: list[Entry] = field(default_factory=list)
    gradient_changed: bool = False

    @classmethod
    def before(
        cls, optimizer: Optimizer, group: dict[str, Any], params: Iterable[Tensor], rule: Rule, exact: bool
    ) -> GroupUpdate:
        """Remembers what the step will destroy.

        Args:
            optimizer: the optimizer.
            group: a parameter group.
            params: parameters of it that are about to be updated; those without a gradient are left out.
            rule: the optimizer's rule.
            exact: whether residuals will be stored.
        """
        update = cls(optimizer, rule, Hyper(group), exact)
        hyper, keys, entries = update.hyper.values, rule.keys, update.entries
        same_for_all = type(rule).kept_for is Rule.kept_for
        kept = rule.kept(hyper, exact) if same_for_all else frozenset[str]()
        notes_any = bool(rule.small) or type(rule).note is not Rule.note
        may_be_journaled = bool(not rule.shardable or hyper.get("differentiable") or hyper.get("fused"))
        for param in params:
            grad = param.grad
            if grad is None:
                continue
            held = optimizer.state.get(param)
            state: dict[str, Any] | None = None if held is None else dict(held)
            fresh = True
            for key in keys if state else ():
                fresh = fresh and state.get(key) is None  # type: ignore[union-attr]  # there is one
            if not same_for_all:
                kept = rule.kept_for(param, state or {}, hyper, exact)
            notes = rule.note(param, state or {}, hyper) if notes_any else _NOTHING
            journaled = grad.is_sparse or (may_be_journaled and rule.is_journaled(param, hyper))
            entry = Entry(param, grad, state, fresh, journaled, kept, _NOTHING, notes)
            if journaled:
                _keep_all(entry, rule, hyper)
            elif kept:
                _keep_parts(entry)
            entries.append(entry)
        if entries and type(rule).changes_gradient is not Rule.changes_gradient:
            foreach = _uses_foreach(hyper, [entry.param for entry in entries])
            update.gradient_changed = rule.changes_gradient(hyper, foreach)
        return update

    def after(self) -> None:
        """Remembers the state of the parameters' and gradients' counters, once the step is done."""
        for entry in self.entries:
            entry.versions = (entry.param._version, entry.grad._version)

    @property
    def wide(self) -> bool:
        """The kernel computes in float32 whatever the dtype, and rounds once."""
        return bool(self.hyper.values.get("fused"))

    def check(self, entries: Iterable[Entry]) -> None:
        """Refuses if parameters or gradients were changed since.

        Raises:
            UndoError: something was changed.
        """
        for entry in entries:
            if entry.journaled:
                continue
            for name, tensor, version in zip(
                ("parameter", "gradient"), (entry.param, entry.grad), entry.versions, strict=True
            ):
                if tensor._version != version:
                    raise UndoError(
                        f"The {name} of shape {tuple(tensor.shape)} was changed after the step, which "
                        "therefore cannot be taken back: undo before anything else writes to it.",
                        part=name,
                    )

    def undo(self, entries: Sequence[Entry]) -> None:
        """Takes back the updates of some parameters of this group, which is all of them or fewer."""
        computed = [entry for entry in entries if not entry.journaled]
        for entry in computed:  # before the rule, which reads it; the rest comes back after
            if PARAM in entry.journal:
                entry.journal.pop(PARAM).put_back()
        for bucket in buckets(computed, self.state_keys):
            self._invert(bucket)
        for entry in entries:
            self._put_back(entry)

    def parts(self, entries: Sequence[Entry]) -> list[Parts]:
        """What the rule works on, as it is after the step."""
        return [
            Parts(
                index,
                local(entry.param),
                local(entry.grad),
                {key: local(self.optimizer.state[entry.param][key]) for key in self.state_keys(entry)},
            )
            for index, entry in enumerate(entries)
        ]

    def tensors(self, pieces: Sequence[Piece], entries: Sequence[Entry], steps: Sequence[float]) -> Tensors:
        """The pieces as a rule takes them."""
        first = entries[pieces[0].index]
        return Tensors(
            params=[piece.param for piece in pieces],
            grads=[piece.grad for piece in pieces],
            state={key: [piece.state[key] for piece in pieces] for key in pieces[0].state},
            steps=[steps[piece.index] for piece in pieces],
            notes=[self._notes(entries[piece.index]) for piece in pieces],
            fresh=first.fresh,
            kept=first.kept,
            gradient_changed=self.gradient_changed,
            exact=self.exact,
        )

    def steps(self, entries: Sequence[Entry]) -> list[float]:
        """The step counters after the step; one transfer for all that live on a device."""
        counters = [self.optimizer.state.get(entry.param, {}).get("step", 0.0) for entry in entries]
        on_device = [c for c in counters if isinstance(c, Tensor) and c.device.type != "cpu"]
        if len(on_device) == len(counters) and len({c.device for c in on_device}) == 1:
            return [float(value) for value in torch.stack(on_device).tolist()]
        return [number(counter) for counter in counters]

    def _invert(self, entries: Sequence[Entry]) -> None:
        parts, steps = self.parts(entries), self.steps(entries)
        for pieces in gathered(parts, self.rule.elementwise):
            inverted(self.rule, self.tensors(pieces, entries, steps), self.hyper.values, self.wide)
        for part, entry in zip(parts, entries, strict=True):
            for key, residual in (entry.residual or {}).items():
                target = part.param if key == PARAM else part.state[key]
                _apply(residual, target)

    def _put_back(self, entry: Entry) -> None:
        for saved in entry.journal.values():
            saved.put_back()
        if entry.state is None:
            self.optimizer.state.pop(entry.param, None)
            return
        state = self.optimizer.state[entry.param]
        state.clear()
        state.update(entry.state)
        if isinstance(step := state.get("step"), Tensor):
            step.sub_(1)
        for key in self.rule.small:
            if isinstance(state.get(key), Tensor):
                state[key].copy_(entry.notes[key])

    def state_keys(self, entry: Entry) -> tuple[str, ...]:
        """The keys of the state, after the step, that the rule works on."""
        state = self.optimizer.state.get(entry.param, {})
        return tuple(key for key in self.rule.keys if isinstance(state.get(key), Tensor))

    def _notes(self, entry: Entry) -> dict[str, float]:
        notes = {key: number(value) for key, value in entry.notes.items()}
        for key in self.rule.left_behind:
            notes[key] = number(self.optimizer.state[entry.param][key])
        return notes


def inverted(rule: Rule, tensors: Tensors, hyper: Mapping[str, Any], wide: bool) -> None:
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
        kept=tensors.kept,
        gradient_changed=tensors.gradient_changed,
        exact=tensors.exact,
    )
    rule.invert(wider, hyper)
    torch._foreach_copy_(tensors.params, wider.params)
    for key, values in tensors.state.items():
        torch._foreach_copy_(values, wider.state[key])


def _keep_parts(entry: Entry) -> None:
    entry.journal = {}
    for key in entry.kept - {GRADIENT}:
        tensor = entry.param if key == PARAM else (entry.state or {}).get(key)
        if isinstance(tensor, Tensor):
            entry.journal[key] = Kept.of(tensor)


def _keep_all(entry: Entry, rule: Rule, hyper: Mapping[str, Any]) -> None:
    """Journals parameter and state, or those rows that a sparse gradient names."""
    entry.journal = {}
    whole = {PARAM: entry.param}
    whole |= {key: value for key, value in (entry.state or {}).items() if isinstance(value, Tensor)}
    if entry.grad.is_sparse and touches_rows_only(rule, entry.grad, hyper):
        rows = torch.unique(entry.grad._indices()[0])
        for key, value in whole.items():
            if value.shape == entry.param.shape:
                entry.journal[key] = Rows.of(value, rows)
    else:
        scalars = {"step", *rule.small}  # counted back, or noted
        entry.journal.update({key: Kept.of(value) for key, value in whole.items() if key not in scalars})


def buckets(entries: Sequence[Entry], state_keys: Any) -> Iterator[list[Entry]]:
    """Entries that one call of a rule can take together."""
    buckets: dict[Any, list[Entry]] = {}
    for entry in entries:
        kind = (entry.fresh, entry.kept, state_keys(entry), entry.param.device, entry.param.dtype)
        buckets.setdefault((*kind, entry.grad.dtype), []).append(entry)
    yield from buckets.values()


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
    return _default_to_fused_or_foreach(list(params), bool(hyper.get("differentiable")), use_fused=False)[1]
