"""Finds silent data corruption by computing steps again, as a part of a worker.

Each N-th step is computed twice, from the same state, data and random numbers, before it counts. What each
worker gives to others, and the state at the end, is compared bit for bit. If anything differs on any worker,
all compute the step a third time, which shows which of the first two was wrong.

    begin ─▶ the script's step ─▶ judge ─┬▶ again ─▶ begin ─▶ ...      all workers alike
                                         └▶ it counts                  the last computation stays

The repetition is the one of a step that a loss has interrupted (`checkpoint/step/rollback.py`), but that
parameters and the optimizer's state are copied when a verified step begins: nothing has to be undone. If the
step has changed something large that nobody knew to change, there is no copy to go back to, and it counts as
it is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Hashable
from dataclasses import asdict
from enum import StrEnum
from typing import Any, Protocol

from swift_ft.checkpoint.state_digest import listed
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import first_line
from swift_ft.faults.failpoints import Point, hit
from swift_ft.plain import from_plain
from swift_ft.recovery import events as ev
from swift_ft.recovery.causes import Cause
from swift_ft.recovery.job_state import State
from swift_ft.runtime.verify.evidence import Evidence
from swift_ft.runtime.verify.verdict import (
    Account,
    Fault,
    Verdict,
    account_of,
    differences,
    judge,
    own_faults,
)
from swift_ft.runtime.worker.part import Interruption, Part, StepInfo
from swift_ft.runtime.worker.ports import Job, Judgement
from swift_ft.torch_adapters.exchange import any_of_all, texts_of_all
from swift_ft.torch_core import outputs
from swift_ft.units import named

_logger = logging.getLogger(__name__)

_COUNTS = Judgement()
_AGAIN = Judgement(again=True)


class OnCorruption(StrEnum):
    """The choice of what follows when a machine has computed something wrong."""

    WARN = "warn"
    """The journal and the log name it, and training goes on."""
    DRAIN = "drain"
    """The machine is asked to leave as well: a spare takes its place."""
    STOP = "stop"
    """The job ends."""
    BACK = "back"
    """After an audit, all go back to the last checkpoint that was audited. Here as ``DRAIN``."""


class Epochs(Protocol):
    """The place of a run among its epochs (:class:`swift_ft.runtime.epoch_top.Epochs`).

    Attributes:
        began: iterations that were complete as the present one began.
    """

    began: int


class VerifyPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`. It is the core's ``Verification`` as well.

    Args:
        rank: this worker.
        state: what the session protects.
        job: where a difference is noted.
        epochs: where it is among them.
        every: each so many iterations one is verified; 0 for none.
        act: what follows when a machine has computed something wrong.
        uncopied: what the running step has changed, and cannot be put back.
    """

    name = "verify"

    def __init__(
        self,
        rank: int,
        state: TrainingState,
        job: Job,
        epochs: Epochs,
        every: int,
        act: OnCorruption,
        uncopied: Callable[[], list[str]],
    ) -> None:
        self._rank = rank
        self._state = state
        self._job = job
        self._epochs = epochs
        self._every = every
        self._act = act
        self._uncopied = uncopied
        self._runs: list[Evidence] = []
        self._proven = 0
        self._corrected: int | None = None  # completed iterations, with the last step that was put right

    # --------------------------------------------------------------------------------- of the worker's core

    def computation(self, step: StepInfo) -> int:
        """The number of the computation of a step that begins, from 1; 0 for a step that is not verified."""
        plan = self._job.state.plan
        if not self._every or step.replayed or not step.repeatable or not self._is_due(step):
            return 0
        # Some may have completed the first iteration after a recovery before it, and only send again. And the
        # very first one differs from others: DDP makes its buckets anew after it, for example.
        if plan is None or plan.resume == step.iteration:
            return 0
        return len(self._runs) + 1

    def _is_due(self, step: StepInfo) -> bool:
        """Each N-th step; if that is the last one of an epoch, which may not be run again, the next one.

        No worker's history decides: one may have completed some steps before a recovery, and only send again.
        """
        after_epoch = step.iteration == self._epochs.began
        return step.completed % self._every == 0 or (after_epoch and step.iteration % self._every == 0)

    def judge(self, step: StepInfo) -> Judgement:
        """Whether a step counts that was computed once more, and what its computations show."""
        outputs.listen(self.name, None)
        runs = self._runs
        runs[-1].end(self._tensors())
        if len(runs) > 1:
            hit(Point.VERIFY, step.iteration)
        # What only this worker does comes before: an error of it is no loss.
        changed = self._uncopied() if len(runs) == 1 else []
        differs = len(runs) == 2 and bool(differences(*runs))
        try:
            if len(runs) == 1:
                return self._judge_first(step, changed)
            if len(runs) == 2 and any_of_all(differs):
                return _AGAIN
            verdict = self._verdict() if len(runs) > 2 else None
        except RuntimeError as error:
            return Judgement(cause=first_line(error))
        self._proven += verdict is None
        runs.clear()
        if verdict is not None:
            self._corrected = step.completed if verdict.right else self._corrected
            self._tell(step, verdict)
        return _COUNTS

    def _judge_first(self, step: StepInfo, changed: list[str]) -> Judgement:
        """Once more, unless a worker cannot go back: a value that is changed twice is another one."""
        if not any_of_all(bool(changed)):
            return _AGAIN
        self._runs.clear()
        if changed:
            _logger.warning(
                "Iteration %d is not verified: it has changed %s in place for the first time, so there is no "
                "copy yet from which it could be computed again. Later ones are verified.",
                step.iteration,
                listed(changed),
                extra={"event": "step_not_verified", "iteration": step.iteration},
            )
        return _COUNTS

    def _tensors(self) -> dict[str, Any]:
        buffers = {
            f"{part}.{name}": buffer
            for part, module in self._state.modules.items()
            for name, buffer in module.named_buffers()
        }
        return {**buffers, **self._state.named_tensors(), **self._state.inner_tensors()}

    def _verdict(self) -> Verdict:
        """Of all workers together: they exchange what differs, and then who is at fault."""
        mine = account_of(self._runs, self._proven)
        accounts = [from_plain(Account, one) for one in _exchanged(asdict(mine))]
        own = own_faults(self._rank, self._runs[0].places, accounts)
        plain = [None if fault is None else [fault.place, list(fault.names)] for fault in own]
        faults = [
            [None if fault is None else Fault(fault[0], tuple(fault[1])) for fault in of_rank]
            for of_rank in _exchanged(plain)
        ]
        return judge(accounts, faults, [self._place(rank) for rank in range(len(accounts))])

    def _place(self, rank: int) -> Hashable:
        """The part of the model that a worker computes: its stages, and of a LayerStack its layers."""
        state = self._job.state
        status = state.round.statuses.get(rank)
        return status.stages if status is not None else (), state.layouts.placed.get(rank, ())

    def _tell(self, step: StepInfo, verdict: Verdict) -> None:
        """One worker tells the journal. What follows is everybody's, so it follows from there."""
        if self._rank != 0:
            return
        ranks = tuple(sorted(verdict.faults))
        first = [*verdict.faults.values(), *([] if verdict.arrived is None else [verdict.arrived])]
        places = "; ".join(f"{listed(fault.names)} in {fault.place}" for fault in first)
        state = self._job.append(
            ev.StepDiffered(
                generation=step.generation,
                iteration=step.iteration,
                ranks=ranks,
                kind=verdict.kind,
                tensors=places,
                right=verdict.right,
            )
        )
        slots = sorted({state.slot_of_rank(rank) for rank in ranks})
        if not verdict.named or not slots:
            return
        if self._act == OnCorruption.STOP:
            have, it = ("have", "them") if len(slots) > 1 else ("has", "it")
            self._job.append(
                ev.JobClosed(
                    reason=f"{named('machine', slots)} {have} computed iteration {step.iteration} wrong: "
                    f"{places} ({named('worker', ranks)}). Leave {it} out, and go on with --resume from the "
                    "last checkpoint.",
                    cause=Cause.MACHINE,
                )
            )
        elif self._act != OnCorruption.WARN and len(slots) == 1 and (machine := state.members[slots[0]]):
            self._job.append(ev.DrainRequested(machine=machine, asked_by=f"--on-corruption {self._act}"))

    # ---------------------------------------------------------------------------------- moments of a part

    def begin(self, step: StepInfo) -> None:
        if step.computation:
            del self._runs[step.computation - 1 :]
            evidence = Evidence()
            self._runs.append(evidence)
            outputs.listen(self.name, evidence.note)

    def why_checkpoint(self, committed: int | None) -> str:
        # The log may have wrong messages of it beside the right ones, and a replay refuses what is unlike.
        if self._corrected is None or (committed or 0) >= self._corrected:
            return ""
        return f"iteration {self._corrected - 1} was computed wrong once"

    def interrupted(self, interruption: Interruption) -> None:
        self._forget()

    def open(self, state: State, begin: int) -> None:
        self._forget()

    def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        outputs.listen(self.name, None)
        self._runs.clear()


def _exchanged(mine: Any) -> list[Any]:
    """The words of each worker, by rank."""
    return [json.loads(text) for text in texts_of_all(json.dumps(mine))]
