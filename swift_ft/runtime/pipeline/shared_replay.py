"""One worker's part in a replay that several workers share, as an owner or as a helper (paper §5.2).

owner     log is open ─▶ group is formed ─▶ joins ─▶ takes its steps in the user's loop ─▶ ends
helper    offloads, builds, opens logs ─▶ group is formed ─▶ computes ─▶ has its own state back
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swift_ft.determinism import (
    derive_seed,
    host_random_state,
    random_state,
    seed_torch,
    set_host_random_state,
    set_random_state,
)
from swift_ft.faults.failpoints import Point, hit
from swift_ft.logging import LogReader
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.recovery.job_state import State
from swift_ft.runtime.helpers.member import GradientReduction, Member
from swift_ft.runtime.helpers.offload import offload
from swift_ft.runtime.pipeline.log_interceptor import LogInterceptor
from swift_ft.runtime.pipeline.published_shapes import PublishedShapes
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.torch_adapters.pipelining.hook import PipelineHook
from swift_ft.torch_adapters.pipelining.microbatch import StageChain
from swift_ft.torch_adapters.process_group import GenerationGroup


@dataclass(frozen=True, slots=True)
class Helping:
    """The way in which survivors help.

    Attributes:
        build: takes a stage index and makes that stage's module as the script does; None without helpers.
        mode: how gradients are added up.
        memory_bytes: host memory that a helper's own state may take while it helps; None for no limit. The
            rest goes to the local disk.
        folder: on the local disk, for that rest; by default among the system's temporary files.
    """

    build: Callable[[int], nn.Module] | None = None
    mode: GradientReduction = GradientReduction.ORDERED
    memory_bytes: int | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The things that a member needs before it can begin.

    Attributes:
        source: reads the logs of the owners' neighbours.
        modules: built for the replay, by stage.
        shapes: of these stages' messages.
    """

    source: LogReader
    modules: Mapping[int, nn.Module]
    shapes: Mapping[int, dict[str, Any]]


