"""The optimizer wrapper: an unchanged ``step()``, and ``undo()`` (§4)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from swift_ft.errors import UndoError, UsageError
from swift_ft.torch_core.optimizers import (
    bookkeeping_of,
    has_step_hooks,
    is_patched_by_scheduler,
    mark_as_patched_by_scheduler,
    note_step_called,
    parameters_of,
    plain_step,
    with_step_hooks,
)
from swift_ft.undo.copies import Copies
from swift_ft.undo.early import EarlyUpdates
from swift_ft.undo.exact import Residuals, step_with_residuals
from swift_ft.undo.registry import rule_for
from swift_ft.undo.rules.lamb import Lamb
from swift_ft.undo.rules.rule import Rule
from swift_ft.undo.snapshot import WholeState
from swift_ft.undo.step_hooks import CHANGED_BY_HOOKS, StepHooks
from swift_ft.undo.update import GroupUpdate
from swift_ft.undo.window import HOOKS_CHANGE, NO_RULE, Window

__all__ = ["Lamb", "UndoableOptimizer", "wrap_optimizer"]

_OURS = "_swift_undo"


@dataclass
class _Undo:
    """The additional attributes of a wrapped optimizer.

    Attributes:
        exact: an undo restores every bit.
        wait_free: single parameters can be updated; checked when the optimizer was wrapped.
        window: the last step's updates; None before the first step and after it was closed.
        windows_opened: the number of windows so far.
        residuals: memory for residuals.
        copies: of what is small, in place of residuals.
        reason: why there is no window.
        hooks: watches the hooks of the optimizer's own; None as long as it has none.
        early: the updates of the open window that a backward pass has made; None if there are none.
    """

    exact: bool = False
    wait_free: bool = False
    window: Window | None = None
    windows_opened: int = 0
    residuals: Residuals = field(default_factory=Residuals)
    copies: Copies = field(default_factory=Copies)
    reason: str = "no step was made yet"
    hooks: StepHooks | None = None
    early: EarlyUpdates | None = None


class UndoableOptimizer(Optimizer):
    """The additions of :func:`wrap_optimizer` to an optimizer. It is not instantiated directly.

    A step's updates are in the *undo window* until the next step begins or :meth:`close_undo_window` is
    called. Gradients are held by reference: nothing may write to them while the window is open. If something
    did, :meth:`undo` refuses.
    """

    _plain_class: ClassVar[type[Optimizer]]
    _plain_step: ClassVar[Callable[..., Any]]

    @property
    def exact(self) -> bool:
        """Whether an undo gives back the very bits."""
        return self._undo.exact

    @property
    def wait_free(self) -> bool:
        """Whether single parameters are updated as soon as their gradients are ready."""
        return self._undo.wait_free

    @property
    def windows_opened(self) -> int:
        """Undo windows so far: shows whether the tags are of this step or of the one before."""
        return self._undo.windows_opened

    @property
    def window_open(self) -> bool:
        """Whether the last step can still be undone, as far as it has updated anything."""
        return self._undo.window is not None

    @property
    def refuses_undo(self) -> str:
        """Why the last step cannot be undone, where its hooks have changed what no copy has; else empty."""
        return "" if self._undo.window is None else self._undo.window.refuses

    @property
    def waits_for_step(self) -> bool:
        """Whether a backward pass has updated parameters, and ``step()`` was not called since."""
        return self._undo.early is not None

    @property
    def updated(self) -> tuple[Tensor, ...]:
        """The tags: parameters that the step in the open window updated, in the order of the groups.

        Those that are in no group any more come last.
        """
        window = self._undo.window
        if window is None:
            return ()
        updated = window.params()
        grouped = dict.fromkeys(p for p in parameters_of(self) if p in updated)
        return (*grouped, *(updated - grouped.keys()))

    def undo(self, parameters: Iterable[Tensor] | None = None) -> int:
        """Undoes the last step: parameters, state, step counters, and the hyper-parameters that it used.

        ``.grad`` stays as it is, except that a kernel's own changes of the gradient are undone.

        Args:
            parameters: the parameters whose update is undone; all tagged ones if None.

        Returns:
            The number of parameters whose update was undone.

        Raises:
            UndoError: no step is in the undo window, it was undone already, or parameters or gradients were
                changed since. Nothing was changed.
            UsageError: a parameter is not among :attr:`updated`.
        """
        window = self._undo.window
        if window is None:
            raise UndoError(f"There is no step to undo: {self._undo.reason}.")
        count = window.undo(parameters)
        if not window.params():
            self._close_window("it was undone already; call step() first")
        return count

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Take parameters out of the undo window: they and their state were put back from copies."""
        if (window := self._undo.window) is not None:
            window.forget(set(parameters))

    def close_undo_window(self) -> None:
        """Releases gradients, snapshots and residuals: the last step is final. Harmless without a window."""
        self._close_window("the undo window is closed")

    def update(self, parameters: Iterable[Tensor]) -> int:
        """Applies the optimizer to some parameters now, bit for bit as a whole step would (wait-free update).

        The ``step()`` that follows applies it to the rest, and ends the step: hooks and schedulers see one
        step. The first update after a complete step opens a new undo window.

        Args:
            parameters: parameters of this optimizer; those without a gradient are skipped.

        Returns:
            How many parameters were updated.

        Raises:
            UsageError: a parameter is not this optimizer's, was updated in this step already, or the
                optimizer cannot be applied to single parameters.
        """
        chosen = set(parameters)
        rule = self._rule_or_refuse()
        unknown = chosen - {*parameters_of(self)}
        if unknown:
            raise UsageError(
                f"{len(unknown)} of {len(chosen)} parameters are not in this optimizer's groups: "
                "give update() its own parameters only."
            )
        window = self._undo.window
        if window is None or window.complete:
            window = self._open()
        if again := chosen & window.params():
            raise UsageError(
                f"{len(again)} of {len(chosen)} parameters were updated in this step already: "
                "call step() to end it."
            )
        return self._apply(window, rule, chosen)

    def backward_ended(self) -> None:
        """A backward pass that called :meth:`update` has ended: ``step()`` refuses changes from now on."""
        window = self._undo.window
        if window is not None and not window.complete:
            self._undo.early = EarlyUpdates(self.param_groups, window.params())

    def undo_memory_bytes(self) -> int:
        """Bytes held for the undo besides parameters and state, with gradients that only the window holds.

        0 without a window, although ``exact`` keeps its memory for the next step.
        """
        window = self._undo.window
        return 0 if window is None else window.memory_bytes() + window.gradient_bytes()

    # ------------------------------------------------------------------------------- what torch calls

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch, except that gradients in the undo window are not written to.

        With ``set_to_none=False`` a parameter gets a new gradient of zeros instead. Gradients of a later
        backward pass close the window: that pass needed the last step of every worker.

        Args:
            set_to_none: drop the gradients instead of setting them to zero.
        """
        window = self._undo.window
        if window is not None and window.complete and window.met_later_gradients():
            self._close_window("zero_grad() met gradients of a later iteration, whose step was skipped")
            window = None
        if window is None or set_to_none:
            super().zero_grad(set_to_none)
            return
        window.replace_gradients()
        super().zero_grad(set_to_none)
        window.note_zeros()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; the undo window closes.

        Args:
            state_dict: what ``state_dict()`` returned.
        """
        super().load_state_dict(state_dict)
        self._close_window("a state was loaded since")

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        if _OURS not in self.__dict__:  # a proxy that only has our class
            return super().__reduce_ex__(protocol)
        exact: bool | Literal["compiled"] = "compiled" if self._undo.residuals.compiled else self._undo.exact
        options = (exact, self._undo.wait_free)
        return _unpickled, (self._plain_class, *options), self.__getstate__()

    # ------------------------------------------------------------------------------------- internal

    @property
    def _undo(self) -> _Undo:
        # Not from the dictionary: Fabric's proxy has a class derived from ours, and the attributes elsewhere.
        return cast(_Undo, getattr(self, _OURS))

    def _close_window(self, reason: str) -> None:
        self._undo.window = self._undo.early = None
        self._undo.reason = reason

    def _open(self) -> Window:
        self._undo.window, self._undo.early = Window(), None
        self._undo.windows_opened += 1
        self._undo.copies.begin()
        return self._undo.window

    def _rule_or_refuse(self) -> Rule:
        rule = rule_for(self._plain_class)
        if rule is None:
            raise UsageError(
                f"{self._plain_class.__name__} cannot be applied to single parameters, as far as swift_ft "
                "knows: call step()."
            )
        return rule

    def _with_hooks(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A step with hooks of the optimizer's own, which may change what the update changes."""
        undo = self._undo
        hooks = undo.hooks = undo.hooks or StepHooks()
        begun = undo.window is not None and not undo.window.complete  # by single updates
        whole = WholeState(self, _not_state(self)) if hooks.changing and not begun else None
        hooks.begin(self, whole, exact=undo.exact)
        try:
            return step(self, *args, **kwargs)
        finally:
            hooks.end(self)
            if hooks.changing and whole is None and undo.window is not None:
                undo.window.refuses = CHANGED_BY_HOOKS

    def _whole_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The work of ``step()`` between torch's hooks."""
        rule = rule_for(self._plain_class)
        window = self._undo.window
        if window is None or window.complete:
            self._close_window("the step was not completed")
        hooks = self._undo.hooks
        if hooks is not None:
            hooks.update_begins(self)
        whole = hooks.whole if hooks is not None else None
        if rule is None or whole is not None:
            whole = whole or WholeState(self, _not_state(self))  # a closure belongs to the step
            because = NO_RULE if rule is None else HOOKS_CHANGE
            self._undo.window = Window(whole=whole, because=because, complete=True)
            self._undo.windows_opened += 1
            result = self._plain_step(self, *args, **kwargs)
            if hooks is not None:
                hooks.update_ends(self)
            return result
        loss = None
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None:  # it computes the gradients that have to be recorded
            with torch.enable_grad():
                loss = closure()
        window = self._undo.window or self._open()
        self._refuse_late_changes(window)
        self._apply(window, rule, None)
        window.complete = True
        if hooks is not None:
            hooks.update_ends(self)
        return loss

    def _refuse_late_changes(self, window: Window) -> None:
        early, self._undo.early = self._undo.early, None
        updated = window.params() if early is not None else set()
        if early is not None and (changed := early.changed(self, updated)) is not None:
            raise UsageError(
                f"wrap_optimizer(wait_free=True) has updated {len(updated)} parameters within the backward "
                f"pass, and {changed}: step() comes too late for that. Leave wait_free out, or change "
                "neither gradients nor a group's options between backward() and step().",
                alike=True,
            )

    def _apply(self, window: Window, rule: Rule, chosen: set[Tensor] | None) -> int:
        """Updates the ``chosen`` parameters, or all, that this step has not updated yet."""
        done = window.params() if window.updates else set()
        window.found_inf = getattr(self, "found_inf", None)
        exact = self._undo.exact and not window.skipped()
        copies = self._undo.copies if exact else None
        updates = []
        with torch.no_grad():
            for group in self.param_groups:
                params = group["params"]
                if done or chosen is not None:
                    params = [p for p in params if (chosen is None or p in chosen) and p not in done]
                updates.append(GroupUpdate.before(self, group, params, rule, exact, copies))
        try:
            if any(update.stores_residuals for update in updates):
                for group, update in zip(self.param_groups, updates, strict=True):
                    step = functools.partial(self._step_some, group)
                    if update.stores_residuals:
                        step_with_residuals(update, step, self._undo.residuals)
                    else:
                        step(update.params)
            elif chosen is None and not done:
                self._plain_step(self)
            else:
                for group, update in zip(self.param_groups, updates, strict=True):
                    self._step_some(group, update.params)
        except BaseException:
            self._close_window("the step failed partway")
            raise
        for update in updates:
            update.after()
        counts = [len(update.params) for update in updates]
        window.updates += [update for update, count in zip(updates, counts, strict=True) if count]
        return sum(counts)

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
    optimizer: Optimizer, *, exact: bool | Literal["compiled"] = False, wait_free: bool = False
) -> UndoableOptimizer:
    """Gives an optimizer an ``undo()``.

    It stays the same object, of a class derived from the one it had: schedulers, hooks and other holders do
    not notice. Wrapping it again only changes the options.

    No training needs it: docs/undo.md says which rare loss costs less with it.

    Args:
        optimizer: any optimizer. For one without a rule, all state is copied before each step.
        exact: make the undo bit-exact. What is small is copied, up to 64 MiB in a process. The rest takes
            about a byte per element and state tensor, and an inverse in each step. With ``"compiled"``,
            elementwise rules in float32 are compiled by ``torch.compile``: the second step takes some seconds
            more, all others less time. On CPUs that needs a C++ compiler; without one a warning says so, and
            steps are made as with True.
        wait_free: require that :meth:`UndoableOptimizer.update` works; raises now if it does not.

    Returns:
        The optimizer.

    Raises:
        UsageError: ``wait_free`` is set for an optimizer that cannot be applied to single parameters, or its
            ``step`` was replaced on the instance.
    """
    if not isinstance(optimizer, UndoableOptimizer):
        patched = vars(optimizer).get("step")
        if patched is not None and not is_patched_by_scheduler(patched):
            raise UsageError(
                "This optimizer's step() was replaced: call wrap_optimizer() before anything replaces it."
            )
        optimizer.__class__ = _undoable_class(type(optimizer))
        vars(optimizer)[_OURS] = _Undo()
        if patched is not None:
            _follow_scheduler(optimizer)
    wrapped = cast(UndoableOptimizer, optimizer)
    if wait_free:
        wrapped._rule_or_refuse()
    wrapped._close_window("no step was made since it was wrapped")
    wrapped._undo.exact, wrapped._undo.wait_free = bool(exact), wait_free
    wrapped._undo.residuals.compiled = exact == "compiled"
    wrapped._undo.copies.clear()
    return wrapped


