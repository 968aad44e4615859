"""What a user meets: a session around the training loop.

session = swift_ft.Session({"model": model, "optimizer": optimizer}, store="s3://bucket/run7")
session.attach_pipeline(schedule)           # or session.attach_ddp(model)
for step in session.steps(10_000):
    with step:
        ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from swift_ft.config import WorkerContext
from swift_ft.errors import NotAttachedError, RecoveryError, SessionInUseError, UnsupportedError, UsageError
from swift_ft.logging import Compress, LogBudget, LogOptions, Ship, Store
from swift_ft.metrics import SessionMetrics, serve_as_told
from swift_ft.planning.forecast import Forecast
from swift_ft.profile import Profile, read_groups
from swift_ft.recovery.executor import Executor
from swift_ft.recovery.helping import Helping, HelpMode
from swift_ft.recovery.state import TrainingState
from swift_ft.tied import TiedParameters

__all__ = ["Session", "Step"]

E = TypeVar("E", bound=StrEnum)

_active: Session | None = None

_BUDGET = LogBudget()
_SMALLEST_BUDGET_BYTES = 1 << 20


class Step:
    """One iteration. ``with step:`` swallows a peer's death and nothing else.

    Attributes:
        index: the iteration, counted from 0. Look batches up by it, so that a repeated or replayed step sees
            the same data.
        replayed: the step is served from the log: its results existed before.
    """

    def __init__(self, index: int, replayed: bool, is_lost_touch: Callable[[BaseException], bool]) -> None:
        self.index = index
        self.replayed = replayed
        self._entered = self._left = False
        self._is_lost_touch = is_lost_touch
        self._cause: str | None = None
        self._failure: RecoveryError | None = None

    def __enter__(self) -> Step:
        """Begin the step."""
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the step. The recovery waits until this block is left: its traceback holds on to the group."""
        self._left = error is None
        if isinstance(error, RecoveryError):
            self._cause, self._failure = str(error), error.with_traceback(None)
        elif error is not None and self._is_lost_touch(error):
            self._cause = str(error).splitlines()[0]
        return self._cause is not None


