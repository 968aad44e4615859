"""A replica that computes its own gradients of one step, without its job (`offline/gradient_audit.py`).

The worker runs the user's script as a replacement does, loads a checkpoint, and begins the step after it.
Nobody else is there. So what the step communicates before it has all gradients cannot be served, and they may
follow from it: then there is no audit. Once they are there, they are noted, and the process ends at once: the
rest of the step would go on with gradients that nobody has averaged, and its script might write them down.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from swift_ft.checkpoint.own_gradients import OwnStep, read_own_steps
from swift_ft.checkpoint.worker_files import WorkerFiles
from swift_ft.config.worker_context import WorkerContext
from swift_ft.errors import RecoveryError, UsageError
from swift_ft.plain import from_plain
from swift_ft.program.system_exit import SessionExit
from swift_ft.recovery.job_state import State
from swift_ft.recovery.topology import is_whole_model
from swift_ft.runtime.data.digest import digest_of
from swift_ft.runtime.offline_replay import OfflineAssembly, OfflineCore, part_name
from swift_ft.runtime.script.script_line import script_line
from swift_ft.runtime.verify.own_gradients_part import OwnGradientsPart
from swift_ft.runtime.verify.step_inputs import StepInputs
from swift_ft.runtime.worker.core import WorkerCore
from swift_ft.runtime.worker.flow import Flow
from swift_ft.runtime.worker.parts import Parts
from swift_ft.runtime.worker.ports import Ports
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.torch_adapters.script_operations import Operation


def noted_step(out: Path, rank: int) -> OwnStep:
    """The step that a worker has noted.

    Raises:
        RecoveryError: it has come to an end without.
    """
    try:
        return from_plain(OwnStep, json.loads(_file(out, rank).read_text()))
    except FileNotFoundError as error:
        raise RecoveryError(f"the step of worker {rank} has ended without all of its gradients") from error


def _file(out: Path, rank: int) -> Path:
    return out / f"{part_name(rank)}.gradients.json"


class GradientsAssembly(OfflineAssembly):
    """The runtime of such a worker. The arguments are those of its base."""

    def _check_record(self) -> None:
        """Without a DDP model, another worker's step would be computed, or none."""
        if not is_whole_model(self.attached.holds):
            raise UsageError(
                "The script attaches no DDP model of all workers here, and did in the run: use the run's "
                "arguments."
            )

    def _new_own_gradients(self, due: Callable[[int], bool]) -> OwnGradientsPart:
        self._inputs = StepInputs(self._state, self._rollback.carried, digest_of, all_known=True)
        part = OwnGradientsPart(
            self._replicas, self._inputs, lambda _: True, lambda: 0, self._end, training=False
        )
        # Nobody else is there: from now on, what communicates in the step is decided here.
        self._replicas.forward_alone()
        self.phases.steps = _Alone(part)
        return part

    def _put_own_variables(self) -> None:
        """The checkpoint has those of the replica that has saved it."""
        files, iteration = WorkerFiles(self._store, self._context.run_id), self.status.iteration
        if (step := read_own_steps(files, self._context.rank).get(iteration)) is not None:
            self._inputs.put_variables(step.variables)

    def _end(self, _: int, step: OwnStep) -> None:
        assert self._context.offline is not None
        _file(Path(self._context.offline.out), self._context.rank).write_text(json.dumps(asdict(step)))
        os._exit(0)  # in the middle of a backward pass, which an exception would only interrupt

    def _new_core(self, parts: Parts, ports: Ports) -> WorkerCore:
        return _GradientsCore(self._context, self.status, parts, ports, self._put_own_variables)


class _GradientsCore(OfflineCore):
    """Loads the checkpoint, and begins one step.

    Args:
        context: the worker's place, as the next three are those of its base.
        status: see there.
        parts: see there.
        ports: see there.
        put_variables: gives the script the worker's own variables, once the checkpoint is loaded.
    """

    def __init__(
        self,
        context: WorkerContext,
        status: WorkerStatus,
        parts: Parts,
        ports: Ports,
        put_variables: Callable[[], None],
    ) -> None:
        super().__init__(context, status, parts, ports, save=lambda: None, note=lambda _: None)
        self._put_variables = put_variables

    def _execute(self, state: State) -> Flow[bool]:
        """Do what all workers would do that have lost their state. Then nobody is waited for."""
        yield from super()._execute(state)
        if self.status.known:
            yield self._put_variables
        return self.status.known

    def completed(self) -> Flow[None]:
        """The step is over, and has not ended the process: there is nothing more to compute."""
        yield lambda: None
        raise SessionExit(0)


class _Alone:
    """Decides about what the step communicates. See `script_operations.OperationInterceptor`.

    Args:
        part: notes the gradients.
    """

    def __init__(self, part: OwnGradientsPart) -> None:
        self._part = part
        self._averages = 0

    def begin(self, operation: Operation) -> Callable[[], None] | None:
        """Each bucket is averaged with nobody.

        Raises:
            UsageError: something else is communicated.
        """
        self._averages += 1
        if operation.name != "allreduce" or self._averages > self._part.buckets:
            raise UsageError(
                f"{script_line()} calls {operation.name} before the gradients of the step are complete: they "
                "may follow from what other replicas give, and no spare can compute them on its own"
            )
        return None
