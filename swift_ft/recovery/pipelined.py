"""One worker's stages under protection by logging: live, replayed, or serving from the log (paper §5)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store as Rendezvous

from swift_ft.config import WorkerContext
from swift_ft.errors import RecoveryError
from swift_ft.logging import Direction, MessageKey
from swift_ft.pipeline import PipelineHook
from swift_ft.process_group import GenerationGroup
from swift_ft.recovery.failures import hide_broken_schedules
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan, Task
from swift_ft.recovery.replay import LoggedTraffic
from swift_ft.recovery.worker_log import WorkerLog, sent_tensor
from swift_ft.waits import Waits

__all__ = ["LoggedPipeline"]


class LoggedPipeline:
    """A schedule whose messages are logged, and can be had again.

    Args:
        schedule: any schedule of ``torch.distributed.pipelining``.
        context: the worker's place.
        groups: by machine; messages inside a group are not logged.
        seed: of the run.
        log: where messages go.
        rendezvous: where the shapes of messages are published.
        group: makes the pipeline's group anew in each generation.
        on_compute: told before each computation (faults of tests).
    """

    def __init__(
        self,
        schedule: Any,
        *,
        context: WorkerContext,
        groups: Sequence[int],
        seed: int,
        log: WorkerLog,
        rendezvous: Rendezvous,
        group: GenerationGroup,
        on_compute: Callable[[int, int, Direction], None],
    ) -> None:
        self._context = context
        self._log = log
        self._rendezvous = rendezvous
        self._traffic = LoggedTraffic(context.rank, context.workers, groups, seed, log.messages, on_compute)
        self._completed: int | None = None
        self._hook = PipelineHook(schedule, self._traffic, self._publish_metadata)
        waits = Waits()
        group.follow(self._hook.group, self._hook.renew, aborted=waits.abort)
        if self._hook.device.type == "cpu":  # elsewhere the training thread's stream is what waits
            waits.install()
        hide_broken_schedules()

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages on this worker."""
        return self._hook.stage_indices

    @property
    def pipeline(self) -> int:
        """Tells this pipeline from its replicas."""
        return self._hook.pipeline

    @property
    def num_stages(self) -> int:
        """All stages of the pipeline."""
        return self._hook.num_stages

    @property
    def replaying(self) -> bool:
        """Whether the next step is served from the log."""
        return self._traffic.source is not None

    @property
    def joint(self) -> bool:
        """Whether others take part in the replay."""
        return bool(self._traffic.portion)

    @property
    def known(self) -> bool:
        """Whether the shapes of all messages are known, so that no live warm-up is needed."""
        return self._hook.initialised or self._published_metadata() is not None

    def begin(self, iteration: int, replica: int) -> None:
        """A step begins, on this replica of the pipeline."""
        self._traffic.iteration, self._traffic.replica = iteration, replica
        self._traffic.inside.begin(iteration)
        self._traffic.sent.clear()

    def completed(self) -> None:
        """The step that began last ran to its end."""
        self._completed = self._traffic.iteration

    @property
    def sent(self) -> Mapping[int, int]:
        """Payload bytes to each other machine in the step that began last."""
        return {slot: size for slot, size in self._traffic.sent.items() if slot != self._context.slot}

    def serves(self, iteration: int) -> bool:
        """Whether all that was sent in an iteration can be sent again."""
        return self._completed == iteration and self._traffic.inside.has_all_of(iteration)

    def reset(self) -> None:
        """Forget an aborted step."""
        self._hook.reset()

    def give_up_replay(self) -> None:
        """The replay is over, or turned out to be impossible."""
        self._traffic.source, self._traffic.portion = None, ()

    def begin_replay(self, state: State, task: Task) -> None:
        """Serve the next steps from the neighbours' logs.

        Raises:
            RecoveryError: if what is needed is not there.
        """
        metadata = self._published_metadata()
        if metadata is None:
            raise RecoveryError("the shapes of this stage's messages were never published")
        if not self._hook.initialised:
            self._hook.adopt_metadata(metadata)
        here = set(self.stages)
        near = {s + step for s in here for step in (-1, +1)} - here
        beside = {rank for stage, rank in self._hook.holders().items() if stage in near}
        ranks = sorted(beside - set(task.portion))
        self._traffic.portion = task.portion
        self._traffic.source = self._log.read(ranks, since=state.log_since, iteration=task.begin)

    def prepare(self, plan: Plan) -> None:
        """Before the group is formed: decide whether shapes are exchanged again."""
        if plan.warm_up:
            self._hook.forget_metadata()
        elif not self._hook.initialised and (metadata := self._published_metadata()) is not None:
            self._hook.adopt_metadata(metadata)

    def serve(self, state: State, plan: Plan) -> str | None:
        """One iteration ahead: take part in the interrupted one from this worker's own log.

        Returns:
            Why that was broken off; None if it was not.
        """
        own = self._log.read([self._context.rank], since=state.log_since, iteration=plan.resume)

        def live(rank: int) -> bool:
            return not plan.tasks[rank].serve

        def sent(key: MessageKey, device: torch.device) -> torch.Tensor:
            kept = self._traffic.inside.get(key)
            return sent_tensor(own, key, device) if kept is None else kept

        self._traffic.iteration = plan.resume
        self._traffic.expected = own.receipt
        try:
            self._hook.serve(sent, live)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            self._traffic.expected = None
        return None

    # ----------------------------------------------------------------------------------------- shapes

    def _publish_metadata(self, metadata: dict[int, dict[str, Any]]) -> None:
        """Before the first message: whoever replaces this worker must know the shapes."""
        for stage, shapes in metadata.items():
            self._rendezvous.set(f"stage/{stage}", json.dumps(shapes))

    def _published_metadata(self) -> dict[int, dict[str, Any]] | None:
        keys = {stage: f"stage/{stage}" for stage in self.stages}
        if not self._rendezvous.check(list(keys.values())):
            return None
        return {stage: json.loads(self._rendezvous.get(key)) for stage, key in keys.items()}
