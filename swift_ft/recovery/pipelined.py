"""One worker's stages under protection by logging: live, replayed, or serving from the log (paper §5)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store as Rendezvous

from swift_ft.config import WorkerContext
from swift_ft.determinism import derive_seed, seed_torch
from swift_ft.errors import RecoveryError
from swift_ft.logging import Direction, LogReader, MessageKey
from swift_ft.microbatch import StageChain
from swift_ft.pipeline import PipelineHook
from swift_ft.process_group import GenerationGroup
from swift_ft.recovery.aside import put_aside
from swift_ft.recovery.failures import hide_broken_schedules
from swift_ft.recovery.helping import Helping, HelpMode, Member, own_random_state
from swift_ft.recovery.job_state import State
from swift_ft.recovery.plan import Plan, Task
from swift_ft.recovery.replay import LoggedTraffic
from swift_ft.recovery.sharing import SharedReplay
from swift_ft.recovery.worker_log import WorkerLog, sent_tensor
from swift_ft.tied import TiedParameters
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
        helping: how survivors help in a replay.
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
        helping: Helping,
    ) -> None:
        self._context = context
        self._seed = seed
        self._helping = helping
        self._group = group
        self._log = log
        self._rendezvous = rendezvous
        self._traffic = LoggedTraffic(context.rank, context.workers, groups, seed, log.messages, on_compute)
        self._completed: int | None = None
        self._loaded = False
        self._inexact_until: int | None = None
        self._hook = PipelineHook(schedule, self._traffic, self._publish_metadata)
        self.tied = TiedParameters(self._hook, self._traffic)
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
        return bool(self._traffic.portion) or self._hook.shared is not None

    @property
    def known(self) -> bool:
        """Whether the shapes of all messages are known, so that no live warm-up is needed."""
        return self._hook.shapes.known or self._published(self.stages) is not None

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

    @property
    def why_unaided(self) -> str:
        """Why nobody helps in a replay of this worker's stages; empty if they can."""
        if self._context.helpers == 0:
            return "swift-run was given --helpers 0"
        if self._helping.build is None:
            return "attach_pipeline() was given no build"
        return self._hook.why_not_apart()

    def wants_checkpoint(self, committed: int | None) -> bool:
        """Whether the log may have gaps until the next one: what was rebuilt inexactly is not logged."""
        return self._inexact_until is not None and (committed or 0) < self._inexact_until

    @property
    def parts(self) -> int:
        """Among how many workers a replay can be spread."""
        if self.why_unaided:
            return 1
        limit = self._context.helpers
        return min(self._hook.microbatches, self._hook.microbatches if limit is None else 1 + limit)

    def reset(self) -> None:
        """Forget an aborted step."""
        self._hook.reset()

    def give_up_replay(self) -> None:
        """The replay is over, or turned out to be impossible."""
        traffic = self._traffic
        traffic.source, traffic.portion, traffic.inexact_from, self._hook.shared = None, (), None, None

    def begin_replay(self, state: State, task: Task) -> None:
        """Serve the next steps from the neighbours' logs.

        Raises:
            RecoveryError: if what is needed is not there.
        """
        if not self._hook.shapes.known:
            self._hook.shapes.adopt(self._shapes(self.stages))
        self._traffic.portion, self._loaded = task.portion, task.load is not None
        replayed = (self._context.rank, *task.portion)
        self._traffic.source = self._read_around(replayed, since=state.log_since, iteration=task.begin)

    def share(self, state: State, shared: SharedReplay) -> Member:
        """Take part in a shared replay, once its group stands: as an owner, in the steps that follow.

        Raises:
            RecoveryError: if what is needed is not there.
            Exception: what the script's ``build`` raised.
        """
        chain, group = self._chain(shared), self._group.close
        assert group is not None
        source = self._traffic.source or self._read_around(
            shared.owners, since=state.log_since, iteration=shared.begin
        )
        member = Member(
            shared,
            self._context.rank,
            group,
            chain,
            self._hook.holders(),
            self._hook.microbatches,
            source,
            self._helping.mode,
        )
        if self._context.rank in shared.owners:
            self._hook.shared = member
            if self._helping.mode != HelpMode.ORDERED:
                # The first iteration after the checkpoint begins with exact parameters.
                self._traffic.inexact_from = shared.begin + self._loaded
                self._inexact_until = shared.until
        return member

    def help(
        self,
        state: State,
        shared: SharedReplay,
        own: Iterable[torch.Tensor],
        on_iteration: Callable[[int], None],
    ) -> None:
        """Compute for others, with this worker's own state out of the way.

        Args:
            state: of the job.
            shared: the replay.
            own: all large state of this worker.
            on_iteration: told before each iteration.

        Raises:
            RuntimeError: as torch does, if a member is gone.
            Exception: as :meth:`share`.
        """
        helping = self._helping
        with (
            own_random_state(),
            put_aside(own, memory_bytes=helping.memory_bytes, folder=helping.folder),
        ):
            member = self.share(state, shared)
            for iteration in range(shared.begin, shared.until):
                on_iteration(iteration)
                member.step(iteration)

    def _chain(self, shared: SharedReplay) -> StageChain:
        """The stages of all owners: this worker's own, and others that are built for now."""
        hook, build = self._hook, self._helping.build
        assert build is not None
        stages: dict[int, Any] = {
            s.stage_index: s for s in hook.stages if self._context.rank in shared.owners
        }
        wanted = [s for s, rank in hook.holders().items() if rank in shared.owners and s not in stages]
        shapes = self._shapes(wanted)
        with own_random_state():
            for index in wanted:
                module = build(index).to(hook.device).train()
                stages[index] = hook.other_stage(module, index, shapes[index])

        def seed(iteration: int, stage: int, microbatch: int) -> None:
            seed_torch(derive_seed(self._seed, iteration, stage, microbatch, self._traffic.replica))

        return StageChain(hook.schedule, stages, seed, add_up=self._helping.mode == HelpMode.ALLREDUCE)

    def _read_around(self, ranks: Sequence[int], *, since: int, iteration: int) -> LogReader:
        """The logs of the workers next to some, which are not read themselves."""
        holders = self._hook.holders()
        near = {s + step for s, rank in holders.items() if rank in ranks for step in (-1, +1)}
        if self._context.rank in ranks:
            near |= {*self.tied.stages}
        beside = {rank for stage, rank in holders.items() if stage in near}
        return self._log.read(sorted(beside - set(ranks)), since=since, iteration=iteration)

    def prepare(self, plan: Plan) -> None:
        """Before the group is formed: decide whether shapes are exchanged again."""
        if plan.warm_up:
            self._hook.shapes.forget()
        elif not self._hook.shapes.known and (metadata := self._published(self.stages)) is not None:
            self._hook.shapes.adopt(metadata)

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
            self._hook.serve(sent, live, self.tied.exchange())
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

    def _shapes(self, stages: Iterable[int]) -> dict[int, dict[str, Any]]:
        if (published := self._published(stages)) is None:
            raise RecoveryError("the shapes of the lost stages' messages were never published")
        return published

    def _published(self, stages: Iterable[int]) -> dict[int, dict[str, Any]] | None:
        keys = {stage: f"stage/{stage}" for stage in stages}
        if not self._rendezvous.check(list(keys.values())):
            return None
        return {stage: json.loads(self._rendezvous.get(key)) for stage, key in keys.items()}
