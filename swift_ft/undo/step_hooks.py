"""Step hooks of an optimizer's own: whether they change what its update changes.

    step(): the session's hooks, the optimizer's own ones, the update, its own ones, the session's

An undo takes the update back, and not what a hook has done around it, such as a decoupled decay or a clamp.
So where there are hooks, what they find and what they leave is compared. Where they have changed anything,
all is copied before them from the next step on.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from swift_ft.torch_core.fingerprints import Fingerprint, Sampler
from swift_ft.torch_core.optimizers import parameters_of
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import same_bits, versions_of
from swift_ft.undo.snapshot import WholeState

CHANGED_BY_HOOKS = (
    "Step hooks of this optimizer have changed parameters or state, so the step cannot be undone. All is "
    "copied before them from the next step on, unless a part of that one is made by update()."
)
_FIRST_STEPS = 3


@dataclass(frozen=True, slots=True)
class _Look:
    """The parameters and the state of an optimizer at one moment.

    Attributes:
        counts: which tensors there are, and torch's counts of their changes.
        sample: of them, since a write through ``.data`` moves no count; None where nobody looks.
        values: of all parameters, where every bit counts: copies in a look that is kept. None elsewhere.
    """

    counts: list[int]
    sample: Fingerprint | None
    values: list[Tensor] | None

    def differs(self, other: _Look) -> bool:
        """Whether something was changed in between."""
        if self.counts != other.counts:
            return True
        if self.sample and other.sample and self.sample.differing(other.sample):
            return True
        pairs = zip(self.values or (), other.values or (), strict=True)
        return not all(same_bits(one, another) for one, another in pairs)


class StepHooks:
    """Watches the hooks of one optimizer.

    Attributes:
        changing: they change parameters or state.
        whole: all that the running step may change, as the hooks have found it; None unless they change it.
    """

    def __init__(self) -> None:
        self.changing = False
        self.whole: WholeState | None = None
        self._sampler = Sampler()
        self._steps = 0
        self._running = self._exact = False
        self._before: _Look | None = None

    def begin(self, optimizer: Optimizer, whole: WholeState | None, *, exact: bool) -> None:
        """A step begins, before all hooks.

        Args:
            optimizer: the one that steps.
            whole: a copy of all that it may change; None if there is none.
            exact: an undo of the step is to give back every bit.
        """
        self._steps += 1
        self._running, self._exact = True, exact
        self.whole = whole
        self._note(optimizer)

    def update_begins(self, optimizer: Optimizer) -> None:
        """The hooks before the update have run."""
        self._compare(optimizer)

    def update_ends(self, optimizer: Optimizer) -> None:
        """The update is made."""
        if self._running:  # else there are no hooks any more
            self._note(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """The hooks after the update have run, or the step has failed."""
        self._compare(optimizer)
        self.whole, self._running = None, False

    def _note(self, optimizer: Optimizer) -> None:
        self._before = None if self.changing else self._look(optimizer, kept=True)

    def _compare(self, optimizer: Optimizer) -> None:
        if self._before is not None:
            self.changing = self.changing or self._look(optimizer, kept=False).differs(self._before)
            self._before = None

    def _look(self, optimizer: Optimizer, *, kept: bool) -> _Look:
        parameters = parameters_of(optimizer)
        held = [fields for fields in optimizer.state.values() if isinstance(fields, dict)]
        values = [*parameters, *(value for fields in held for value in fields.values())]
        counts = [*map(id, values), *versions_of(values)]
        # To compare samples waits for a device, which an exact step does in any case: else only now and then.
        waits = not self._exact and any(parameter.device.type != "cpu" for parameter in parameters)
        closely = self._steps <= _FIRST_STEPS or (self._steps >= 16 and self._steps & (self._steps - 1) == 0)
        if waits and not closely:
            return _Look(counts, None, None)
        sample = self._sampler.take([value for value in values if isinstance(value, Tensor)])
        here = [local(parameter).detach() for parameter in parameters] if self._exact else None
        return _Look(counts, sample, [one.clone() for one in here] if kept and here is not None else here)
