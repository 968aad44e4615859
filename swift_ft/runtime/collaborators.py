"""The parts of one worker's runtime, ready to use. `assembly` builds them."""

from __future__ import annotations

from dataclasses import dataclass

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.checkpoint.completeness import Completeness
from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.archive import JournalArchiver
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.coordination.groups import Groups
from swift_ft.coordination.participant import Participant
from swift_ft.coordination.progress import ProgressBoard
from swift_ft.coordination.recovery_trace import RecoveryTrace
from swift_ft.runtime.checkpoints.checkpointing import Saver
from swift_ft.runtime.checkpoints.commits import Commits
from swift_ft.runtime.checkpoints.housekeeping import Housekeeping
from swift_ft.runtime.checkpoints.part_peers import PartPeers
from swift_ft.runtime.data.check import BatchCheck
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.data.file_peers import FilePeers
from swift_ft.runtime.elastic.layer_sync import LayerSync
from swift_ft.runtime.elastic.rebalance import Rebalance
from swift_ft.runtime.elastic.repartition import Repartition
from swift_ft.runtime.elastic.reshare import Reshare, ShareMicrobatches
from swift_ft.runtime.hooks.between import Between
from swift_ft.runtime.measures.profiler import Profiler
from swift_ft.runtime.measures.work_history import WorkHistory
from swift_ft.runtime.memory.snapshots import Snapshots
from swift_ft.runtime.pipeline.logged_pipeline import LoggedPipeline
from swift_ft.runtime.pipeline.replay import Replays
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.runtime.replicas.prepared_state import PreparedState
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.replicas.state_sync import StateSync
from swift_ft.runtime.script.script_phases import ScriptPhases
from swift_ft.runtime.worker_status import WorkerStatus
from swift_ft.torch_adapters.device_waits import DeviceWaits
from swift_ft.torch_adapters.fsdp import ShardedModels

__all__ = ["Collaborators"]


@dataclass(frozen=True, slots=True)
class Collaborators:
    """The parts of one worker's runtime.

    Attributes:
        context: the worker's place.
        recovery_group: the group of its machine; machines of one group recover together.
        status: of the worker's state.
        participant: its part in the job: events, orders, waits.
        trace: ends the recording of a recovery.
        groups: the process groups of generations.
        progress: where it publishes what it does.
        writer: notes what its replacement needs, while training goes on.
        log: its log of messages.
        checkpointer: writes and reads its part of the global checkpoint.
        part_peers: offers what its machine's disk has of checkpoints; None without such copies.
        saver: decides when that is saved.
        snapshots: copies of its state in memory.
        archiver: archives the journal; None on workers that have not that duty.
        housekeeping: deletes what is old.
        completeness: whether the state holds all that training changes.
        between: what its script does between two steps.
        phases: where its script is.
        batches: whether a repeated iteration gets the batch that it had.
        file_peers: gives and gets files of samples; None if there are none.
        dealt: the batches that the session deals to the replicas, however many there are.
        rollback: undoes the small changes of an interrupted step.
        device: waits for what it computes on, where its peers' deaths are silent.
        sharded: what ``fully_shard`` was applied to; nothing, as a rule.
        shards: which shards it has, in words; empty if nothing is sharded.
        replicas: the replicas of its model, if there are any.
        prepared: what it may have to send to them, ready.
        state_sync: makes replicas equal.
        profiler: measures iterations.
        history: of its work, which the store keeps.
        pipeline: its stages, if it has any.
        replays: its part in replays; None without a pipeline.
        repartition: moves its layers; None where the model is not a LayerStack.
        rebalance: says when layers should move; None on all workers but the first.
        reshare: says when replicas should get other shares of a batch; None on all workers but the first.
    """

    context: WorkerContext
    recovery_group: int
    status: WorkerStatus
    participant: Participant
    trace: RecoveryTrace
    groups: Groups
    progress: ProgressBoard
    writer: BackgroundWriter
    log: WorkerLog
    checkpointer: Checkpointer
    part_peers: PartPeers | None
    saver: Saver
    snapshots: Snapshots
    commits: Commits
    archiver: JournalArchiver | None
    housekeeping: Housekeeping
    completeness: Completeness
    between: Between
    phases: ScriptPhases
    batches: BatchCheck
    file_peers: FilePeers | None
    dealt: DealtBatches
    rollback: Rollback
    device: DeviceWaits
    sharded: ShardedModels
    shards: str
    replicas: Replicas
    prepared: PreparedState
    state_sync: StateSync | LayerSync
    profiler: Profiler
    history: WorkHistory
    pipeline: LoggedPipeline | None
    replays: Replays | None
    repartition: Repartition | None
    rebalance: Rebalance | None
    reshare: Reshare | ShareMicrobatches | None

    @property
    def replaying(self) -> bool:
        """Whether the next step takes its messages from the log, to rebuild the state."""
        return self.pipeline is not None and self.pipeline.replaying
