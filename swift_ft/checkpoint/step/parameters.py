"""Finds the parameters, and what optimizers keep of them, that change outside of an optimizer's step.

An optimizer's own update is undone (`undo/`), or comes after the last message. Of what changes a parameter
elsewhere nothing is known: a momentum encoder in ``forward``, weight noise, the two passes of SAM, a clamp
after ``optimizer.step()``. So all parameters have a fingerprint at the begin of a step, before an update that
can be undone and after it, and what optimizers keep of them is noted by its counts of changes. One that
changes outside of an optimizer's step is copied at the beginning of each step from then on. Where a loss
comes first, the fingerprints say so, and the state counts as one that cannot be put back.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from swift_ft.checkpoint.state_digest import tensor_digests
from swift_ft.checkpoint.step.around_updates import AroundUpdates
from swift_ft.checkpoint.step.optimizer_state import OptimizerState
from swift_ft.checkpoint.step.parameter_copies import Kind, ParameterCopies, WholeCopies, owners_of
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.optim import UndoableOptimizer
from swift_ft.torch_core.fingerprints import Fingerprint, Sampler
from swift_ft.torch_core.optimizers import parameters_of

_OFTEN = 16
"""Steps: what changes twice within them, where no close look sees it, does so again and again."""

_logger = logging.getLogger(__name__)


class ParameterWatch:
    """Finds the parameters that change outside of optimizers.

    Args:
        state: what the session protects.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._sampler = Sampler()
        self._kinds: dict[torch.Tensor, Kind] = {}
        self._copied: dict[torch.Tensor, Kind] = {}  # as this step began
        self._uncopied: set[torch.Tensor] = set()  # found in this step to change, and not copied as it began
        self._states = OptimizerState()
        self._states_uncopied: set[torch.Tensor] = set()  # parameters, as above
        self._begun = 0  # steps
        self._changed_between: dict[torch.Tensor, int] = {}  # the last step before which state changed
        self._changed_within: dict[torch.Tensor, int] = {}  # the last step in which a parameter changed
        self._complete = False  # this step
        self._lost: set[torch.Tensor] = set()  # of the step before: no undo of it would lead back
        self._before: AroundUpdates | None = None  # of that one
        self._copied_before: dict[torch.Tensor, Kind] = {}  # as it began
        self._between: Fingerprint | None = None  # after it
        self._follows = False  # nobody but the script has changed anything since the last step
        self._expected: Fingerprint | None = None
        self._digests: dict[str, int] | None = None  # of all bits, in a step that is looked at closely
        self._stepped: set[int] = set()  # optimizers that have stepped in this step, by id()
        self._windows: dict[UndoableOptimizer, int] = {}  # opened before this step
        self._samplers: dict[UndoableOptimizer, Sampler] = {}
        self._around: AroundUpdates | None = None
        self._named: Mapping[str, torch.Tensor] | None = None
        self._names: dict[torch.Tensor, str] = {}
        self._positions: dict[int, int] = {}  # of a parameter among the names, by id()

    def begin(
        self,
        named: Mapping[str, torch.Tensor],
        large: Mapping[str, torch.Tensor],
        *,
        closely: bool,
        whole: Iterable[Optimizer] | None = None,
    ) -> ParameterCopies:
        """A step begins.

        Args:
            named: all parameters, by name: the same mapping as long as these are the same.
            large: other tensors that are too large to copy without need.
            closely: look at all bits, and at each optimizer's step. Otherwise an interruption looks at a
            sample.
            whole: copy all of them, and all that the state's optimizers and these have and keep.
        """
        self._expected, self._digests = None, None  # nothing of an earlier step stays alive meanwhile
        if complete := self._complete:  # else one is repeated, and the one before it is the same as before
            self._lost = self._uncopied | self._states_uncopied
            self._before, self._copied_before = self._around, self._copied
        self._states_uncopied = set()
        self._around, self._complete = None, False
        undoable = (o for o in self._state.optimizers.values() if isinstance(o, UndoableOptimizer))
        self._windows = {optimizer: optimizer.windows_opened for optimizer in undoable}
        self._samplers = {optimizer: self._samplers.get(optimizer, Sampler()) for optimizer in self._windows}
        if named is not self._named or large or len(self._names) > len(named):
            self._named = named
            self._names = {tensor: name for name, tensor in (*named.items(), *large.items())}
            self._positions = {id(tensor): position for position, tensor in enumerate(self._names)}
            self._kinds = {tensor: kind for tensor, kind in self._kinds.items() if tensor in self._names}
            self._changed_between = {p: step for p, step in self._changed_between.items() if p in self._names}
            self._changed_within = {p: step for p, step in self._changed_within.items() if p in self._names}
        for optimizer in self._state.optimizers.values():
            changed = self._states.note(optimizer)
            if self._follows:
                self._lost |= {p for p in changed if self._copied.get(p) != Kind.AFTER}
                self._note(self._changing_often(changed, self._changed_between), Kind.AFTER)
        self._begun += 1
        self._follows = False
        self._stepped.clear()
        self._around = AroundUpdates(self._expect([*self._names], closely=closely))
        if complete:
            self._between = self._expected
        self._uncopied = set()
        if whole is not None:
            optimizers = dict.fromkeys((*self._state.optimizers.values(), *whole))
            held = (parameter for one in optimizers for parameter in parameters_of(one))
            self._copied = dict.fromkeys((*self._names, *held), Kind.AFTER)
            return WholeCopies(self._copied, optimizers)
        self._copied = {**self._kinds}
        return ParameterCopies(self._copied, owners_of(self._state.parameters) if self._copied else {})

    def look(self) -> None:
        """In the middle of a step: note what has changed.

        It is a close look in a step that is looked at closely. Else it is of what wait-free optimizers are
        about to update.
        """
        if self._expected is not None and self._digests is not None:
            tagged = self.updated()  # of a wait-free optimizer, before its step
            self._note(tensor for tensor in self._differing() if tensor not in tagged)
            self._expect(self._expected.tensors, closely=True)
            return
        for optimizer in self._windows:
            if optimizer.wait_free:
                self._look_before(optimizer, parameters_of(optimizer))

    def before_update(self, optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer is about to step, which has these parameters."""
        self.look()
        self._look_before(optimizer, parameters)
        if changed := {*self._states.note(optimizer)}:
            changed -= self.updated()  # by a wait-free one, as far as it has
            self._states_uncopied |= {p for p in changed if self._copied.get(p) != Kind.AFTER}
            self._note(changed, Kind.AFTER)
        self._stepped.add(id(optimizer))

    def after_update(self, optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer has stepped, which has these parameters: what it holds has changed as it should."""
        self._states.renew(optimizer)
        if self._around is not None:
            held = self._of_modules(parameters)
            self._around.updated.update(map(id, held))
            if isinstance(optimizer, UndoableOptimizer) and optimizer in self._samplers:
                # An undo begins from these values. A write through `.data` moves no count that it could see.
                self._around.left.pop(optimizer, None)
                self._around.left[optimizer] = self._samplers[optimizer].take(held)
        if self._expected is not None and self._digests is not None:
            self._expect(self._expected.tensors, closely=True)

    def updated(self) -> set[torch.Tensor]:
        """The parameters that this step's updates have changed, and that can be undone."""
        return {parameter for parameters in self.updated_by().values() for parameter in parameters}

    def updated_by(self) -> dict[UndoableOptimizer, tuple[torch.Tensor, ...]]:
        """As :meth:`updated`, by optimizer."""
        return {
            optimizer: optimizer.updated
            for optimizer, opened in self._windows.items()
            if optimizer.windows_opened != opened
        }

    def unaccounted(self) -> list[str]:
        """Names of the parameters that an interrupted step has changed, and that nothing puts back."""
        if self._expected is None or self._around is None:
            return []
        updated = self.updated()
        found = {tensor for tensor in self._differing() if tensor not in updated | self._copied.keys()}
        found |= self._without_copy(self._around.changed_before(), Kind.BEFORE, self._copied)
        found |= self._without_copy(self._around.changed_after(), Kind.AFTER, self._copied) & updated
        found |= self._uncopied
        names = [name for tensor, name in self._names.items() if tensor in found]
        states = self._states_uncopied | {*self._states_changed(updated)}
        return names + [f"an optimizer's state of {name}" for name in self._in_words(states)]

    def lost(self) -> list[str]:
        """As :meth:`unaccounted`, of the step before: no undo of its updates leads to where it began."""
        lost = {*self._lost}
        if self._before is not None:
            copied = self._copied_before
            lost |= self._without_copy(self._before.changed_before(), Kind.BEFORE, copied)
            lost |= self._without_copy(self._before.changed_after(self._between), Kind.AFTER, copied)
        return self._in_words(lost)

    def _of_modules(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of an optimizer's parameters that a module has."""
        positions = self._positions
        return [p for p in parameters if id(p) in positions]

    def _look_before(self, optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """See what has changed an optimizer's parameters before its update, except in a close look."""
        around = self._around
        if around is None or self._digests is not None:
            return
        opened = self._windows.get(optimizer) if isinstance(optimizer, UndoableOptimizer) else None
        if isinstance(optimizer, UndoableOptimizer) and optimizer.windows_opened != opened:
            around.updated.update(map(id, optimizer.updated))  # a wait-free one has
        held = [p for p in self._of_modules(parameters) if id(p) not in around.updated]
        moved = around.begun.moved([self._positions[id(p)] for p in held])
        self._note_rare([around.begun.tensors[position] for position in moved], Kind.BEFORE)
        if isinstance(optimizer, UndoableOptimizer) and optimizer.windows_opened == opened:
            # A write through `.data` shows in elements, which are compared after a loss: no step waits.
            around.found[optimizer] = self._samplers[optimizer].take(held)

    def _note_rare(self, changed: Collection[torch.Tensor], kind: Kind) -> None:
        """Note parameters that were found to change where no close look sees it."""
        if changed := self._without_copy(changed, kind, self._copied):
            self._note(self._changing_often(changed, self._changed_within))

    @staticmethod
    def _without_copy(
        tensors: Iterable[torch.Tensor], kind: Kind, copied: Mapping[torch.Tensor, Kind]
    ) -> set[torch.Tensor]:
        return {tensor for tensor in tensors if copied.get(tensor, 0) < kind}

    def _changing_often(
        self, changed: Iterable[torch.Tensor], last: dict[torch.Tensor, int]
    ) -> list[torch.Tensor]:
        """Those that have changed a few steps ago, too.

        A restart at an epoch's begin costs one step its way back. Copies would cost each step from then on.

        Args:
            changed: in this step, or just before it.
            last: the step in which, or before which, each has last done so.
        """
        often = []
        for tensor in changed:
            before = last.get(tensor)
            if before is not None and 0 < self._begun - before <= _OFTEN:  # one step may be looked at twice
                often.append(tensor)
            last[tensor] = self._begun
        return often

    def _in_words(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        return sorted(self._names.get(tensor, "a parameter that no module has") for tensor in tensors)

    def _states_changed(self, updated: Collection[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Parameters whose state has changed since it was noted last, and of which there is no copy."""
        for optimizer, changed in self._states.changed():
            by_itself = updated if id(optimizer) not in self._stepped else ()  # a wait-free one
            yield from (
                tensor
                for tensor in changed
                if tensor not in by_itself and self._copied.get(tensor) != Kind.AFTER
            )

    def completed(self) -> None:
        """A step is complete: what has changed outside of optimizers is copied from the next one on."""
        if self._expected is None or self._around is None:
            return
        self._follows = self._complete = True
        if self._digests is not None:
            self._note(self._differing())
            return
        # No element is read: that would wait for a device in each step.
        self._note_rare(self._around.moved_after(), Kind.AFTER)
        updated = self._around.updated
        if others := [position for one, position in self._positions.items() if one not in updated]:
            self._note(self._expected.tensors[position] for position in self._expected.moved(others))

    def may_be_given(self) -> None:
        """From now on the state may be put in place by others, until the next step begins."""
        self._follows = False

    def forget(self) -> None:
        """The tensors are others from now on."""
        self._expected, self._digests, self._named = None, None, None
        self._follows = False
        self._kinds.clear()
        self._copied = {}
        self._uncopied, self._states_uncopied, self._lost = set(), set(), set()
        self._changed_between.clear()
        self._changed_within.clear()
        self._states.forget()
        self._around = self._before = self._between = None
        self._complete = False

    def _expect(self, tensors: Sequence[torch.Tensor], *, closely: bool) -> Fingerprint:
        self._expected = self._sampler.take(tensors)
        self._digests = self._all_bits(tensors) if closely else None
        return self._expected

    def _differing(self) -> list[torch.Tensor]:
        assert self._expected is not None
        tensors = self._expected.tensors
        found = {*self._sampler.take(tensors).differing(self._expected)}
        if self._digests is not None:
            now = self._all_bits(tensors)
            found |= {int(index) for index, digest in now.items() if self._digests[index] != digest}
        return [tensors[index] for index in sorted(found)]

    def _note(self, tensors: Iterable[torch.Tensor], found_as: Kind | None = None) -> None:
        """Copy parameters as each step begins, from the next one on.

        Args:
            tensors: which ones. Those that no module has are left out.
            found_as: the kind; None if it depends on whether their optimizer has stepped.
        """
        owners: dict[torch.Tensor, list[Optimizer]] | None = None
        found: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor not in self._names:
                continue
            owners = owners or owners_of(self._state.parameters)
            stepped = any(id(owner) in self._stepped for owner in owners.get(tensor, ()))
            kind = found_as or (Kind.AFTER if stepped else Kind.BEFORE)
            if kind > self._copied.get(tensor, 0) and found_as is None:
                self._uncopied.add(tensor)
            if kind > self._kinds.get(tensor, 0):
                if tensor not in self._kinds:
                    found.append(tensor)
                self._kinds[tensor] = kind
        self._say_copied(found, "" if found_as is None else "an optimizer's state of ")

    def _say_copied(self, found: Iterable[torch.Tensor], of_state: str) -> None:
        """One line for each part of the state: averaged weights have as many tensors as the model."""
        parts: dict[str, list[torch.Tensor]] = {}
        for tensor in found:
            parts.setdefault(self._names[tensor].partition(".")[0], []).append(tensor)
        for part, tensors in parts.items():
            names = [self._names[tensor] for tensor in tensors]
            if len(names) > 1:
                words = f"{len(names)} tensors of {part}, such as {names[0]}, change", "they are"
            else:
                words = f"{names[0]} changes", "it is"
            _logger.info(
                "%s%s outside of an optimizer's step: %s copied as each step begins (%.2f MB)",
                of_state,
                *words,
                sum(tensor.nbytes for tensor in tensors) / 1e6,
                extra={"event": "parameter_copied", "parameters": names},
            )

    @staticmethod
    def _all_bits(tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        return tensor_digests({str(index): tensor for index, tensor in enumerate(tensors)})
