"""The rollback of an interrupted step: puts back everything that the step may have changed.

Large tensors are not copied: parameters and optimizer state change in ``optimizer.step()``, after the last
message, and an undo takes that back. All else is noted at the beginning of a step and put back: random state,
schedulers, rates and groups of optimizers, module buffers, variables of the script, and the parameters that
change outside of an optimizer's step. Between two steps gradients are zero, or zeroed first of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from swift_ft.checkpoint.stale_gradients import NotedGradients
from swift_ft.checkpoint.state_digest import listed
from swift_ft.checkpoint.step.carried import CarriedVariables
from swift_ft.checkpoint.step.carried_gradients import CarriedGradients
from swift_ft.checkpoint.step.hyper_parameters import HyperParameters
from swift_ft.checkpoint.step.nameless import NamelessValues
from swift_ft.checkpoint.step.noted import NotedVariables, in_words
from swift_ft.checkpoint.step.objects_of_steps import ObjectsOfSteps
from swift_ft.checkpoint.step.outside import Outside
from swift_ft.checkpoint.step.parameter_copies import ParameterCopies
from swift_ft.checkpoint.step.parameters import ParameterWatch
from swift_ft.checkpoint.step.rate_functions import RateFunctions
from swift_ft.checkpoint.step.script import ScriptVariables
from swift_ft.checkpoint.step.script_hooks import NotedHooks, ScriptHooks
from swift_ft.checkpoint.step.small_parts import LoadedParts
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import RecoveryError
from swift_ft.optim import UndoableOptimizer
from swift_ft.torch_core.buffers import BufferCopies
from swift_ft.torch_core.global_modes import GlobalModes
from swift_ft.torch_core.module_hooks import OwnHook
from swift_ft.torch_core.optimizers import parameters_of
from swift_ft.torch_core.scalers import Stages, put_stages, stages_of
from swift_ft.torch_core.tensors import same_values

_FIRST_STEPS = 3


class CheckStep(StrEnum):
    """In which steps all bits of all parameters are compared, to find what a step changes and where."""

    ALWAYS = "always"
    """In each step."""
    FIRST = "first"
    """In the first steps of a process, and in its 16th, 32nd, 64th and so on; else a sample after a loss."""
    NEVER = "never"
    """In none: only a sample after a loss."""


@dataclass
class _Moment:
    """All that is noted at the beginning of a step."""

    iteration: int
    modes: GlobalModes
    gradients: NotedGradients
    small: dict[str, Any]
    scalers: list[tuple[GradScaler, Stages]]
    groups: HyperParameters
    buffers: BufferCopies
    variables: NotedVariables
    hooks: NotedHooks
    parameters: ParameterCopies
    uncopied: Sequence[str] = ()
    """Values of the script that the complete step has changed without a copy, in words."""


class Rollback:
    """Notes the state at the beginning of a step, and puts it back.

    Args:
        state: what the session protects.
        check: in which steps all bits of parameters are compared.

    Attributes:
        carried: the script's variables that have changed since the session's start.
        whole: the running step has copies of all parameters and of the optimizers' state.
    """

    def __init__(self, state: TrainingState, check: CheckStep = CheckStep.FIRST) -> None:
        self._state = state
        self._check = check
        self.whole = False
        self._now: _Moment | None = None
        self._previous: _Moment | None = None
        self._after: BufferCopies | None = None
        self._undone_to: _Moment | None = None  # where updates are about to be undone to
        self._updated: set[str] = set()
        self._steps = 0
        self._parameters = ParameterWatch(state)
        self._variables = ScriptVariables(state)
        self._outside = Outside(self._variables)
        self._objects = ObjectsOfSteps(self._variables)
        self._nameless = NamelessValues(self._variables)
        self.carried = CarriedVariables(self._variables, self._outside)
        self._gradients = CarriedGradients()
        self._script_hooks = ScriptHooks(state)
        self._rate_functions = RateFunctions(state)
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """The session starts: from now on, see each optimizer's step, and which variables change."""
        self._variables.look()
        self.carried.remember()
        self._state.carried = self.carried
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        for module in self._state.modules.values():
            self._hooks.append(module.register_forward_pre_hook(OwnHook(self._before_forward)))

    def close(self) -> None:
        """See them no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def variables(self) -> ScriptVariables:
        """Of the script."""
        return self._variables

    def note_variables(self) -> Callable[[], None]:
        """Note the script's variables, in the middle of a step. What this returns puts them back."""
        return self._variables.note(()).put_back

    def note_variables_and_flags(self) -> NotedVariables:
        """Between two steps: also which parameters require gradients."""
        return self._variables.note(self._state.named_parameters().values())

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within the block, the script's code computes for another worker. Afterwards all is as it was.

        Between two steps. The host's random state and the values of parameters are the caller's.
        """
        before = self._now.buffers if self._now is not None else None
        variables, small, modes = self._variables.note(()), self._state.snapshot()["parts"], GlobalModes()
        # A criterion may be in no state.
        modules = dict.fromkeys([*self._state.tree.modules(), *(one for _, one in self._variables.modules())])
        buffers = BufferCopies(modules, before)
        parameters = [one for module in modules for one in module.parameters(recurse=False)]
        kept = [(one, one.requires_grad, one.grad) for one in parameters]
        for parameter in parameters:
            parameter.grad = None  # so that nothing is added to the script's own
        try:
            yield
        finally:
            modes.put_back()
            for parameter, flag, gradient in kept:
                parameter.requires_grad_(flag).grad = gradient
            buffers.restore()
            if not same_values(self._state.snapshot()["parts"], small, incomparable=True):
                self._state.restore_parts(small)
            loaded = LoadedParts(self._state)
            variables.put_back()
            loaded.put_right()

    def begin(self, iteration: int, *, replayed: bool = False, whole: bool = False) -> None:
        """The step of an iteration begins.

        Args:
            iteration: which one.
            replayed: its gradients are added up in another way, in part by other workers.
            whole: copy all parameters, all that optimizers keep, and what else is known to change, however
                large, so that the complete step can be put back.

        Raises:
            IncompleteStateError: a module has changed that is not in the state.
            UnsupportedError: a step has registered or removed hooks, or given a scheduler more functions.
        """
        self.whole = whole
        if self._now is not None and iteration == self._now.iteration + 1:
            self._previous = self._now
        elif self._now is None or iteration != self._now.iteration:
            self._previous = None  # a repeated iteration still has the one before it
        before = self._now.buffers if self._now is not None else None
        self._now = self._undone_to = None  # its copies of parameters are not needed while new ones are made
        self._after = None
        self._updated.clear()
        self._steps += 1
        closely = self._looks_closely()
        modules, named = self._state.tree.content()
        if whole or closely or self._steps <= _FIRST_STEPS:
            self._variables.look()
        if closely or self._steps <= _FIRST_STEPS:
            self._outside.check()
        if self._steps <= _FIRST_STEPS:
            self._objects.check()
            self._nameless.check()
        if self._steps == 1:
            self.carried.steps_begin()
            self._state.in_run = True
        self._state.of_earlier_run = False  # until a state arrives, only what is of this run is put back
        self._rate_functions.check()
        self._gradients.begin({} if replayed else named, closely=closely)
        # One within another one is not in the state where that saves both.
        every_optimizer = [*self._variables.optimizers()] if whole else None
        variables = self._variables.note(named.values(), whole=whole, large=whole)
        self._now = _Moment(
            iteration,
            GlobalModes(),
            NotedGradients([*named.values(), *self._variables.protected.in_no_module]),
            self._state.snapshot(plain=False),
            [(one, stages_of(one)) for one in self._state.small.values() if isinstance(one, GradScaler)],
            HyperParameters(self._state.optimizers.values()),
            BufferCopies(modules, before),
            variables,
            self._script_hooks.note(named),
            self._parameters.begin(named, variables.large, closely=closely, whole=every_optimizer),
        )

    def completed(self) -> None:
        """The step is complete."""
        if self._now is not None and self.whole:  # now, since the next one may change such a value as well
            self._now.uncopied = self._now.variables.unaccounted()
        self._parameters.completed()
        self._script_hooks.completed()

    def may_be_given(self) -> None:
        """A recovery goes on: if the state is put in place, it is not the script that changes it."""
        self._parameters.may_be_given()

    def forget(self) -> None:
        """The tensors of the state are others from now on: no step before can be rolled back any more."""
        self._now = self._previous = self._after = self._undone_to = None
        self._parameters.forget()
        self._gradients.forget()
        self._script_hooks.forget()

    def uncopied(self) -> list[str]:
        """Values that a :attr:`whole` step has changed without a copy, in words: the next one has copies."""
        found = self._now.variables.changed_uncopied() if self._now is not None else []
        self._variables.changing.add(found)
        return [*map(in_words, found)]

    def dirty(self) -> str | None:
        """Why the interrupted step can neither be repeated nor counted as done; None if it can."""
        if not self.whole and (reason := self._beyond_undo()):
            return reason
        if self._now is not None and (changed := self._now.variables.unaccounted()):
            return (
                f"the step has changed {listed(changed)}, which the script keeps, in place for the first "
                "time, so there is no copy yet"
            )
        return None

    def _beyond_undo(self) -> str | None:
        """Why no plan can undo this step, and no copy helps."""
        if self._updated:
            names = ", ".join(sorted(self._updated))
            return (
                f"communication failed after {names}.step() in the body of the step; "
                "keep communication before the optimizer's step"
            )
        # Groups go back first, and then lack what the step has updated.
        for optimizer, updated in self._parameters.updated_by().items():
            if self._now is not None and self._now.groups.lacks(optimizer, updated):
                return (
                    f"the step has given the {type(optimizer).__name__} other parameters and updated them; "
                    "change an optimizer's groups after its step()"
                )
        if changed := self._parameters.unaccounted():
            return (
                f"the step has changed {listed(changed)} outside of an optimizer's step for the first time, "
                "so there is no copy yet"
            )
        return None

    def back(self) -> None:
        """Roll back to the beginning of the step."""
        self._back(undo_follows=False)

    def _back(self, *, undo_follows: bool) -> None:
        assert self._now is not None
        updated = self._parameters.updated()
        self._now.gradients.put_back()
        self._after = self._copies(before=self._now.buffers)
        self._now.buffers.restore()
        self._now.parameters.put_back(updated, undo_follows=undo_follows)
        self._restore(self._now)

    def back_to(self, iteration: int) -> None:
        """Roll back to the beginning of the last completed step. The caller undoes its update.

        Raises:
            RecoveryError: the script has changed what no undo takes back, and there was no copy yet.
        """
        assert self._now is not None
        is_last = iteration == self._now.iteration  # the next one has not begun
        if changed := self._parameters.unaccounted() if is_last else self._parameters.lost():
            raise RecoveryError(
                f"the last step cannot be undone: it has changed {listed(changed)} outside of an optimizer's "
                "step for the first time, so there is no copy yet"
            )
        if is_last:
            _check_copied(self._now.variables.unaccounted())
            self._back(undo_follows=True)
            return
        assert self._previous is not None
        assert iteration == self._previous.iteration
        _check_copied(self._previous.uncopied)
        self.buffers_of(iteration)
        self._previous.gradients.put_back()
        self._restore(self._previous)

    def undone(self) -> None:
        """Updates are undone. That takes the rates of the step along, and rounds: all is as it was noted."""
        if self._undone_to is not None:
            self._undone_to.groups.put_back()
            self._undone_to.parameters.put_back_undone()

    def has_buffers_of(self, iteration: int) -> bool:
        """Whether this worker's own buffers at the beginning of an iteration are known."""
        if self._now is None:
            return False
        if iteration == self._now.iteration - 1:
            return self._previous is not None
        return iteration in (self._now.iteration, self._now.iteration + 1)

    def buffers_of(self, iteration: int, model: torch.nn.Module | None = None) -> None:
        """Put back this worker's own buffers at the beginning of an iteration.

        Only if :meth:`has_buffers_of` knows them. The beginning of the next iteration is the end of the
        interrupted one: a replica has completed it, which took all forward passes of this worker, and only
        those change the buffers of the model.

        Args:
            iteration: which one.
            model: only its buffers. Others may change later in a step, as the counter of an averaged model.
        """
        assert self._now is not None
        moments = {
            self._now.iteration - 1: self._previous.buffers if self._previous is not None else None,
            self._now.iteration: self._now.buffers,
            self._now.iteration + 1: self._after,  # None where the step is complete: then they are in place
        }
        if (moment := moments[iteration]) is not None:
            moment.restore(model)

    def has_statistics(self, model: torch.nn.Module) -> bool:
        """Whether steps change a model's buffers, as the last two show: running statistics, as a rule."""
        noted = [moment.buffers for moment in (self._previous, self._now) if moment is not None]
        moments = [*noted, *([self._after] if self._after is not None else [])]
        return any(one.differs_from(next_, model) for one, next_ in pairwise(moments))

    def _restore(self, moment: _Moment) -> None:
        moment.modes.put_back()
        self._state.restore(moment.small)
        loaded = LoadedParts(self._state)
        for scaler, stages in moment.scalers:
            put_stages(scaler, stages)
        moment.variables.put_back()
        loaded.put_right()
        self._script_hooks.put_back(moment.hooks)
        moment.groups.put_back()  # after schedulers, which set rates
        self._undone_to = moment

    def _looks_closely(self) -> bool:
        steps = self._steps
        if self._check == CheckStep.FIRST:
            return steps <= _FIRST_STEPS or (steps >= 16 and steps & (steps - 1) == 0)
        return self._check == CheckStep.ALWAYS

    def _copies(self, before: BufferCopies | None) -> BufferCopies:
        return BufferCopies(self._state.tree.modules(), before)

    def _before_forward(self, *_: object) -> None:
        if not torch.compiler.is_compiling():  # it would become a part of the graph
            self._parameters.look()

    def _before_update(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for held in self._stood_for_by(optimizer).values():
            parameters = parameters_of(held)
            self._parameters.before_update(held, parameters)
            if not _has_closure(args, kwargs):
                self._gradients.refuse_carried(parameters)

    def _after_update(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for name, held in self._stood_for_by(optimizer).items():
            parameters = parameters_of(held)  # a closure, or the step itself, may have given it others
            if _has_closure(args, kwargs):  # gradients are its work, of which there was nothing before it
                self._gradients.refuse_carried(parameters)
            self._parameters.after_update(held, parameters)
            if not isinstance(held, UndoableOptimizer):  # else it can undo its update
                self._updated.add(name)

    def _stood_for_by(self, optimizer: Optimizer) -> dict[str, Optimizer]:
        """Those of the state that a step is of: Fabric's proxy has the state of the one in it."""
        return {
            name: held
            for name, held in self._state.optimizers.items()
            if held is optimizer or getattr(held, "state", None) is optimizer.state
        }


def _check_copied(uncopied: Sequence[str]) -> None:
    if uncopied:
        raise RecoveryError(
            f"the last step cannot be undone: it has changed {listed(uncopied)}, which the script keeps, in "
            "place for the first time, so there is no copy yet"
        )


def _has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``step(closure)`` was called.

    Args:
        args: from the optimizer itself on, as torch gives them to hooks.
        kwargs: beside them.
    """
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
