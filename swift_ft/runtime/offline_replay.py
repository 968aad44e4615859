"""A worker that is rebuilt without its job (``swift-recover replay``).

The worker runs the user's script, follows a journal and replays, as any replacement does
(`runtime/worker/core.py`). Three things differ: nothing is written into the run's store, the log is switched
off, and where a replacement would go live this one saves its state elsewhere and ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from swift_ft.checkpoint.manifest import write_manifest
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.checkpoint.worker_record import WorkerRecord, read_record
from swift_ft.config.worker_context import WorkerContext
from swift_ft.errors import DivergenceError, GaveUpError, RecoveryError, SwiftError, UsageError
from swift_ft.host.processor import why_other_bits
from swift_ft.logging import Direction, LogReader, MessageKey, MessageLog, checksum_of
from swift_ft.program.system_exit import SessionExit
from swift_ft.recovery.job_state import State
from swift_ft.runtime.assembly import Assembly
from swift_ft.runtime.measures.work_history import WorkHistory
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.runtime.settings import Settings
from swift_ft.runtime.steps import Loop
from swift_ft.runtime.worker.core import WorkerCore
from swift_ft.runtime.worker.flow import Flow
from swift_ft.runtime.worker.parts import Parts
from swift_ft.runtime.worker.ports import Ports
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.dcp.writer import staged, write_part


def part_name(rank: int) -> str:
    """The folder of a worker's rebuilt state, a DCP checkpoint of its own."""
    return f"rank-{rank:05d}"


def note_difference(
    out: Path, rank: int, key: MessageKey, computed: int | None, *, sender: int, changed: bool
) -> None:
    """Write down the first message that is unlike the original.

    Args:
        out: the folder of the replay.
        rank: the worker that has found it, as the message's sender or receiver.
        key: the message's.
        computed: its checksum in the replay; None if that is not known.
        sender: the worker that has sent it in the original.
        changed: see :class:`swift_ft.recovery.events.AuditEnded`.
    """
    digest = "" if computed is None else str(computed)
    facts = {"iteration": key.iteration, "tensors": str(key), "digest": digest, "changed": changed}
    (out / f"{part_name(rank)}.difference.json").write_text(json.dumps({"rank": sender, **facts}))


def check_auditable(here: str, there: str, *, exact: bool) -> None:
    """Check that a difference would be a fault, and not another rounding.

    Args:
        here: the spare's processor (`host/processor.py`).
        there: the machine's.
        exact: see :attr:`swift_ft.runtime.pipeline.shared_replay.SharedReplay.helped_exactly`.

    Raises:
        UsageError: the spare may compute other bits where nobody is wrong.
    """
    if why := why_other_bits(here, there):
        raise UsageError(why)
    if not exact:
        raise UsageError('helpers in attach_pipeline(mode="allreduce") round otherwise what they rebuild')


def noted_differences(out: Path) -> list[dict[str, Any]]:
    """The differences that workers have noted, the earliest first."""
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*.difference.json"))]
    return sorted(found, key=lambda facts: facts["iteration"])


