"""Events of the journal about machines: they join, are lost, are asked to leave."""

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
        max_machine_failures: a machine that was lost so often by its own fault is left out; None if none is.
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
    max_machine_failures: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineJoined:
    """A machine offers itself, for the slot it prefers or for any.

    ``address`` (``host:port``) is where its neighbour watches it (`launch/detection/sentinel.py`). A machine
    whose ``setup`` is not that of :class:`JobOpened` is refused. Machines of one ``domain`` may be lost
    together; one without a name is a failure domain of its own. A guest is a second machine on the hardware
    of its ``host``, which fills a slot for as long as no machine of its own comes; it is lost with its host.
    ``identity`` names its hardware, and outlives its launcher; it is empty where that is unknown.
    """

    machine: str
    preferred_slot: int | None = None
    address: str = ""
    setup: tuple[str, ...] = ()
    domain: str = ""
    host: str = ""
    identity: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheckFailed:
    """A machine stays out, under the name by which it was to join: it has failed a health check."""

    machine: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLost:
    """A machine counts as failed, however that was detected. It can return only under a new name.

    ``reporter`` is the machine that found it, empty for one that reports itself. A fenced machine that wakes
    up may still report others; such a report is ignored. ``on_request`` marks a machine that leaves because
    it was asked to (:class:`DrainRequested`), which is no failure. ``silent`` marks one of which nothing was
    heard, though its connection lived: it may only have been frozen, and come back. ``stopped_by`` is the
    number of the signal that its launcher was stopped by, if it was. ``starts_again`` marks one whose worker
    ends on purpose, to begin its script once more: that does not count as a loss either. ``cause`` is one of
    :class:`swift_ft.recovery.causes.Cause`, empty where the reporter knows no better than the event's kind;
    ``evidence`` are facts beside the reason. ``ran_s`` is for how many seconds its workers had run; 0 if that
    is unknown. ``recorded`` are, by local rank, the iterations before which they have given their records;
    empty if none was heard of.
    """

    machine: str
    reason: str
    reporter: str = ""
    on_request: bool = False
    silent: bool = False
    stopped_by: int = 0
    starts_again: bool = False
    cause: str = ""
    evidence: tuple[str, ...] = ()
    ran_s: int = 0
    recorded: tuple[int, ...] = ()


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
    """The workers of a machine run a script without a session: they can only be restarted.

    ``ran_s`` is for how many seconds they have run.
    """

    machine: str
    generation: int
    ran_s: int = 0
