"""A worker of a check (``swift-run --check``): it trains two iterations, and says how it is protected.

Three things differ from a worker of a job: a temporary folder stands in for the store that the script names,
nothing is copied to the local disk, and the loop of steps ends the script after the second iteration, once
all workers have come so far. What follows the loop is not run: the training is not complete.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from swift_ft.checkpoint.companions import is_companion
from swift_ft.checkpoint.saved_form import bytes_of
from swift_ft.checkpoint.step.large_values import LargeValues
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config.worker_context import WorkerContext
from swift_ft.observe.checked import CheckedWorker, CheckFolder, PartFacts
from swift_ft.optim import UndoableOptimizer
from swift_ft.program.system_exit import SessionExit
from swift_ft.runtime.assembly import Assembly
from swift_ft.runtime.attachments import Attachments
from swift_ft.runtime.data.iterators import loader_goes_on, may_keep_position
from swift_ft.runtime.settings import Settings
from swift_ft.runtime.worker.core import WorkerCore
from swift_ft.runtime.worker.flow import Flow
from swift_ft.runtime.worker.parts import Parts
from swift_ft.runtime.worker.ports import Ports
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.storage.store import Store
from swift_ft.storage.store_url import StoreUrl
from swift_ft.torch_core.model_state import model_state

ITERATIONS = 2
"""In the first one optimizers make their state, and only the second shows what changes from step to step."""

_TOLD = frozenset({"parameter_copied", "replay_together"})
"""Events below a warning that say how something of the script is protected."""


class CheckedAssembly(Assembly):
    """The runtime of a worker that is checked.

    Args:
        context: the worker's place, with the folder of the check.
        url: the store that the script names. It is not touched.
        state: what is protected.
        settings: the session's.
    """

    def __init__(
        self, context: WorkerContext, url: str | os.PathLike[str], state: TrainingState, settings: Settings
    ) -> None:
        self._folder = CheckFolder(context.check)
        self._folder.note_session(context.rank)
        self._named = str(StoreUrl.parse(url))
        self._said = _Said()
        logging.getLogger("swift_ft").addHandler(self._said)
        local = replace(settings, log=replace(settings.log, local=None))
        super().__init__(context, Store(self._folder.store), state, local)

    def _new_core(self, parts: Parts, ports: Ports) -> WorkerCore:
        self._large = LargeValues(self._rollback.variables)
        acts = CheckActs(note=self._large.note, publish=self._publish, tell=self._tell)
        return _CheckedCore(self._context.rank, self.status, parts, ports, acts)

    def _publish(self) -> None:
        """Before others may end: the forecast is made of what all have measured."""
        pipeline = self.attached.pipeline
        sent = pipeline.sent if pipeline is not None else None
        step_s = self.profiler.publish_last(sent)
        self._writer.flush(self._context.config.report_timeout_s)
        self._facts = self._facts_now(step_s)

    def _tell(self) -> None:
        """All workers have published."""
        forecast = self.forecast().to_dict() if self._context.rank == 0 else None
        self._folder.write(replace(self._facts, forecast=forecast))

    def _facts_now(self, step_s: float | None) -> CheckedWorker:
        attached, context = self.attached, self._context
        return CheckedWorker(
            rank=context.rank,
            machine=context.slot,
            world_size=context.world_size,
            iterations=self.status.iteration,
            step_s=step_s,
            store=self._named,
            checkpoint_every=self._settings.checkpoint_every,
            snapshot_every=self._in_memory.every,
            parts=tuple(_parts_of(self._state)),
            pipeline=_pipeline_in_words(attached),
            replicas=attached.replica[1],
            shards=attached.shards,
            between=self.between.names,
            said=tuple(self._said.lines),
            too_large=tuple(self._large.changed()),
            asks_index=self._batches.asked,
            loader_goes_on=loader_goes_on(),
            keeps_position=tuple(
                name for name, part in self._state.small.items() if may_keep_position(name, part)
            ),
        )


@dataclass(frozen=True, slots=True)
class CheckActs:
    """The acts of a check.

    Attributes:
        note: called between its iterations.
        publish: called on each worker before any of them ends.
        tell: called once all have published.
    """

    note: Callable[[], None]
    publish: Callable[[], None]
    tell: Callable[[], None]


class _CheckedCore(WorkerCore):
    """Ends the script where the third iteration would begin, or where its loop is over before.

    Args:
        acts: what it calls meanwhile.
    """

    def __init__(self, rank: int, status: WorkerStatus, parts: Parts, ports: Ports, acts: CheckActs) -> None:
        super().__init__(rank, status, parts, ports)
        self._acts = acts

    def settle(self) -> Flow[bool]:
        """See :meth:`WorkerCore.settle`: what the script does between two steps was done by then."""
        settled = yield from super().settle()
        if settled and 0 < self.status.iteration < ITERATIONS:
            yield self._acts.note
        elif settled and self.status.iteration:
            settled = yield from self.finish()
        return settled

    def finish(self) -> Flow[bool]:
        """All workers end here together: one that ended before would be a loss to the others.

        Raises:
            SessionExit: this worker has said all. The script's files and loaders end as at any end of it.
        """
        yield self._acts.publish
        if not (yield from super().finish()):
            return False
        yield self._acts.tell
        raise SessionExit(0)


class _Said(logging.Handler):
    """Keeps what the session says of the script.

    Attributes:
        lines: each once, in order, behind its event.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: dict[tuple[str, str], None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", "")
        if record.levelno >= logging.WARNING or event in _TOLD:
            self.lines[event, record.getMessage()] = None


def _parts_of(state: TrainingState) -> Iterator[PartFacts]:
    for name, module in state.modules.items():
        nbytes = bytes_of(model_state(module))
        yield PartFacts(name=name, kind="weights", made_of=type(module).__name__, nbytes=nbytes)
    for name, optimizer in state.optimizers.items():
        yield PartFacts(
            name=name,
            kind="optimizer",
            made_of=type(optimizer).__name__,
            nbytes=bytes_of({str(i): fields for i, fields in enumerate(optimizer.state.values())}),
            undoable=isinstance(optimizer, UndoableOptimizer),
        )
    for name, part in state.small.items():
        if not name.startswith("swift_ft."):
            yield PartFacts(name=name, kind=_kind_of(part), made_of=type(part).__name__)


def _kind_of(part: Any) -> str:
    kind = type(part)
    if isinstance(part, LRScheduler) or "Scheduler" in kind.__name__:
        return "scheduler"
    if isinstance(part, GradScaler):
        return "scaler"
    return "average" if is_companion(kind) else "small object"


def _pipeline_in_words(attached: Attachments) -> str:
    if (pipeline := attached.pipeline) is None:
        return ""
    stages = "stage" if len(pipeline.stages) == 1 else "stages"
    numbers = ", ".join(map(str, pipeline.stages))
    kind = f"{pipeline.kind}, " if pipeline.kind is not None else ""
    return f"{kind}{stages} {numbers} of {pipeline.num_stages}, {pipeline.microbatches} microbatches"