_CLASSES: dict[type[Optimizer], type[UndoableOptimizer]] = {}


def _undoable_class(kind: type[Optimizer]) -> type[UndoableOptimizer]:
    """The class of a wrapped optimizer: one per plain class."""
    if kind not in _CLASSES:
        _CLASSES[kind] = _make_class(kind)
    return _CLASSES[kind]


def _make_class(kind: type[Optimizer]) -> type[UndoableOptimizer]:
    plain = plain_step(kind)

    @functools.wraps(plain)
    def update(self: UndoableOptimizer, *args: Any, **kwargs: Any) -> Any:
        return self._whole_step(args, kwargs)

    hooked = with_step_hooks(update)

    @functools.wraps(hooked)  # with torch's mark on it
    def step(self: UndoableOptimizer, *args: Any, **kwargs: Any) -> Any:
        if not has_step_hooks(self):
            return hooked(self, *args, **kwargs)
        return self._with_hooks(hooked, args, kwargs)

    names = {
        "step": step,
        "_plain_class": kind,
        "_plain_step": staticmethod(plain),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (UndoableOptimizer, kind), names)


def _unpickled(
    kind: type[Optimizer], exact: bool | Literal["compiled"], wait_free: bool
) -> UndoableOptimizer:
    """An empty wrapped optimizer to copy or unpickle into; its window is closed."""
    wrapped = object.__new__(_undoable_class(kind))
    vars(wrapped)[_OURS] = _Undo(
        bool(exact), wait_free, residuals=Residuals(exact == "compiled"), reason="a copy has no undo window"
    )
    return wrapped


def _not_state(optimizer: Optimizer) -> frozenset[str]:
    """Attributes of an optimizer that its step does not change, or that others set and delete."""
    return bookkeeping_of(optimizer) | {_OURS}


def _follow_scheduler(optimizer: Optimizer) -> None:
    """Makes the step that a scheduler put on the instance call the step of the new class."""
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        this = cast(Any, reference())
        note_step_called(this)
        return type(this).step(this, *args, **kwargs)

    mark_as_patched_by_scheduler(step)
    optimizer.step = step  # type: ignore[method-assign]  # as the scheduler did