class Session:
    """Protects a training against the death of machines.

    Args:
        state: what is to be protected, by name: modules, optimizers, and anything small with ``state_dict()``
            and ``load_state_dict()`` (learning rate schedulers, gradient scalers, a data position).
        store: URL or path for logs and checkpoints that every machine reaches.
        checkpoint_every: iterations between two global checkpoints. Logs are kept for so long.
        keep_checkpoints: committed checkpoints to keep.
        seed: of torch's random state inside steps, which is derived per (seed, iteration, stage, microbatch).
        log_budget_bytes: what the log of one machine may take, of memory and of disk. A plain number is for
            each of the two.
        ship: ``"always"``, or ``"on-failure"`` to keep segments on the local disk until a machine is lost.
        local: folder on the local disk for segments on their way to the store. A store behind a network has
            one in any case, by default among the system's temporary files.
        compress: ``"auto"`` packs messages while the store takes fewer bytes a second than a core packs;
            ``"never"``, ``"always"``.
        groups: machines that recover together (paper §5.3), by slot: ``[[0], [1, 2], [3]]``, or the file that
            ``swift-group --out`` wrote. Messages inside a group are not logged; when one of its machines is
            lost, all of it goes back to the checkpoint and replays. By default each machine is a group.

    Raises:
        NotLaunchedError: outside of ``swift-run``.
        SessionInUseError: if this process has a session already.
        StoreNotWritableError: if the store cannot be written.
        UsageError: for arguments without sense.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        *,
        store: str,
        checkpoint_every: int = 100,
        keep_checkpoints: int = 2,
        seed: int = 0,
        log_budget_bytes: int | LogBudget = _BUDGET,
        ship: str = Ship.ALWAYS,
        local: str | os.PathLike[str] | None = None,
        compress: str = Compress.AUTO,
        groups: str | os.PathLike[str] | Sequence[Sequence[int]] | None = None,
    ) -> None:
        global _active
        if _active is not None:
            raise SessionInUseError("This process has a session already: use that one, or close() it first.")
        _check_arguments(state, checkpoint_every, keep_checkpoints)
        context = WorkerContext.from_env()
        if not dist.is_initialized():
            raise UsageError("Call dist.init_process_group(backend) before the session is made.")
        opened = Store(store)
        if context.launched > 1:  # a replacement has no user to tell, and may have come in an outage
            opened.probe(context.timeouts.report_s)
        else:
            opened.probe()
        self._executor = Executor(
            context,
            opened,
            TrainingState(state),
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            seed=seed,
            groups=_groups(groups, context.world // context.workers),
            log=_log_options(log_budget_bytes, ship, local, compress, context.workers),
        )
        self._local = Path(local) if local is not None else None
        self._attached: set[str] = set()
        self._grouped = groups is not None
        self._started = False
        if context.metrics_port is not None:
            serve_as_told(context.metrics_port, context.rank, self.metrics)
        _active = self

    def attach_pipeline(
        self,
        schedule: Any,
        *,
        build: Callable[[int], nn.Module] | None = None,
        mode: str = HelpMode.ORDERED,
        helper_memory_bytes: int | None = None,
    ) -> None:
        """Protect a pipeline by logging (paper §5), and let survivors help in a replay (§5.2).

        Args:
            schedule: any schedule of ``torch.distributed.pipelining``.
            build: makes the module of a stage, by its index, as the script itself does. With it survivors
                compute microbatches of a lost stage, and a replay takes so much less time. Each stage is
                sent to them with its data, and random numbers are derived as ever.
            mode: ``"ordered"`` adds gradients up one by one, in the original order: the rebuilt state is
                bit-identical. ``"allreduce"`` adds up each helper's at once: less memory and waiting, and
                other roundings.
            helper_memory_bytes: what a helper's own state may take of the host's memory meanwhile; the rest
                of it goes to the local disk. No limit by default.
        """
        self._attach_once("pipeline")
        helping = Helping(build, _choice("mode", mode, HelpMode), helper_memory_bytes, self._local)
        self._executor.attach_pipeline(schedule, helping)

    def tie(self, parameter: nn.Parameter, stages: Sequence[int]) -> None:
        """Say that stages share a parameter (an embedding that is also the head, say), after the pipeline.

        Its values must be the same on all of them at the start. To be called on each of these workers, in the
        same order if there are several; then :meth:`sum_tied_gradients` keeps them equal.

        Args:
            parameter: this worker's.
            stages: by index, that have it.
        """
        self._tied().tie(parameter, stages)

    def sum_tied_gradients(self) -> None:
        """In each step, before the optimizer's: give tied parameters the sum of all stages' gradients.

        Instead of an all-reduce in a group of the script's own, which a replay could not take part in.
        """
        self._tied().sum_gradients()

    def _tied(self) -> TiedParameters:
        if (tied := self._executor.tied) is None:
            raise NotAttachedError("Call session.attach_pipeline(schedule) before tying its parameters.")
        return tied

    def attach_ddp(self, model: Any) -> None:
        """Protect a data-parallel model by its replicas (paper §4).

        Random numbers in steps (torch, Python, NumPy) are derived per (seed, iteration, rank). A replacement
        gets its state from a replica; running statistics (BatchNorm) are that replica's.

        Args:
            model: a stock ``DistributedDataParallel`` without a communication hook. In a pipeline it is the
                stage's module, on the group of the replicas of this stage: attach both, the pipeline first.
        """
        self._attach_once("DDP model")
        if self._grouped:
            raise UnsupportedError(
                "groups are for pipelines alone: replicas need none, leave one of them away."
            )
        self._executor.attach_ddp(model)

    def _attach_once(self, what: str) -> None:
        if what in self._attached:
            raise UsageError(f"A session protects one {what}, and this one has it already.")
        self._attached.add(what)

    def _check_attached(self) -> None:
        if not self._attached:
            raise NotAttachedError(
                "Call session.attach_pipeline(schedule) or session.attach_ddp(model) before the first step."
            )

    def steps(self, iterations: int) -> Iterator[Step]:
        """The iterations up to ``iterations``; an interrupted one is yielded again.

        After a loss, a replaced worker gets the iterations since its checkpoint as replayed steps, and
        everybody else the interrupted one. Ends when every worker has completed the last iteration.
        """
        self._check_attached()
        executor = self._executor
        if not self._started:
            self._started = True
            executor.start()
        while True:
            executor.ready_to_step()
            if executor.iteration >= iterations and not executor.replaying:
                if executor.finish():
                    return
                continue
            step = Step(executor.iteration, executor.replaying, executor.is_lost_touch)
            executor.begin()
            yield step
            if not step._entered:
                raise UsageError("Write `with step:` around the body of the loop.")
            if step._left:
                executor.complete()
            else:
                executor.interrupted(step._cause or "", step._failure)

    @property
    def iteration(self) -> int:
        """Iterations that the state has completed."""
        return self._executor.iteration

    def metrics(self) -> SessionMetrics:
        """What this worker does and what logging costs it. May be called from any thread."""
        return self._executor.metrics()

    def profile(self) -> Profile:
        """What the first iterations told about computation and messages, as ``swift-group`` reads it.

        Raises:
            UsageError: it takes a few iterations of a pipeline, in which machines are a chain.
        """
        return self._executor.profiler.read()

    def plan(self) -> Forecast:
        """Which way each machine would come back if it were lost, and what that would cost (paper §3, §5.4).

        Before the first step it knows the ways and the reasons for them, and no costs: they come from what
        everybody measures in the first ten iterations, and from a first part of a checkpoint. Print it for
        a table; ``to_dict()`` is for programs.

        Any worker may ask, when all is attached or between two steps. It waits for those that are not so far
        yet; whoever does not ask must go on to its first step.

        Raises:
            NotAttachedError: nothing is attached.
            UsageError: not all workers came so far in time.
        """
        self._check_attached()
        return self._executor.forecast()

    @property
    def bytes_logged(self) -> int:
        """Payload of the messages that this worker has logged."""
        return self._executor.bytes_logged

    def close(self) -> None:
        """Let go of the session, so that another one can be made in this process."""
        global _active
        if _active is self:
            _active = None


def _check_arguments(state: Mapping[str, Any], checkpoint_every: int, keep_checkpoints: int) -> None:
    if not state:
        raise UsageError('The session has nothing to protect: give it {"model": ..., "optimizer": ...}.')
    for name, part in state.items():
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise UsageError(f"{name!r} has no state_dict() and load_state_dict(): a {type(part).__name__}.")
    if checkpoint_every < 1 or keep_checkpoints < 1:
        raise UsageError("checkpoint_every and keep_checkpoints must be at least 1.")


def _log_options(
    budget: int | LogBudget, ship: str, local: str | os.PathLike[str] | None, compress: str, workers: int
) -> LogOptions:
    if isinstance(budget, int):
        budget = LogBudget(budget, budget)
    share = budget.of_worker(workers)
    for name, size in (("memory", share.memory_bytes), ("disk", share.disk_bytes)):
        if size is not None and size < _SMALLEST_BUDGET_BYTES:
            raise UsageError(
                f"log_budget_bytes gives a worker {size} bytes of {name}: it needs at least 1 MiB."
            )
    place = Path(local) if local is not None else None
    return LogOptions(
        share,
        ship=_choice("ship", ship, Ship),
        local=place,
        compress=_choice("compress", compress, Compress),
    )


def _groups(
    groups: str | os.PathLike[str] | Sequence[Sequence[int]] | None, machines: int
) -> tuple[int, ...]:
    """The group of each machine."""
    if groups is None:
        return tuple(range(machines))
    if isinstance(groups, str | os.PathLike):
        groups = read_groups(Path(groups))
    if sorted(slot for group in groups for slot in group) != list(range(machines)):
        raise UsageError(
            f"groups must name each of the {machines} machines once, 0 to {machines - 1}: {groups}."
        )
    return tuple(next(i for i, group in enumerate(groups) if slot in group) for slot in range(machines))


def _choice(name: str, value: str, kind: type[E]) -> E:
    if value not in list(kind):
        known = ", ".join(repr(str(choice)) for choice in kind)
        raise UsageError(f"{name} must be one of {known}, not {value!r}.")
    return kind(value)