class OfflineAssembly(Assembly):
    """The runtime of a worker that is rebuilt without its job. The store may be read only.

    Args:
        context: the worker's place, with what it does offline.
        state: what is protected.
        settings: the session's. No checkpoint is due: the job has saved those that it wanted.
    """

    def __init__(
        self, context: WorkerContext, store: Store, state: TrainingState, settings: Settings
    ) -> None:
        super().__init__(
            context, store, state, replace(settings, checkpoint_every=sys.maxsize, snapshot_every=None)
        )

    def _new_archiver(self) -> None:
        return None

    def _open_store(self) -> None:
        """Not even a probe is written."""

    def _listeners(self) -> tuple[Callable[[State], None], ...]:
        return (self._groups.on_change,)  # no commits, no housekeeping

    def _new_log(self) -> WorkerLog:
        is_cancelled = self._participant.replay_cancelled
        return _ReadLog(self._store, self._context, self._settings.log, None, is_cancelled=is_cancelled)

    def _new_history(self) -> WorkHistory:
        return WorkHistory(self._context, lambda history: None)

    def _new_core(self, parts: Parts, ports: Ports) -> WorkerCore:
        return OfflineCore(self._context, self.status, parts, ports, self._save_elsewhere, self._note)

    def start(self, *, epochs: bool = False) -> Loop:
        """See :meth:`Assembly.start`.

        Raises:
            UsageError: the script was given other arguments than in the run.
        """
        self._check_record()
        return super().start(epochs=epochs)

    def _check_record(self) -> None:
        """With other microbatches, say, the state would be another one, and no message might show it."""
        pipeline = self.attached.pipeline
        if pipeline is None:
            raise UsageError(
                "The script attaches no pipeline here, and did in the run: use the run's arguments."
            )
        theirs = read_record(self._store, self._context.rank)
        assert theirs is not None  # else this worker would not have been started
        ours = self.attached.record(theirs.shapes)
        pipeline.script.remember(theirs.together, "")
        assert self._context.offline is not None
        if self._context.offline.audit:
            check_auditable(ours.processor, theirs.processor, exact=pipeline.shared_replay.helped_exactly)
        # The script shows the first only as it communicates; another processor is an audit's matter.
        ours = replace(ours, together=theirs.together, processor=theirs.processor)
        for declared in fields(WorkerRecord):
            here, there = getattr(ours, declared.name), getattr(theirs, declared.name)
            if here != there:
                raise UsageError(
                    f"The script's {declared.name} are {here} here and were {there} in the run: give it the "
                    "run's arguments."
                )

    def _note(self, error: DivergenceError) -> None:
        """Note for an audit which message is unlike the original (`offline/audit.py`)."""
        offline, key = self._context.offline, error.fields.get("key")
        assert offline is not None
        if not offline.audit or error.fields.get("computed_in") is None or not isinstance(key, MessageKey):
            return
        rank, pipeline, computed = self._context.rank, self.attached.pipeline, error.fields.get("computed")
        assert pipeline is not None
        sender = error.fields.get("sender")
        changed = sender is not None  # the replay was given what another worker has
        if sender is None:
            of_script = key.direction == Direction.SCRIPT
            sender = rank if of_script else pipeline.holders()[key.source_stage]
            sent = self.log.read([sender], since=0, iteration=key.iteration)
            changed = computed is not None and sent.has(key) and checksum_of(sent.read(key)) == computed
        note_difference(Path(offline.out), rank, key, computed, sender=sender, changed=changed)

    def _save_elsewhere(self) -> None:
        """Save the state as the worker of the job would have saved its part of a checkpoint."""
        offline = self._context.offline
        assert offline is not None
        out, name = Store(Path(offline.out)), part_name(self._context.rank)
        files = write_part(out, name, staged(self._state.to_save(self._proof.digests())))
        write_manifest(out, name, files)


class OfflineCore(WorkerCore):
    """Carries out the orders of one generation, and ends where the worker would go live."""

    def __init__(
        self,
        context: WorkerContext,
        status: WorkerStatus,
        parts: Parts,
        ports: Ports,
        save: Callable[[], None],
        note: Callable[[DivergenceError], None],
    ) -> None:
        super().__init__(context.rank, status, parts, ports)
        self._started_in = context.started_in
        self._save_elsewhere = save
        self._note = note

    def _report(self, state: State) -> Flow[None]:
        """Report once. Another generation means that a worker could not replay."""
        if state.generation != self._started_in:
            raise GaveUpError(state.tries.fallback_reason or "the replay was interrupted")
        yield from super()._report(state)

    def interrupted(self, cause: str, failure: RecoveryError | None, *, caught: bool = False) -> Flow[None]:
        """See :meth:`WorkerCore.interrupted`."""
        if isinstance(failure, DivergenceError):
            self._note(failure)
        yield from super().interrupted(cause, failure, caught=caught)

    def _fail(self, generation: int, error: SwiftError) -> Flow[None]:
        if isinstance(error, DivergenceError):
            self._note(error)
        yield from super()._fail(generation, error)

    def _run(self, state: State) -> Flow[bool]:
        """All workers of the replay are done: save the state, and end the script."""
        yield self._save_elsewhere
        raise SessionExit(0)


class _ReadLog(WorkerLog):
    """The logs of others, without a log of this worker's own."""

    def _new_messages(self) -> MessageLog:
        return _NoMessageLog(self._options, self.stats)

    def open(self, generation: int, *, since: int, begin: int) -> None:
        self.generation = generation

    def seal_and_offer(self, asked_in: int, *, uploaded: bool) -> None:
        self.asked_in = asked_in

    def read(self, ranks: Iterable[int], *, since: int, iteration: int) -> LogReader:
        """As the job would: the generations that count are those of its own journal."""
        assert self._context.offline is not None
        return super().read(ranks, since=self._context.offline.log_since, iteration=iteration)


class _NoMessageLog(MessageLog):
    """Keeps no message."""

    def sent(self, key: MessageKey, tensor: torch.Tensor) -> None:
        pass

    def received(self, key: MessageKey, tensor: torch.Tensor) -> None:
        pass

    def received_elsewhere(self, key: MessageKey, checksum: int, like: torch.Tensor) -> None:
        pass

    def overwriting(self, tensor: torch.Tensor) -> None:
        pass
