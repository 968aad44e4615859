"""The optimizer wrapper: ``step()`` as ever, and ``undo()`` (§4)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_ft.errors import UndoError, UsageError
from swift_ft.undo.exact import Residuals, stepped
from swift_ft.undo.journal import WholeState
from swift_ft.undo.lamb import Lamb
from swift_ft.undo.registry import plain_step, rule_for
from swift_ft.undo.rule import Rule
from swift_ft.undo.update import GroupUpdate
from swift_ft.undo.window import Window

__all__ = ["Lamb", "UndoableOptimizer", "wrap_optimizer"]

_OURS = "_swift_undo"
_NOT_STATE = frozenset({_OURS, "step", "_opt_called", "_zero_grad_profile_name", "grad_scale", "found_inf"})
"""Attributes of an optimizer that its step does not change, or that others set and take away."""


@dataclass
class _Undo:
    """What a wrapped optimizer has beside the one it was.

    Attributes:
        exact: residuals are stored.
        wait_free: single parameters can be updated; checked when it was wrapped.
        window: the last step's updates; None before the first step and once they are let go.
        windows_opened: how many there were.
        residuals: memory for residuals.
        reason: why there is no window.
    """

    exact: bool = False
    wait_free: bool = False
    window: Window | None = None
    windows_opened: int = 0
    residuals: Residuals = field(default_factory=Residuals)
    reason: str = "no step was made yet"


class UndoableOptimizer(Optimizer):
    """What :func:`wrap_optimizer` adds to an optimizer; not made by itself.

    A step's updates stand in the *undo window* until the next step begins or :meth:`close_undo_window` is
    called. Gradients are held by reference: they must not be written to while the window is open. Where they
    were, :meth:`undo` refuses.
    """

    _plain_class: ClassVar[type[Optimizer]]
    _plain_step: ClassVar[Callable[..., Any]]

    @property
    def wait_free(self) -> bool:
        """Single parameters are updated as soon as their gradients are there."""
        return self._undo.wait_free

    @property
    def windows_opened(self) -> int:
        """Undo windows so far: tells whether the tags are of this step or of the one before."""
        return self._undo.windows_opened

    @property
    def updated(self) -> tuple[Tensor, ...]:
        """The tags: parameters that the step in the open window updated, in the order of the groups."""
        window = self._undo.window
        if window is None:
            return ()
        updated = window.params()
        return tuple(p for group in self.param_groups for p in group["params"] if p in updated)

    def undo(self, parameters: Iterable[Tensor] | None = None) -> int:
        """Takes back the last step: parameters, state, step counters, and the hyper-parameters used then.

        ``.grad`` stays as it is, except that a kernel's own changes of the gradient are taken back.

        Args:
            parameters: the parameters whose update is taken back; all tagged ones if None.

        Returns:
            How many parameters were taken back.

        Raises:
            UndoError: no step is in the undo window, it was taken back already, or parameters or gradients
                were changed since. Nothing was changed.
            UsageError: a parameter is not among :attr:`updated`.
        """
        window = self._undo.window
        if window is None:
            raise UndoError(f"There is no step to take back: {self._undo.reason}.")
        count = window.undo(parameters)
        if not window.params():
            self._let_go("it was taken back already; a step has to come first")
        return count

    def close_undo_window(self) -> None:
        """Lets go of gradients, journal and residuals: the last step is final. Harmless if there is none."""
        self._let_go("the undo window is closed")

    def update(self, parameters: Iterable[Tensor]) -> int:
        """Applies the optimizer to some parameters now, bit for bit as a whole step would (wait-free update).

        The ``step()`` that follows applies it to the rest, and ends the step: hooks and schedulers see one
        step. The first update after a complete step opens a new undo window.

        Args:
            parameters: parameters of this optimizer; those without a gradient are left alone.

        Returns:
            How many parameters were updated.

        Raises:
            UsageError: a parameter is not this optimizer's, was updated in this step already, or the
                optimizer cannot be applied to single parameters.
        """
        chosen = set(parameters)
        rule = self._rule_or_refuse()
        unknown = chosen - {p for group in self.param_groups for p in group["params"]}
        if unknown:
            raise UsageError(f"{len(unknown)} of {len(chosen)} parameters are not in this optimizer's groups")
        window = self._undo.window
        if window is None or window.complete:
            window = self._open()
        if again := chosen & window.params():
            raise UsageError(
                f"{len(again)} of {len(chosen)} parameters were updated in this step already: "
                "call step() to end it."
            )
        return self._apply(window, rule, chosen)

    def undo_memory_bytes(self) -> int:
        """Bytes held for the undo beside parameters and state, with gradients that were given up."""
        window = self._undo.window
        return 0 if window is None else window.memory_bytes() + window.gradient_bytes()

    # ------------------------------------------------------------------------------- what torch calls

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ever, except that gradients in the undo window are not written to.

        With ``set_to_none=False`` a parameter gets a new gradient of zeros instead. Gradients of a later
        backward pass end the window: that pass needed everybody's last step.

        Args:
            set_to_none: drop the gradients instead of setting them to zero.
        """
        window = self._undo.window
        if window is not None and window.complete and window.met_later_gradients():
            self._let_go("zero_grad() met gradients of a later iteration, whose step was skipped")
            window = None
        if window is None or set_to_none:
            super().zero_grad(set_to_none)
            return
        window.replace_gradients()
        super().zero_grad(set_to_none)
        window.note_zeros()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ever; the undo window closes.

        Args:
            state_dict: what ``state_dict()`` returned.
        """
        super().load_state_dict(state_dict)
        self._let_go("a state was loaded since")

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        options = (self._undo.exact, self._undo.wait_free)
        return _unpickled, (self._plain_class, *options), self.__getstate__()

    # ------------------------------------------------------------------------------------- the inside

    @property
    def _undo(self) -> _Undo:
        return cast(_Undo, self.__dict__[_OURS])

    def _let_go(self, reason: str) -> None:
        self._undo.window = None
        self._undo.reason = reason

    def _open(self) -> Window:
        self._undo.window = Window()
        self._undo.windows_opened += 1
        return self._undo.window

    def _rule_or_refuse(self) -> Rule:
        rule = rule_for(self._plain_class)
        if rule is None:
            raise UsageError(
                f"{self._plain_class.__name__} cannot be applied to single parameters, as far as swift_ft "
                "knows: call step()."
            )
        return rule

    def _whole_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``step()`` does between torch's hooks."""
        rule = rule_for(self._plain_class)
        window = self._undo.window
        if window is None or window.complete:
            self._let_go("the step was not completed")
        if rule is None:
            whole = WholeState(self, _NOT_STATE)  # the closure, if any, belongs to the step
            self._undo.window = Window(whole=whole, complete=True)
            self._undo.windows_opened += 1
            return self._plain_step(self, *args, **kwargs)
        loss = None
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:  # it makes the gradients that have to be remembered
            with torch.enable_grad():
                loss = closure()
        window = self._undo.window or self._open()
        self._apply(window, rule, None)
        window.complete = True
        return loss

    def _apply(self, window: Window, rule: Rule, chosen: set[Tensor] | None) -> int:
        """Updates parameters that this step has not updated yet; ``chosen`` ones or all."""
        done = window.params() if window.updates else set()
        window.found_inf = getattr(self, "found_inf", None)
        exact = self._undo.exact and not window.skipped()
        updates = []
        with torch.no_grad():
            for group in self.param_groups:
                params = group["params"]
                if done or chosen is not None:
                    params = [p for p in params if (chosen is None or p in chosen) and p not in done]
                updates.append(GroupUpdate.before(self, group, params, rule, exact))
        try:
            if exact:
                for group, update in zip(self.param_groups, updates, strict=True):
                    stepped(update, functools.partial(self._step_some, group), self._undo.residuals)
            elif chosen is None and not done:
                self._plain_step(self)
            else:
                for group, update in zip(self.param_groups, updates, strict=True):
                    self._step_some(group, [entry.param for entry in update.entries])
        except BaseException:
            self._let_go("the step failed, and nobody knows how far it came")
            raise
        for update in updates:
            update.after()
        window.updates += [update for update in updates if update.entries]
        return sum(len(update.entries) for update in updates)

    def _step_some(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        """Applies the optimizer to some parameters of one group; it sees no others."""
        if not params:
            return
        groups, everything = self.param_groups, group["params"]
        self.param_groups, group["params"] = [group], list(params)
        try:
            self._plain_step(self)
        finally:
            self.param_groups, group["params"] = groups, everything


def wrap_optimizer(
    optimizer: Optimizer, *, exact: bool = False, wait_free: bool = False
) -> UndoableOptimizer:
    """Gives an optimizer an ``undo()``.

    It is the same object, of a class that derives from the one it had: schedulers, hooks, and whoever else
    holds it, need not know. Wrapping it again changes the options only.

    Args:
        optimizer: any optimizer. One that swift_ft does not know is handled by a journal of all its state.
        exact: make the undo bit-exact, for about a byte per element and state tensor.
        wait_free: insist that :meth:`UndoableOptimizer.update` works, and say so now if it does not.

    Returns:
        The optimizer.

    Raises:
        UsageError: ``wait_free`` is asked of an optimizer that cannot be applied to single parameters, or its
            ``step`` was replaced on the instance.
    """
    if not isinstance(optimizer, UndoableOptimizer):
        patched = vars(optimizer).get("step")
        if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
            raise UsageError(
                "This optimizer's step() was replaced: call wrap_optimizer() before whatever did that"
            )
        optimizer.__class__ = _undoable_class(type(optimizer))
        vars(optimizer)[_OURS] = _Undo()
        if patched is not None:
            _follow_scheduler(optimizer)
    wrapped = cast(UndoableOptimizer, optimizer)
    if wait_free:
        wrapped._rule_or_refuse()
    wrapped._let_go("no step was made since it was wrapped")
    wrapped._undo.exact, wrapped._undo.wait_free = exact, wait_free
    return wrapped


_CLASSES: dict[type[Optimizer], type[UndoableOptimizer]] = {}


def _undoable_class(kind: type[Optimizer]) -> type[UndoableOptimizer]:
    """The class that a wrapped optimizer of some class gets: one per class."""
    if kind not in _CLASSES:
        _CLASSES[kind] = _make_class(kind)
    return _CLASSES[kind]


def _make_class(kind: type[Optimizer]) -> type[UndoableOptimizer]:
    plain = plain_step(kind)

    @functools.wraps(plain)
    def step(self: UndoableOptimizer, *args: Any, **kwargs: Any) -> Any:
        return self._whole_step(args, kwargs)

    hooked = Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]  # torch's own mark: the hooks are around it already
    names = {
        "step": hooked,
        "_plain_class": kind,
        "_plain_step": staticmethod(plain),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (UndoableOptimizer, kind), names)


def _unpickled(kind: type[Optimizer], exact: bool, wait_free: bool) -> UndoableOptimizer:
    """An empty wrapped optimizer, for a copy or an unpickled one; its window is closed."""
    wrapped = object.__new__(_undoable_class(kind))
    vars(wrapped)[_OURS] = _Undo(exact, wait_free, reason="a copy has no undo window")
    return wrapped


def _follow_scheduler(optimizer: Optimizer) -> None:
    """Lets the step that a scheduler has put on the instance call the class's step of now."""
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        this = cast(Any, reference())
        this._opt_called = True  # a scheduler warns if it was called before the optimizer
        return type(this).step(this, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # what a scheduler looks for
    optimizer.step = step  # type: ignore[method-assign]  # as the scheduler did
