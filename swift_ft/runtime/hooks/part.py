"""Functions of the script between two steps, as a part of a worker."""

from __future__ import annotations

from collections.abc import Callable

from swift_ft.coordination.progress import ProgressBoard
from swift_ft.runtime.hooks.between import Between
from swift_ft.runtime.script.script_phases import ScriptPhase, ScriptPhases
from swift_ft.runtime.worker.part import Interruption, Part, Round
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.torch_adapters.device_waits import DeviceWaits


class HooksPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part` and :class:`swift_ft.runtime.worker.ports.Hooks`.

    Args:
        status: knows which iteration the state is at.
        between: calls these functions.
        phases: where the script is.
        progress: where the worker publishes what it does.
        aside: says whether a pipeline is called between two steps.
        interruption_of: why what raised an exception was interrupted; None if it has failed by itself.
        on_device: waits for what a function has enqueued: its failure may show there first, or not at all.
    """

    name = "hooks"

    def __init__(
        self,
        status: WorkerStatus,
        between: Between,
        phases: ScriptPhases,
        progress: ProgressBoard,
        aside: Callable[[bool], None],
        interruption_of: Callable[[BaseException], str | None],
        on_device: DeviceWaits,
    ) -> None:
        self._status = status
        self._between = between
        self._phases = phases
        self._progress = progress
        self._aside = aside
        self._interruption_of = interruption_of
        self._on_device = on_device

    @property
    def repeats(self) -> bool:
        """See :class:`swift_ft.runtime.worker.ports.Hooks`."""
        return self._between.repeats

    @repeats.setter
    def repeats(self, repeats: bool) -> None:
        self._between.repeats = repeats

    def check(self) -> None:
        """See :class:`swift_ft.runtime.worker.ports.Hooks`."""
        self._between.check()

    def due(self, iteration: int) -> int:
        """See :class:`swift_ft.runtime.worker.ports.Hooks`."""
        return len(self._between.due(iteration))

    def do(self, iteration: int, position: int, generation: int) -> str | None:
        """See :class:`swift_ft.runtime.worker.ports.Hooks`."""
        self._progress.publish(iteration, "between")
        self._phases.phase = ScriptPhase.HOOK
        self._aside(True)
        self._on_device.begin()
        try:
            self._between.run(iteration, position, generation, self._phases, self._on_device.finish)
        except BaseException as error:
            if (interruption := self._interruption_of(error)) is not None:
                return interruption  # and no more: the traceback holds on to the group
            raise
        finally:
            self._phases.phase = ScriptPhase.OVER
            self._aside(False)
        return None

    def take_over(self, iteration: int, until: int, *, begin: int = 0) -> None:
        """See :class:`swift_ft.runtime.worker.ports.Hooks`."""
        self._between.take_over(iteration, until, begin=begin)

    def interrupted(self, interruption: Interruption) -> None:
        if not interruption.in_step:
            self._status.dirty = self._between.dirty() or self._status.dirty

    def put_back(self, interruption: Interruption) -> None:
        if not interruption.in_step:
            self._between.interrupted()

    def prepare(self, round: Round) -> None:
        plan = round.plan
        if plan.parts_from is not None and self._status.iteration == plan.resume:
            self._between.go_back(plan.resume, plan.parts_from)

    def live(self, round: Round) -> None:
        self._between.say_if_stopped_before(self._status.iteration, self._status.steps)
