"""A replica that computes its own gradients of one step, without its job (`offline/gradient_audit.py`).

The worker runs the user's script as a replacement does, loads a checkpoint, and begins the step after it.
Nobody else is there. So a step that communicates before its gradients are computed cannot be audited: they
may follow from what others give. Whatever it communicates after that is over at once, and leaves its tensors
as they are. The gradients are noted before they would be averaged, and the script ends with the step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from swift_ft.checkpoint.own_gradients import OwnGradients
from swift_ft.checkpoint.state_digest import StateDigests
from swift_ft.errors import RecoveryError, UsageError
from swift_ft.recovery.audit_orders import is_whole_model
from swift_ft.recovery.job_state import State
from swift_ft.runtime.offline_replay import OfflineAssembly, OfflineCore, part_name
from swift_ft.runtime.script.script_line import script_line
from swift_ft.runtime.verify.own_gradients_part import OwnGradientsPart
from swift_ft.runtime.worker.core import Ports, WorkerCore
from swift_ft.runtime.worker.flow import Flow
from swift_ft.runtime.worker.part import Part
from swift_ft.runtime.worker.parts import Parts
from swift_ft.torch_adapters.script_operations import Operation


def noted_gradients(out: Path, rank: int) -> StateDigests:
    """The digests of the gradients that a worker has noted.

    Raises:
        RecoveryError: it has come to an end without.
    """
    try:
        digests: dict[str, int] = json.loads(_file(out, rank).read_text())
    except FileNotFoundError as error:
        raise RecoveryError(f"worker {rank} has ended without a step") from error
    return digests


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

    def _end_setup(self) -> None:
        super()._end_setup()
        self._replicas.forward_alone()

    def _own_gradients(self) -> Iterator[Part]:
        part = OwnGradientsPart(lambda _: True, OwnGradients(), self._write)
        self.phases.steps = _Alone(part)
        yield part

    def _write(self, own: OwnGradients) -> None:
        assert self._context.offline is not None
        (digests,) = own.digests.values()
        _file(Path(self._context.offline.out), self._context.rank).write_text(json.dumps(dict(digests)))

    def _new_core(self, parts: Parts, ports: Ports) -> WorkerCore:
        return _GradientsCore(self._context, self.status, parts, ports, self._save_elsewhere, self._note)


class _GradientsCore(OfflineCore):
    """Loads the checkpoint, and takes one step."""

    def _execute(self, state: State) -> Flow[bool]:
        """Do what all workers would do that have lost their state. Then nobody is waited for."""
        yield from super()._execute(state)
        return self.status.known

    def completed(self) -> Flow[None]:
        """The step is over: the script is, too."""
        yield partial(self.parts.completed, self.step)
        raise SystemExit(0)


class _Alone:
    """Decides about what the step communicates. See `script_operations.OperationInterceptor`.

    Args:
        part: knows the gradients.
    """

    def __init__(self, part: OwnGradientsPart) -> None:
        self._part = part

    def begin(self, operation: Operation) -> Callable[[], None] | None:
        """Nothing is sent, and nothing comes.

        Raises:
            UsageError: the gradients are not computed yet.
        """
        if not self._part.has_begun:
            raise UsageError(
                f"{script_line()} calls {operation.name} before the gradients of the step are averaged: they "
                "may follow from what other replicas give, and no spare can compute them on its own"
            )
        return None
