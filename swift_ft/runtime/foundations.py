"""Builds what a worker's runtime stands on: the job, the store, what keeps state and what brings it back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.completeness import Completeness
from swift_ft.checkpoint.folder import CheckpointFolder
from swift_ft.checkpoint.part_files import LocalParts
from swift_ft.checkpoint.recording_file import StoredRecording, clock_of_host
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.checkpoint.store_claim import open_store
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.agent_channel import agent_channel
from swift_ft.coordination.archive import JournalArchive, JournalArchiver
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.coordination.compaction import ArchivedPosition
from swift_ft.coordination.groups import Groups
from swift_ft.coordination.incarnations import has_begun
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.participant import Participant
from swift_ft.coordination.progress import ProgressBoard, ProgressReader
from swift_ft.coordination.recovery_trace import RecoveryTrace
from swift_ft.coordination.relay.worker_journal import WorkerJournal, journal_of_worker
from swift_ft.coordination.store_client import connect, keys_of_world
from swift_ft.observe.spans import Recording, recorder
from swift_ft.recovery.job_state import State
from swift_ft.runtime.attachments import Attachments
from swift_ft.runtime.checkpoints.checkpointing import Saver
from swift_ft.runtime.checkpoints.commits import Commits
from swift_ft.runtime.checkpoints.housekeeping import Housekeeper, Housekeeping, KeepLogs
from swift_ft.runtime.checkpoints.ownership import end_if_taken_over
from swift_ft.runtime.checkpoints.part_peers import PartPeers
from swift_ft.runtime.data.check import BatchBoard, BatchCheck
from swift_ft.runtime.data.iterators import (
    further_iterators,
    iterators_of_script,
    kept_ahead,
    may_keep_position,
)
from swift_ft.runtime.hooks.between import Between
from swift_ft.runtime.iterations import Iterations
from swift_ft.runtime.measures.profiler import Profiler
from swift_ft.runtime.measures.work_history import WorkHistory
from swift_ft.runtime.measures.worker_records import WorkerRecords
from swift_ft.runtime.memory.interval import Interval
from swift_ft.runtime.memory.memory_checkpoints import MemoryCheckpoints
from swift_ft.runtime.peer_files import PeerFiles
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.runtime.replicas.own_variables import OwnVariables
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.script.script_phases import ScriptPhases
from swift_ft.runtime.settings import Settings
from swift_ft.runtime.slowness.straggler_watch import say_if_slow
from swift_ft.runtime.state_proof import StateProof
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.fsdp import ShardedModels
from swift_ft.torch_adapters.process_group import GenerationGroup


class Foundations:
    """The objects of a worker's runtime that exist from the start, whatever the script attaches.

    Args:
        context: the worker's place.
        store: where logs and checkpoints go.
        state: what is protected.
        settings: the session's.

    Attributes:
        status: of the worker's state.
        log: its log of messages.
        profiler: measures its iterations.
        between: what its script does between two steps.
        phases: where its script is.
        attached: what the script attaches.
    """

    def __init__(
        self, context: WorkerContext, store: Store, state: TrainingState, settings: Settings
    ) -> None:
        self._context = context
        self._store = store
        self._state = state
        self._state.in_run = context.started_in > 1 and not context.world  # another world's script may differ
        self._state.run = context.run_id
        self._settings = settings
        self._iterations: Iterations | None = None  # from the first step on
        say_if_slow(recorder.lap("make the session"), context.rank)
        with recorder.span("connect to the job"):
            self._connect()
        # After the connection, which says whether this job has used the store before.
        with recorder.span("open the store"):
            self._open_store()
        self._keep()
        self._protect()
        # Last of all: the journal's thread calls listeners at once, and they use what is made above.
        self._participant.start(*self._listeners())
        recorder.lap("script before its first step")

    def _connect(self) -> None:
        """Make the objects that connect the worker to the job."""
        context = self._context
        client = partial(
            connect,
            context.store,
            context.run_id,
            silence_s=context.config.rendezvous_timeout_s,
            admit=has_begun,
        )
        self._run_keys = client()
        self._rendezvous = keys_of_world(self._run_keys, context.world)
        # As long as nothing fails, the training thread asks the rendezvous store for nothing (decision 56).
        self._writer = writer = BackgroundWriter(self._rendezvous)
        self._batches = BatchCheck(
            BatchBoard(self._rendezvous, writer, context.rank, joined=context.started_in > 1),
            enabled=self._settings.check_data,
            # So far back can a return to the oldest kept checkpoint lead.
            keep=self._settings.keep_checkpoints * self._settings.checkpoint_every,
            has_position=any(may_keep_position(name, part) for name, part in self._state.small.items()),
            iterators=iterators_of_script,
            further_iterators=further_iterators,
            kept_ahead=kept_ahead,
            in_doubt=lambda: self._group.waits.in_doubt,
        )
        self._progress = ProgressBoard(agent_channel(), ProgressReader(self._run_keys), context.rank)
        by = f"worker {context.rank}"
        journal = journal_of_worker(
            lambda: open_journal(client, by=by), by=by, append_s=context.config.rendezvous_timeout_s
        )
        if isinstance(journal, WorkerJournal):
            # A store that comes back empty gets these keys from another machine (decision 55).
            self._run_keys.on_set = journal.keep
        self._background = Housekeeper()
        self._archiver = self._new_archiver()
        self._trace = RecoveryTrace(by, self._write_recording, until_live=False)
        self._participant = Participant(context, journal, self._progress, self._trace, self._archiver)
        self._peers = PeerFiles(self._rendezvous, context, self._participant.is_member)
        self._group = GenerationGroup(
            self._run_keys,
            rank=context.rank,
            world_size=context.world_size,
            timeout_s=context.config.group_timeout_s,
            is_cancelled=self._participant.is_cancelled,
        )
        self._group.waits.before_abort = self._batches.settle
        self._groups = Groups(self._participant, self._group)

    def _new_archiver(self) -> JournalArchiver | None:
        if self._context.rank != 0:
            return None
        archived = ArchivedPosition(self._run_keys)
        # Nothing is archived yet, so no block of the journal may be deleted (decision 9).
        archived.note(0)
        archive = JournalArchive(self._store, self._context.run_id)
        return JournalArchiver(archive, self._background, archived.note)

    def _write_recording(self, recording: Recording, generation: int) -> None:
        context = self._context
        self._records.write_recording(
            StoredRecording(
                run_id=context.run_id,
                generation=generation,
                by=f"worker {context.rank}",
                rank=context.rank,
                machine=context.machine,
                slot=context.slot,
                clock=clock_of_host(),
                recording=recording,
            )
        )

    def _open_store(self) -> None:
        open_store(self._store, self._context, self._run_keys)

    def _listeners(self) -> tuple[Callable[[State], None], ...]:
        """The functions that the journal thread calls with each new state."""
        always = (
            self._groups.on_change,
            self._once_it_trains(self._commits.on_change),
            self._once_it_trains(self._housekeeping.on_change),
            self._on_state,
        )
        if self._archiver is None:
            return always
        return (*always, self._once_it_trains(self._archiver.on_change))

    def _once_it_trains(self, listener: Callable[[State], None]) -> Callable[[State], None]:
        """A duty that the present world's worker of the same rank has until this one's world takes over."""

        def on_change(state: State) -> None:
            if self._context.world <= state.worlds.present.number:
                listener(state)

        return on_change

    def _on_state(self, state: State) -> None:
        if self._iterations is not None:
            self._iterations.on_change(state)

    def _new_log(self) -> WorkerLog:
        store, is_cancelled = self._store, self._participant.replay_cancelled
        peers = self._peers if store.remote else None  # else all read it where it is
        stays = self._settings.keep_logs is KeepLogs.ALL
        options = self._settings.log
        return WorkerLog(
            store,
            self._context,
            options,
            peers,
            is_cancelled=is_cancelled,
            stays=stays,
            in_doubt=lambda: self._group.waits.in_doubt,
        )

    def _new_history(self) -> WorkHistory:
        return WorkHistory(self._context, self._records.write_history)

    def _keep(self) -> None:
        """Make the objects that keep logs and checkpoints."""
        store, settings = self._store, self._settings
        self.log = self._new_log()
        folder = CheckpointFolder(store)
        self._part_peers: PartPeers | None = None
        local = LocalParts(settings.log.local, store.url) if settings.log.local is not None else None
        self._checkpointer = Checkpointer(folder, self._state, local)
        if local is not None:
            self._part_peers = PartPeers(self._peers, self._context, local)
            self._checkpointer.files.peer = self._part_peers.open
        self._records = WorkerRecords(store, self._context.run_id, self._context.rank, self._background)
        self._history = self._new_history()
        audited = self._context.config.audit
        # An audit begins with one checkpoint and ends with the next.
        keep = max(settings.keep_checkpoints, 2) if audited else settings.keep_checkpoints
        self._commits = Commits(self._participant, folder, self._background, keep=keep)
        self._housekeeping = Housekeeping(
            self._context.rank,
            self._context.run_id,
            folder,
            self.log,
            local,
            keep_logs=settings.keep_logs,
            audited=audited,
            end_if_taken_over=partial(end_if_taken_over, store, self._participant),
            background=self._background,
        )
        self._proof = StateProof(
            self._state, self._participant, self._rendezvous, self._writer, settings.verify
        )
        self._saver = Saver(
            self._participant,
            self._checkpointer,
            self._commits,
            self.log,
            self._proof,
            self._writer,
            every=settings.checkpoint_every,
        )

    def _new_memory_checkpoints(self) -> MemoryCheckpoints:
        settings, context = self._settings, self._context
        every, interval = settings.snapshot_every, None
        if every is not None:
            interval = Interval(
                self._rendezvous, self._writer, every, rank=context.rank, at_most=settings.checkpoint_every
            )
        return MemoryCheckpoints(context, self._state, self._rendezvous, self._peers, interval)

    def _differs(self) -> None:
        """Stop training: a hook between steps had unlike results on two workers. In the writer's thread."""
        self._proof.failed = True
        self._groups.abort()  # the training thread may wait for a worker that has left its loop

    def _protect(self) -> None:
        """Make the objects that hold the training state and can bring it back."""
        self.status = WorkerStatus()
        self._in_memory = self._new_memory_checkpoints()
        self._rollback = Rollback(self._state, self._settings.check_step)
        self.between = Between(
            self._context.rank,
            self._state,
            self._rendezvous,
            self._writer,
            run=self._context.run_id,
            seed=self._settings.seed,
            note_variables=self._rollback.note_variables_and_flags,
            on_difference=self._differs,
        )
        self.phases = ScriptPhases()
        self._completeness = Completeness(self._state)
        self._sharded = ShardedModels(self._state.modules.values())
        self._replicas = Replicas(
            self._state, self._rendezvous, self._run_keys, self._group, self._proof, self._context.rank
        )
        self._replicas.own_variables = OwnVariables(
            self._context.rank, self._rollback.carried, self._rendezvous, self._writer
        )
        checkpointer, snapshots = self._checkpointer, self._in_memory
        self.profiler = Profiler(
            self._context,
            self._rendezvous,
            self._writer,
            self._state,
            lambda: checkpointer.bytes_per_s,
            lambda: snapshots.every,
            archive=self._records.write_profile,
        )
        self.attached = Attachments(
            context=self._context,
            settings=self._settings,
            state=self._state,
            rendezvous=self._rendezvous,
            writer=self._writer,
            group=self._group,
            log=self.log,
            records=self._records,
            batches=self._batches,
            between=self.between,
            phases=self.phases,
            completeness=self._completeness,
            sharded=self._sharded,
            replicas=self._replicas,
            profiler=self.profiler,
        )
