"""What a user meets: a session around the training loop.

session = swift_ft.Session({"model": model, "optimizer": optimizer}, store="s3://bucket/run7")
session.attach_pipeline(schedule)           # or session.attach_ddp(model)
for step in session.steps(10_000):
    with step:
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch.distributed as dist

from swift_ft.config import WorkerContext
from swift_ft.errors import NotAttachedError, RecoveryError, SessionInUseError, UsageError
from swift_ft.logging import Store
from swift_ft.recovery.executor import Executor
from swift_ft.recovery.state import TrainingState

__all__ = ["Session", "Step"]

_active: Session | None = None


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
        log_budget_bytes: messages that may wait in memory to be written; then senders wait.

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
        log_budget_bytes: int = 256 * 2**20,
    ) -> None:
        global _active
        if _active is not None:
            raise SessionInUseError("This process has a session already: use that one, or close() it first.")
        _check_arguments(state, checkpoint_every, keep_checkpoints)
        context = WorkerContext.from_env()
        if not dist.is_initialized():
            raise UsageError("Call dist.init_process_group(backend) before the session is made.")
        opened = Store(store)
        opened.probe()
        self._executor = Executor(
            context,
            opened,
            TrainingState(state),
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            seed=seed,
            log_budget_bytes=log_budget_bytes,
        )
        self._attached: set[str] = set()
        self._started = False
        _active = self

    def attach_pipeline(self, schedule: Any) -> None:
        """Protect a pipeline by logging (paper §5).

        Args:
            schedule: any schedule of ``torch.distributed.pipelining``.
        """
        self._attach_once("pipeline")
        self._executor.attach_pipeline(schedule)

    def attach_ddp(self, model: Any) -> None:
        """Protect a data-parallel model by its replicas (paper §4).

        Random numbers in steps (torch, Python, NumPy) are derived per (seed, iteration, rank). A replacement
        gets its state from a replica; running statistics (BatchNorm) are that replica's.

        Args:
            model: a stock ``DistributedDataParallel`` without a communication hook. In a pipeline it is the
                stage's module, on the group of the replicas of this stage: attach both, the pipeline first.
        """
        self._attach_once("DDP model")
        self._executor.attach_ddp(model)

    def _attach_once(self, what: str) -> None:
        if what in self._attached:
            raise UsageError(f"A session protects one {what}, and this one has it already.")
        self._attached.add(what)

    def steps(self, iterations: int) -> Iterator[Step]:
        """The iterations up to ``iterations``; an interrupted one is yielded again.

        After a loss, a replaced worker gets the iterations since its checkpoint as replayed steps, and
        everybody else the interrupted one. Ends when every worker has completed the last iteration.
        """
        if not self._attached:
            raise NotAttachedError(
                "Call session.attach_pipeline(schedule) or session.attach_ddp(model) before the first step."
            )
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
