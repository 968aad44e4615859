"""A worker's own state, as a part of it: noted before a step, checked after it, put back if need be."""

from __future__ import annotations

from swift_ft.checkpoint.completeness import Completeness
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.determinism import seed_step
from swift_ft.recovery.job_state import State
from swift_ft.runtime.start_values import StartValues
from swift_ft.runtime.worker.part import Interruption, Part, StepInfo
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.torch_adapters.fsdp import ShardedModels


class LocalState(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        status: is told whether the state is dirty.
        sharded: modules that ``fully_shard`` was applied to; none, as a rule.
        completeness: whether the state holds all that training changes.
        rollback: puts back the small changes of an interrupted step.
        start_values: what the script had set at first.
        seed: of all random state inside steps.
        data_of: whose random numbers this worker has, since it has data of its own; None where all workers
            have the same.
        first_life: False in a replacement, whose predecessor was found to be complete.
    """

    name = "state"

    def __init__(
        self,
        status: WorkerStatus,
        sharded: ShardedModels,
        completeness: Completeness,
        rollback: Rollback,
        start_values: StartValues,
        *,
        seed: int,
        data_of: int | None,
        first_life: bool,
    ) -> None:
        self._status = status
        self._sharded = sharded
        self._completeness = completeness
        self._rollback = rollback
        self._start_values = start_values
        self._seed = seed
        self._data_of = data_of
        self._first_life = first_life

    def start(self) -> None:
        self._completeness.watch()
        self._rollback.watch()
        self._start_values.agree()  # before any state arrives

    def open(self, state: State, begin: int) -> None:
        self._rollback.may_be_given()

    def begin(self, step: StepInfo) -> None:
        self._sharded.begin()  # first of all: the others look at the parameters
        if self._first_life:
            self._completeness.begin()
        self._rollback.begin(step.iteration, replayed=step.replayed, whole=step.computation > 0)
        self._start_values.step_begins()
        seed_step(self._seed, step.iteration, self._data_of)

    def again(self, step: StepInfo) -> None:
        self._rollback.back()

    def completed(self, step: StepInfo) -> None:
        self._completeness.completed()
        self._rollback.completed()

    def interrupted(self, interruption: Interruption) -> None:
        self._sharded.reset()
        if interruption.in_step:
            dirty = self._rollback.dirty()
            # A step that is verified has copies of all: others' reasons against an undo do not matter then.
            self._status.dirty = dirty if self._rollback.whole else dirty or self._status.dirty

    def put_back(self, interruption: Interruption) -> None:
        if interruption.in_step:
            self._rollback.back()

    def close(self) -> None:
        self._completeness.close()
        self._rollback.close()
