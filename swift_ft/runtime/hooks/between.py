"""Functions between two steps: validation, the script's own checkpoints, log lines (``session.between``).

A hook is a function of the script. It runs once all of the iteration before it is complete, and before the
checkpoint there. It may communicate as it likes, since no replay runs it; so it must not change the training
state. Whatever follows from it for the training does so through its result: that is noted in the rendezvous
store and given to the hook's ``then``, in a replay too. Training does not wait for the store. So a worker
whose result differs from another one's learns of it a little later, and no hook that it saved since counts.

    iteration n-1 complete ──▶ hook 0 ──▶ result noted ──▶ then(result) ──▶ hook 1 ... ──▶ checkpoint, step n

A loss in a hook leads back to its beginning on all workers: also on those that have completed it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import torch

from swift_ft.checkpoint.state_digest import listed
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config import store_keys
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.determinism import derive_seed, seed_host, seed_torch
from swift_ft.errors import RecoveryError, UsageError
from swift_ft.observe.waits import waiting
from swift_ft.runtime.hooks.between_state import ChangeableState, FixedState, ModuleModes, NoteVariables
from swift_ft.runtime.hooks.module_changes import ModuleChanges
from swift_ft.runtime.script.script_phases import ScriptPhase, ScriptPhases
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore
from swift_ft.torch_core.fingerprints import Sampler

_logger = logging.getLogger(__name__)

_SKIPPED = "skipped"
_ANSWER_S = 60.0
"""The rendezvous store answers at once, or is gone."""
_LIMIT = 64 << 10
"""Characters of a noted result."""


class OnLoss(StrEnum):
    """The treatment of a hook in which a machine is lost."""

    REPEAT = "repeat"
    """All workers do it again."""
    SKIP = "skip"
    """No worker does it again."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A function that a script does between two steps.

    Attributes:
        function: does it.
        every: it follows each iteration whose number, counted from 1, is a multiple of this.
        then: called with the result of ``function``, in a replay too; None if nothing follows from it.
        on_loss: what becomes of it if a machine is lost in it.
    """

    function: Callable[[], Any]
    every: int
    then: Callable[[Any], object] | None
    on_loss: OnLoss

    @property
    def name(self) -> str:
        """As the script calls it."""
        return str(getattr(self.function, "__qualname__", self.function))


class Stop:
    """When training ends before the script's number of iterations. A part of the training state.

    It holds for the run in which it was said: whoever is rebuilt in that run ends there as well. A run that
    is resumed from such a state was started to go on.

    Args:
        run: the name of this run, which no other one has.

    Attributes:
        extra: iterations beyond those that the script asks for: of the ends of earlier runs, where a trainer
            needs one for its end, and this run has gone on from there.
    """

    def __init__(self, run: str) -> None:
        self._run = self._of = run
        self._at: int | None = None
        self.extra = 0

    @property
    def at(self) -> int | None:
        """Iterations completed by then; None if this run has said nothing."""
        return self._at if self._of == self._run else None

    @at.setter
    def at(self, iteration: int | None) -> None:
        self._at, self._of = iteration, self._run

    def has_ended_before(self, iteration: int) -> bool:
        """Whether an earlier run was to end after so many iterations, and this one goes on from there."""
        return self._of != self._run and self._at == iteration

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        return {"at": self._at, "run": self._of, "extra": self.extra}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self._at, self._of, self.extra = state["at"], state.get("run", ""), state.get("extra", 0)


class ResultLog(Protocol):
    """Keeps results longer than the job."""

    def note(self, iteration: int, position: int, result: str) -> None:
        """Keep a result, after this many complete iterations; ``position`` counts those that are due."""

    def read(self, iteration: int, position: int) -> str | None:
        """A result; None if it is not known."""


class Between:
    """The hooks of one worker.

    Args:
        rank: this worker.
        state: what the session protects.
        rendezvous: where results are read that were noted.
        writer: notes results there.
        run: the name of this run.
        note_variables: notes the variables of the script.
        on_difference: called in the writer's thread, when another worker had another result.

    Attributes:
        stop: whether training ends early.
        repeats: the hooks that are due now were begun before a loss.
        applying: a hook's ``then`` is running.
        log: keeps results for a replay without the job; None where there is no log.
        changes: notes for replays what hooks change in attributes of modules; None where there are none.
        differs: another worker had another result: then what followed from it is not the same on all.
    """

    def __init__(
        self,
        rank: int,
        state: TrainingState,
        rendezvous: RendezvousStore,
        writer: BackgroundWriter,
        *,
        run: str,
        seed: int,
        note_variables: NoteVariables,
        on_difference: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._state = state
        self._rendezvous = rendezvous
        self._writer = writer
        self._seed = seed
        self._note_variables = note_variables
        self._on_difference = on_difference
        self.differs: UsageError | None = None  # owner: the writer's thread; others read
        self._hooks: list[Hook] = []
        self._before: dict[tuple[int, int], ChangeableState] = {}  # by iteration and position
        self._running: ChangeableState | None = None  # what was before the hook that runs
        self._modes: ModuleModes | None = None  # of the hook that runs
        self._sampler = Sampler()
        self._fixed: tuple[str, FixedState] | None = None  # its name, and what it must not change
        self.stop = Stop(run)
        self._said_end_of_earlier_run = False
        self.repeats = self.applying = False
        self.log: ResultLog | None = None
        self.changes: ModuleChanges | None = None

    def add(self, hook: Hook) -> None:
        """From the next step on."""
        self._hooks.append(hook)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the hooks, as the script calls them."""
        return tuple(hook.name for hook in self._hooks)

    def agree(self) -> None:
        """All workers must have the same hooks.

        Raises:
            UsageError: this worker has others than the first one that came here.
        """
        if not self._hooks:
            return
        ours = json.dumps([[p.name, p.every, p.then is not None, p.on_loss] for p in self._hooks])
        theirs = self._rendezvous.compare_set(store_keys.between_parts(), "", ours).decode()
        if ours != theirs:
            raise UsageError(
                f"session.between() was given {ours} on worker {self._rank} and {theirs} on another one: all "
                "workers must be given the same, in the same order."
            )

    def check(self) -> None:
        """Between two steps, and after one that broke off.

        Raises:
            UsageError: the result of a hook was not the same on all workers.
        """
        if self.differs is not None:
            raise self.differs

    def say_if_stopped_before(self, iteration: int, steps: int | None) -> None:
        """Training goes on from an iteration: say once if an earlier run was to end there.

        Args:
            iteration: completed iterations.
            steps: iterations that the script asks for; None if that is unknown.
        """
        if self._rank or self._said_end_of_earlier_run or not self.stop.has_ended_before(iteration):
            return
        if steps is not None and iteration >= steps + self.stop.extra:
            return  # none is left
        self._said_end_of_earlier_run = True
        _logger.info(
            "The run before was stopped after %d iterations. This run was started to go on: it trains "
            "until its script stops it again, or all its iterations are done",
            iteration,
            extra={"event": "earlier_run_stopped", "iteration": iteration},
        )

    def due(self, iteration: int) -> list[Hook]:
        """The hooks that are called after this many completed iterations, in order."""
        return [hook for hook in self._hooks if iteration and iteration % hook.every == 0]

    def run(
        self,
        iteration: int,
        position: int,
        generation: int,
        phases: ScriptPhases,
        finish_on_device: Callable[[], object],
    ) -> None:
        """Do one hook together with all other workers, or skip it.

        Args:
            iteration: completed iterations.
            position: among those that are due.
            phases: the script is in a hook.
            finish_on_device: raises if an abort has ended what the hook communicated, and may have given it
                any number.

        Raises:
            UsageError: the hook changed the training state, or its result cannot be noted.
            Exception: what the hook raised; of broken communication, among others.
        """
        hook = self.due(iteration)[position]
        if self.repeats and hook.on_loss == OnLoss.SKIP:
            if hook.then is not None:
                self._note(hook, iteration, position, generation, _SKIPPED)
            if self.changes is not None:
                self.changes.note_skipped(iteration, position)
            return
        self._running = self._note_before(iteration, position)
        self._modes = ModuleModes(self._state)
        seed = derive_seed(self._seed, iteration, -1, position)
        seed_torch(seed)
        seed_host(seed)
        before = FixedState(self._state, self._sampler)
        self._fixed = hook.name, before
        if self.changes is not None:
            self.changes.begin(hook.name)
        result = hook.function()
        finish_on_device()  # before the result counts: another survivor may have read other numbers
        self._leave(interrupted=False)
        if changed := before.changed():
            raise UsageError(
                f"{hook.name}() is done between two steps and changed {changed}, which no replay would see: "
                "return what decides, and change it in session.between(..., then=...), or do it inside "
                "`with step:`."
            )
        if self.changes is not None:
            self.changes.note(hook.name, iteration, position)
        if hook.then is not None:
            noted = _written(hook, result)
            self._note(hook, iteration, position, generation, noted)
            phases.phase = ScriptPhase.OUTSIDE  # what follows must need no other worker
            self._apply(hook, noted)
        self._before[iteration, position].complete()

    def dirty(self) -> str | None:
        """Why the state is not the one from which an interrupted hook can be repeated; None if it is."""
        if self._fixed is None:
            return None
        name, before = self._fixed
        if rewritten := before.rewritten():
            return (
                f"communication failed in {name}() while {listed(rewritten)} had other values, as averaged "
                "weights; put them back in a `finally:`"
            )
        return None

    def interrupted(self) -> None:
        """A hook was interrupted: modules and the script's variables are as they were before it."""
        if self._running is not None:
            self._running.restore()
        self._leave(interrupted=True)

    def _note_before(self, iteration: int, position: int) -> ChangeableState:
        """Note what a hook may change. Of the last two iterations: one that is complete may be taken back."""
        self._before = {place: noted for place, noted in self._before.items() if place[0] >= iteration - 1}
        self._before[iteration, position] = noted = ChangeableState(self._state, self._note_variables)
        return noted

    def _leave(self, *, interrupted: bool) -> None:
        if self._modes is not None:
            self._modes.restore(buffers=interrupted)
        self._modes = self._running = self._fixed = None

    def go_back(self, iteration: int, position: int) -> None:
        """To the state before a hook and all that follow it."""
        for place in sorted(self._before, reverse=True):
            if place >= (iteration, position):
                noted = self._before.pop(place)
                if place[0] == iteration:
                    noted.restore()

    def take_over(self, iteration: int, until: int, *, begin: int = 0) -> None:
        """Apply the noted results of the hooks after an iteration, in a replay.

        Args:
            iteration: completed iterations.
            until: only from the hooks before this one.
            begin: and not before that one.

        Raises:
            RecoveryError: a result is missing.
        """
        for position, hook in list(enumerate(self.due(iteration)))[begin:until]:
            noted = self._noted(hook, iteration, position) if hook.then is not None else _SKIPPED
            if noted == _SKIPPED and self.changes is None:
                continue
            before = self._note_before(iteration, position)
            if self.changes is not None:
                self.changes.put(hook.name, iteration, position)
            if noted != _SKIPPED:
                self._apply(hook, noted)
            before.complete()

    def _noted(self, hook: Hook, iteration: int, position: int) -> str:
        """The result of a hook, which is in this worker's log afterwards, too."""
        key = store_keys.between_result(iteration, position)
        noted: str | None = None
        if self._rendezvous.check([key]):
            with waiting("the result of a function between two steps", _ANSWER_S):
                noted = self._rendezvous.get(key).decode().partition(" ")[2]
        elif self.log is not None:
            noted = self.log.read(iteration, position)
        if noted is None:
            raise RecoveryError(
                f"the result of {hook.name}() after iteration {iteration - 1} was not noted, so what "
                "followed from it is unknown"
            )
        if self.log is not None:
            self.log.note(iteration, position, noted)
        return noted

    def _apply(self, hook: Hook, noted: str) -> None:
        assert hook.then is not None
        self.applying = True
        try:
            hook.then(json.loads(noted))
        finally:
            self.applying = False

    def _note(self, hook: Hook, iteration: int, position: int, generation: int, noted: str) -> None:
        """For replays."""
        if self.log is not None:
            self.log.note(iteration, position, noted)
        key = store_keys.between_result(iteration, position)
        self._writer.do(partial(self._compare, hook.name, key, generation, noted))

    def _compare(self, name: str, key: str, generation: int, noted: str) -> None:
        """Note a result, or compare it with what another worker has noted. In the writer's thread.

        What an earlier generation noted was not the last word: the hook is repeated.
        """
        ours, found = f"{generation} {noted}", ""
        while (now := self._rendezvous.compare_set(key, found, ours).decode()) != ours:
            if now.startswith(f"{generation} "):
                self.differs = self.differs or UsageError(
                    f"{name}() returned {noted} on worker {self._rank} and {now.partition(' ')[2]} on "
                    "another one. What follows from it must be the same on all workers: reduce or broadcast "
                    "it first."
                )
                self._on_difference()
                return
            found = now


def _written(hook: Hook, result: Any) -> str:
    """A result as text: numbers keep all their bits."""
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        result = result.item()
    try:
        text = json.dumps(result)
    except TypeError as error:
        raise UsageError(
            f"{hook.name}() returned {type(result).__name__}. What `then` is given must be numbers, texts, "
            f"lists and dictionaries of them ({error})."
        ) from error
    if len(text) > _LIMIT:
        raise UsageError(f"{hook.name}() returned {len(text)} characters, and the limit is {_LIMIT}.")
    return text
