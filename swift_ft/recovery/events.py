"""Events: the vocabulary of the journal.

Every participant reads the same events in the same order (`coordination/journal.py`) and feeds them to the
same pure state machine (`recovery/protocol.py`). Events are facts; the participant that
observes one first records it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOpened:
    """The job's shape. The first event of every journal.

    Attributes:
        machines: number of slots to be filled.
        workers_per_machine: a worker's rank is ``slot * workers_per_machine + local_rank``.
        restarts: how often a failing script may be started again (torchrun's ``--max-restarts``).
        max_failures: machines lost since the last committed checkpoint after which the job stops; None for no
            limit.
        checkpoint: iteration of the last committed global checkpoint in the store, if there is one.
        setup: what all machines must have in common, as ``name: value`` (versions, script, flags).
        min_machines: as few machines run the slots of all, the others as guests; None for any number, but
            only after a loss: the job begins with all of them.
        layers: of each stage, where the scripts of a model that is a LayerStack do not begin with their own
            layout; empty if they do.
        shrinks: after a loss for which no machine comes, a world of fewer workers takes the survivors' state
            over where it can (`recovery/survivors.py`). Otherwise guests fill the slots.
    """

    machines: int
    workers_per_machine: int = 1
    restarts: int = 0
    max_failures: int | None = None
    checkpoint: int | None = None
    setup: tuple[str, ...] = ()
    min_machines: int | None = None
    layers: tuple[int, ...] = ()
    shrinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineJoined:
    """A machine offers itself, for the slot it prefers or for any.

    ``address`` (``host:port``) is where its neighbour watches it (`launch/detection/sentinel.py`). A machine
    whose ``setup`` is not that of :class:`JobOpened` is refused. Machines of one ``domain`` may be lost
    together; one without a name is a failure domain of its own. A guest is a second machine on the hardware
    of its ``host``, which fills a slot for as long as no machine of its own comes; it is lost with its host.
    """

    machine: str
    preferred_slot: int | None = None
    address: str = ""
    setup: tuple[str, ...] = ()
    domain: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLost:
    """A machine counts as failed, however that was detected. It can return only under a new name.

    ``reporter`` is the machine that found it, empty for one that reports itself. A fenced machine that wakes
    up may still report others; such a report is ignored. ``on_request`` marks a machine that leaves because
    it was asked to (:class:`DrainRequested`), which is no failure. ``silent`` marks one of which nothing was
    heard, though its connection lived: it may only have been frozen, and come back. ``out_of_memory`` marks
    one in which the kernel has ended a process for want of memory. ``stopped_by`` is the number of the signal
    that its launcher was stopped by, if it was. ``cause`` is one of :class:`swift_ft.recovery.causes.Cause`,
    empty where the reporter knows no better than the event's kind; ``evidence`` are facts beside the reason.
    """

    machine: str
    reason: str
    reporter: str = ""
    on_request: bool = False
    silent: bool = False
    out_of_memory: bool = False
    stopped_by: int = 0
    cause: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """Somebody asks a machine to leave. It hands over to a spare after the next checkpoint.

    ``asked_by`` is who asks, in words. An entry's own ``by`` is who wrote it.
    """

    machine: str
    asked_by: str = "somebody"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestDeclined:
    """A machine cannot take a guest: it has too little memory, for example."""

    machine: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesRequested:
    """The scheduler is about to be asked for machines, for slots that no machine of their own fills.

    ``machine`` asks, and only if no other one has asked for these slots since they were filled last.
    """

    machine: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCameBack:
    """A worker answers after all, although its machine was just reported lost because the worker was silent.

    It was held up by a call that holds the interpreter, most likely: the deadline was too short.
    """

    machine: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionlessWorkers:
    """The workers of a machine run a script without a session: they can only be restarted."""

    machine: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReported:
    """A worker has left its old groups, has flushed its log, and reports its status.

    Attributes:
        rank: the worker.
        generation: the generation that asked. In a later one the report still counts if no plan was made in
            between, and the worker was not replaced.
        iteration: iterations that its state has completed; None if it has no state yet.
        live: False while its state is still being replayed.
        stages: the pipeline stages on this worker.
        pipeline_known: the shapes of its stages' messages are known, so no live warm-up is needed.
        dirty: why its state lies between two iterations and cannot be rolled back; None if it does not.
        holds: names of the parts whose whole state is on this worker; workers that hold the same parts are
            replicas of each other.
        undoable: indices of the parameters that the last completed iteration updated, where that can still be
            undone. Reported where workers may be at different iterations: in pipelines, and of shards.
        no_update: the last completed iteration updated no parameter, as where a gradient is not finite, and
            can be taken back without an undo.
        pipeline: distinguishes the pipeline of its stages from the replicas of that pipeline.
        updated: indices of the parameters that the interrupted iteration has updated, and that can be undone.
        group: machines of one group recover together and log no messages to each other; None where each
            machine is a group of its own.
        can_resend: its log or its memory holds every message that it sent in its last completed iteration.
        max_replay_shards: the number of workers that can share a replay of its stages; 1 if it cannot be
            shared. A worker with 1 cannot help in another replay either.
        linked: stages of other workers, besides the neighbouring ones, to which it also sends messages.
        steps: iterations that its script asks for in all (``session.steps()``); None if that is unknown.
        own_statistics: its modules keep running statistics of its own data, which no replica has.
        log_gap_before: its log lacks messages of iterations before this one, because it could not be written;
            0 if it lacks none.
        log_gap_reason: why.
        kept: iterations of which it keeps a copy of its own state in memory.
        held: iterations of which it holds another worker's copy in memory.
        held_of: that worker; None if it holds no copy.
        together: other workers with which its script communicates in a way that no log has: they are rebuilt
            and replay together.
        together_reason: which call of the script that is.
        parts_done: how many of the script's parts between the last completed iteration and the next it has
            done (``session.between()``); None if it has done all that are due.
        parts_due: how many of them are due there.
        layers: of the whole model, where it is a :class:`swift_ft.LayerStack`; 0 where it is none.
        cut: the layers of each stage of its pipeline as its script begins; empty if they are as even as
            possible. The worker with the first stage says it.
        completes: it can complete the interrupted iteration without others: it has all averages of gradients,
            and has not updated a parameter yet.
        fresh: its memory still has what its script began with. Only then it can begin without a state.
        microbatches: of its pipeline in an iteration, as its script begins, where pipelines are replicas and
            the script takes the number from its :class:`swift_ft.LayerStack`; else 0. The worker with the
            first stage says it, and the next one, too.
        min_stages: a pipeline of fewer cannot hold the model.
    """

    rank: int
    generation: int
    iteration: int | None
    live: bool = False
    stages: tuple[int, ...] = ()
    pipeline_known: bool = False
    dirty: str | None = None
    holds: tuple[str, ...] = ()
    pipeline: int = 0
    undoable: tuple[int, ...] = ()
    no_update: bool = False
    updated: tuple[int, ...] = ()
    can_resend: bool = True
    group: int | None = None
    max_replay_shards: int = 1
    linked: tuple[int, ...] = ()
    steps: int | None = None
    own_statistics: bool = False
    log_gap_before: int = 0
    log_gap_reason: str = ""
    kept: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    held_of: int | None = None
    together: tuple[int, ...] = ()
    together_reason: str = ""
    parts_done: int | None = None
    parts_due: int = 0
    layers: int = 0
    cut: tuple[int, ...] = ()
    completes: bool = False
    fresh: bool = True
    microbatches: int = 0
    min_stages: int = 1

    @property
    def goes_back(self) -> bool:
        """Whether it can take back the last iteration that it completed."""
        return bool(self.undoable) or self.no_update


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A worker has done its part of the plan and can go live.

    Attributes:
        rank: the worker.
        replayed: iterations that it has replayed.
        from_peers: bytes of log segments that it read for the replay from the workers that wrote them.
        from_store: bytes of log segments that it read from the store.
        received: bytes of layers that came from other workers.
        loaded_own: bytes of a checkpoint that it read from its machine's disk.
        loaded_peers: bytes of it that it read from other machines' disks.
        loaded_store: bytes of it that it read from the store.
    """

    rank: int
    generation: int
    replayed: int = 0
    from_peers: int = 0
    from_store: int = 0
    received: int = 0
    loaded_own: int = 0
    loaded_peers: int = 0
    loaded_store: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFailed:
    """A worker's replay is impossible: a log is missing, torn, corrupt, or diverged.

    Attributes:
        rank: the worker.
        generation: that of the replay.
        reason: what happened.
        diverged: what is computed again is not what it was.
        differs_at: the iteration in which this worker itself computed other bytes than the original; None if
            it did not.
        doubts: the checkpoint that a divergence puts in doubt: the state comes from it, and no digest
            vouches for it. None if there is none.
    """

    rank: int
    generation: int
    reason: str
    diverged: bool = False
    differs_at: int | None = None
    doubts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged:
    """A worker's part of a committed checkpoint is not what was saved, or it is gone."""

    rank: int
    generation: int
    iteration: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpDeclined:
    """A survivor cannot compute microbatches of a replay. The replay continues without helpers."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationFailed:
    """Communication failed in a worker, and no machine was found dead within the deadline."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPersisted:
    """A worker's part of a global checkpoint is in the store.

    ``epoch`` counts the fallbacks: parts of different histories never make one checkpoint. ``generation`` is
    the one in which the part was saved, even if the write ended in a later one. A part does not count if its
    worker was replaced since, or has undone the iteration. ``digest`` is that of the list of the part's
    files; empty if a replica saves the part for this worker.
    """

    rank: int
    iteration: int
    epoch: int
    generation: int
    path: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """The marker of a global checkpoint is in the store.

    Attributes:
        iteration: completed iterations.
        keep: committed checkpoints that this run keeps, including this one.
        earlier: older ones that a resumed run found in the store, oldest first.
    """

    iteration: int
    epoch: int
    keep: int = 1
    earlier: tuple[int, ...] = ()


REQUESTED_AHEAD = 2
"""Iterations from a request to its early checkpoint. In the iteration between, all workers learn of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequested:
    """A worker whose log nears its budget asks all workers to save before the regular checkpoint is due.

    It asks between two steps, so every other worker has completed as many iterations as it has, or one less.

    Attributes:
        rank: the worker that asks.
        iteration: completed iterations to save: :data:`REQUESTED_AHEAD` more than that worker has completed.
        generation: the one in which it trains.
        reason: why, in words.
    """

    rank: int
    iteration: int
    generation: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequested:
    """Layers are to be redistributed among the stages, before an iteration that all workers are yet to begin.

    Attributes:
        rank: the worker that asks.
        generation: the one in which it trains.
        iteration: completed iterations at which all workers stop for it: :data:`REQUESTED_AHEAD` more than
            that worker has completed.
        layers: the number of layers of each stage, in the pipeline's order.
        reason: why, in words.
    """

    rank: int
    generation: int
    iteration: int
    layers: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesRequested:
    """Replicas are to get other shares of global batches, before an iteration that all are yet to begin.

    Attributes:
        rank: the worker that asks.
        generation: the one in which it trains.
        iteration: completed iterations at which all workers stop for it: :data:`REQUESTED_AHEAD` more than
            that worker has completed.
        shares: samples of each replica in a global batch.
        reason: why, in words.
    """

    rank: int
    generation: int
    iteration: int
    shares: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBoundaryReached:
    """A worker has completed the iterations before a change of layers or shares, and waits for the others."""

    rank: int
    generation: int
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDeclined:
    """A worker cannot take or give layers: it has too little memory, or the script cannot build one."""

    rank: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePlanned:
    """Another world is to take over: its workers are started beside those that train (`recovery/worlds.py`).

    Attributes:
        world: its number: one more than that of the last one that was planned.
        machines: by slot.
        command: its script, or module, and the arguments; empty for the same ones as before.
        proof: that the command comes from a member of the job (`network/command_proof.py`), if there is one.
        reload: its workers read the program's files again, instead of those with which the run began.
        plan: its layout, as text that its workers read; empty for the same one as before.
        reason: why, in words.
        asked_by: who asks, in words.
        before_ns: where a policy asks, the time of an iteration in the present world.
        after_ns: the forecast of it in the next one.
        cost_ns: the forecast of the time for which training stands still.
    """

    world: int
    machines: tuple[str, ...]
    command: tuple[str, ...] = ()
    proof: str = ""
    reload: bool = False
    plan: str = ""
    reason: str = ""
    asked_by: str = "somebody"
    before_ns: int = 0
    after_ns: int = 0
    cost_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPrepared:
    """A worker of the next world has made its model and waits for its state."""

    rank: int
    world: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRequested:
    """The next world is to take over before an iteration that no worker has begun yet.

    Attributes:
        rank: the worker that asks.
        generation: the one in which it trains.
        iteration: completed iterations at which all workers stop for it: :data:`REQUESTED_AHEAD` more than
            that worker has completed.
        world: the next world's number.
    """

    rank: int
    generation: int
    iteration: int
    world: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOffered:
    """A worker has stopped for the next world, and serves its state until that has taken over.

    Attributes:
        rank: the worker.
        generation: the one in which it trained.
        iteration: completed iterations of its state.
        address: ``host:port`` at which it serves the state.
        digest: of the list of tensors there.
        size: of these tensors, in bytes.
    """

    rank: int
    generation: int
    iteration: int
    address: str
    digest: str
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTaken:
    """A worker of the next world has its state.

    Attributes:
        rank: the worker.
        world: its world's number.
        own: bytes that came from its own machine.
        peers: bytes that came from other machines.
    """

    rank: int
    world: int
    own: int = 0
    peers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeGivenUp:
    """The next world does not take over: the present one trains on as if nothing had been planned."""

    world: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAwaited:
    """A worker is about to form the group of its replay, or of layers that move, and waits for its members.

    For the group of a generation no worker waits: all of them form it once all are ready.
    """

    rank: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceNoted:
    """A worker has become persistently slower than its peers, or is so no more.

    Attributes:
        rank: the worker.
        generation: the one in which it trains.
        iteration: iterations that it has completed.
        permille: how long it takes for its own work, in thousandths of what its peers would take; at most
            1000 if it is slower no more.
    """

    rank: int
    generation: int
    iteration: int
    permille: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDiffered:
    """A step was computed again from the same state and data, and something came out unlike.

    ``kind`` is ``once``, ``each time`` or ``not deterministic`` (`runtime/verify/verdict.py`), ``ranks`` are
    the workers on which the difference began, and ``tensors`` says in what. ``right``: what counts now is a
    result that came out twice.
    """

    generation: int
    iteration: int
    ranks: tuple[int, ...]
    kind: str
    tensors: str
    right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditBegun:
    """A spare computes again what a machine has computed between two checkpoints (`recovery/audits.py`).

    Attributes:
        machine: the spare.
        slot: the machine that is audited.
        begin: completed iterations of the checkpoint that it begins with.
        until: those of the checkpoint with which its state is compared.
    """

    machine: str
    slot: int
    begin: int
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEnded:
    """A spare has computed again what a machine has computed between two checkpoints.

    Attributes:
        machine: the spare, as the next three are those of :class:`AuditBegun`.
        slots: all machines whose work was computed again: those that are rebuilt together. Empty if that was
            not possible.
        rank: the worker on which the first difference is.
        iteration: in which it is; None if there is none.
        tensors: in what, in words.
        digest: of what the spare has computed there: two audits that agree have the same one.
        changed: what the worker has sent is what the spare has computed; another worker received other bytes.
        problem: why it could not be computed again; empty if it could.
    """

    machine: str
    slot: int
    begin: int
    until: int
    slots: tuple[int, ...] = ()
    rank: int = 0
    iteration: int | None = None
    tensors: str = ""
    digest: str = ""
    changed: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsDoubted:
    """All checkpoints after one may hold what a machine has computed wrong: all workers go back to that one.

    Attributes:
        generation: the one in which they train.
        iteration: completed iterations of the checkpoint to which they go back.
        reason: why, in words.
    """

    generation: int
    iteration: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFinished:
    """A worker has completed its last iteration. It stays until all workers have."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptExited:
    """The script of a worker ended with exit code 0.

    Attributes:
        machine: the worker's machine.
        started_in: the generation in which the worker was started.
        rank: the worker; None for all workers of the machine.
        iteration: iterations that it had completed; None if that is unknown.
    """

    machine: str
    started_in: int
    rank: int | None = None
    iteration: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFailed:
    """A script, as started in generation ``started_in``, raised or exited with an error of its own.

    That is not a machine's death. ``usage`` marks an error that the user can fix. Of these, ``differs`` marks
    one of a worker that runs another program than the job's other workers do, and ``alike`` one in which each
    other machine would end, too. ``iteration`` counts what the worker had completed; None if that is unknown.
    ``cause`` and ``evidence`` are those of :class:`MachineLost`.
    """

    machine: str
    started_in: int
    reason: str
    exit_code: int = 1
    usage: bool = False
    differs: bool = False
    alike: bool = False
    iteration: int | None = None
    cause: str = ""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """Machines did not answer before the deadline of a phase. The event counts in that phase only."""

    generation: int
    phase: str
    machines: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClosed:
    """The job ends on request (Ctrl-C, SIGTERM), or because it cannot continue: ``cause`` as elsewhere."""

    reason: str
    exit_code: int = 1
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected:
    """A test is about to inject a fault. Each fault happens once in a run."""

    fault: str


Event = (
    JobOpened
    | MachineJoined
    | MachineLost
    | DrainRequested
    | GuestDeclined
    | MachinesRequested
    | WorkerCameBack
    | SessionlessWorkers
    | StatusReported
    | WorkerReady
    | ReplayFailed
    | CheckpointDamaged
    | HelpDeclined
    | CommunicationFailed
    | PartPersisted
    | CheckpointCommitted
    | CheckpointRequested
    | LayoutRequested
    | SharesRequested
    | LayoutBoundaryReached
    | LayoutDeclined
    | ChangePlanned
    | NextPrepared
    | SwitchRequested
    | StateOffered
    | StateTaken
    | ChangeGivenUp
    | GroupAwaited
    | PaceNoted
    | StepDiffered
    | AuditBegun
    | AuditEnded
    | CheckpointsDoubted
    | WorkerFinished
    | ScriptExited
    | ScriptFailed
    | DeadlinePassed
    | JobClosed
    | FaultInjected
)

OF_A_GENERATION: frozenset[type[Event]] = frozenset(
    {
        SessionlessWorkers,
        WorkerReady,
        ReplayFailed,
        CheckpointDamaged,
        HelpDeclined,
        CommunicationFailed,
        CheckpointRequested,
        LayoutRequested,
        SharesRequested,
        LayoutBoundaryReached,
        LayoutDeclined,
        SwitchRequested,
        StateOffered,
        GroupAwaited,
        PaceNoted,
        StepDiffered,
        CheckpointsDoubted,
        WorkerFinished,
        DeadlinePassed,
    }
)
"""Events that count only in the generation that they name. A report may also count in a later one."""

EVENTS: dict[str, type[Event]] = {cls.__name__: cls for cls in Event.__args__}