class SharedReplay:
    """Takes part in replays whose microbatches are divided among several workers.

    Args:
        helping: how survivors help.
        hook: on this worker's schedule and stages.
        stack: has the layers of its stages; None if the script divides its model itself.
        shapes: of all stages' messages.
        log: reads the logs of other workers.
        group: has the group of all members, once that is formed.
    """

    def __init__(
        self,
        helping: Helping,
        hook: PipelineHook,
        interceptor: LogInterceptor,
        stack: LayerStack | None,
        shapes: PublishedShapes,
        log: WorkerLog,
        group: GenerationGroup,
    ) -> None:
        self._helping = helping
        self._hook = hook
        self._interceptor = interceptor
        self._stack = stack
        self._shapes = shapes
        self._log = log
        self._group = group
        self._inexact_until: int | None = None
        self._exact_at: int | None = None  # where an inexact replay began

    @property
    def exact(self) -> bool:
        """Whether what is computed now is the original to the bit: not in an inexact replay."""
        return self._interceptor.inexact_from is None

    def needs_checkpoint(self, committed: int | None) -> bool:
        """Whether the log may have gaps until the next one, because an inexact replay logs nothing."""
        return self._inexact_until is not None and (committed or 0) < self._inexact_until

    def has_rounded(self, iteration: int) -> bool:
        """Whether a replay that is not complete has brought the state there with other roundings.

        No replay without helpers could go on from it: messages would differ from the original's.
        """
        return self._exact_at is not None and iteration > self._exact_at

    def loaded(self) -> None:
        """The state is a checkpoint's again."""
        self._exact_at = None

    @property
    def helped_exactly(self) -> bool:
        """Whether a stage that helpers rebuild is the same to the bit."""
        return self._helping.mode == GradientReduction.ORDERED

    # ------------------------------------------------------------------------------------------ owner

    def join(self, state: State, replay: ParallelReplay, *, loaded: bool) -> None:
        """As an owner whose log is open, take part in the following steps, once the group is formed.

        Args:
            replay: its members and iterations.
            loaded: it begins with the state of a checkpoint.

        Raises:
            RecoveryError: if a log does not have what is needed.
            Exception: what the script's ``build`` raised.
        """
        self._hook.shared = self._member(replay, self._prepare(state, replay))
        if not self.helped_exactly:
            # The first iteration after the checkpoint begins with exact parameters.
            self._interceptor.inexact_from = replay.begin + loaded
            self._inexact_until = replay.until
            if self._exact_at is None:
                self._exact_at = replay.begin

    def end(self) -> None:
        """The replay is complete, or it cannot continue."""
        self._hook.shared = None
        self._interceptor.inexact_from = None

    # ----------------------------------------------------------------------------------------- helper

    def prepare_help(
        self, state: State, replay: ParallelReplay, own: Iterable[torch.Tensor], until: ExitStack
    ) -> Callable[[], None]:
        """Prepare to compute for others, and offload this worker's own state, before a group is formed.

        The owners load at that time.

        Args:
            replay: its members and iterations.
            own: all large state of this worker.
            until: closed when it is over, which brings that state back.

        Returns:
            What computes, once the group is formed. It raises what torch does, if a member is gone.

        Raises:
            Exception: as :meth:`join`; and what :func:`offload` raises.
        """
        helping = self._helping
        until.enter_context(_own_random_state())
        until.enter_context(offload(own, memory_bytes=helping.memory_bytes, folder=helping.folder))
        prepared = self._prepare(state, replay)

        def help_owners() -> None:
            # Not earlier: the group is formed once this is prepared, while the owners load (decision 33).
            member = self._member(replay, prepared)
            for iteration in range(replay.begin, replay.until):
                hit(Point.HELP, iteration)
                member.step(iteration)

        return help_owners

    # ------------------------------------------------------------------------------------ each member

    def _prepare(self, state: State, replay: ParallelReplay) -> _Prepared:
        """Make what a member needs before it can begin. No group is used."""
        hook = self._hook
        # An owner has opened its logs already.
        source = self._interceptor.source or self._log.read(
            hook.neighbours(replay.owners), since=state.checkpoints.log_since, iteration=replay.begin
        )
        here = hook.stage_indices if self._interceptor.rank in replay.owners else ()
        wanted = [s for s, rank in hook.holders().items() if rank in replay.owners and s not in here]
        build = self._helping.build or self._build_layers
        with _own_random_state():
            modules = {stage: build(stage).to(hook.device).train() for stage in wanted}
        return _Prepared(source, modules, self._shapes.of_lost(wanted))

    def _build_layers(self, stage: int) -> nn.Module:
        stack = self._stack
        assert stack is not None
        return stack.module_of(stage, self._shapes.layout or stack.cut_of(stack.begun))

    def _member(self, replay: ParallelReplay, prepared: _Prepared) -> Member:
        chain, group = self._chain(replay, prepared), self._group.helper_group
        assert group is not None
        return Member(
            replay,
            self._interceptor.rank,
            group,
            chain,
            self._hook.holders(),
            self._hook.microbatches,
            prepared.source,
            self._helping.mode,
        )

    def _chain(self, replay: ParallelReplay, prepared: _Prepared) -> StageChain:
        """The stages of all owners: this worker's own, and others that are built for the replay."""
        hook, interceptor = self._hook, self._interceptor
        stages: dict[int, Any] = {s.stage_index: s for s in hook.stages if interceptor.rank in replay.owners}
        for index, module in prepared.modules.items():
            stages[index] = hook.other_stage(module, index, prepared.shapes[index])

        def seed(iteration: int, stage: int, microbatch: int) -> None:
            interceptor.computing = iteration, microbatch
            seed_torch(derive_seed(interceptor.seed, iteration, stage, microbatch, interceptor.replica))

        return StageChain(hook.schedule, stages, seed)


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Restore the random state after the block, so that a survivor's next step draws its own numbers."""
    host, device = host_random_state(), random_state()
    try:
        yield
    finally:
        set_host_random_state(host)
        set_random_state(device)
