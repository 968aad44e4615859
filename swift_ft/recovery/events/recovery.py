"""Events of the journal about a recovery: the reports of workers, and how it goes on."""

from __future__ import annotations

from dataclasses import dataclass


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
        undoes_exactly: an undo of all these gives back their very bits.
        rounds: its messages are logged, and an undo does not give back the bits that they were sent with.
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
        copies: its state has shards, of which its script has copies sent to the memory of another machine.
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
        takes_unlike: its batches follow unlike numbers of microbatches: a session deals them, or its script
            asks its :class:`swift_ft.LayerStack` for them. The worker with the first stage says it.
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
    undoes_exactly: bool = False
    rounds: bool = False
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
    copies: bool = False
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
    takes_unlike: bool = False

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
    """

    rank: int
    generation: int
    reason: str
    diverged: bool = False
    differs_at: int | None = None


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
class GroupAwaited:
    """A worker is about to form the group of its replay, or of layers that move, and waits for its members.

    For the group of a generation no worker waits: all of them form it once all are ready.
    """

    rank: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """Machines did not answer before the deadline of a phase. The event counts in that phase only.

    ``evidence`` says where their workers have stood for long; ``located`` are the machines whose late workers
    have all said so, which work: it is their script that takes too long.
    """

    generation: int
    phase: str
    machines: tuple[str, ...]
    reason: str
    evidence: tuple[str, ...] = ()
    located: tuple[str, ...] = ()
