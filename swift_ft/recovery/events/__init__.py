"""Events: the vocabulary of the journal.

Every participant reads the same events in the same order (`coordination/journal.py`) and feeds them to the
same pure state machine (`recovery/protocol.py`). Events are facts; the participant that
observes one first records it. Each file has those of one subject.
"""

from __future__ import annotations

from swift_ft.recovery.events.audits import (
    AuditBegun,
    AuditEnded,
    StepDiffered,
)
from swift_ft.recovery.events.checkpoints import (
    REQUESTED_AHEAD,
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointRequested,
    CheckpointsDoubted,
    PartPersisted,
)
from swift_ft.recovery.events.ends import (
    FaultInjected,
    JobClosed,
    ScriptExited,
    ScriptFailed,
    WorkerFinished,
)
from swift_ft.recovery.events.layouts import (
    LayoutBoundaryReached,
    LayoutDeclined,
    LayoutRequested,
    PaceNoted,
    SharesRequested,
)
from swift_ft.recovery.events.machines import (
    DrainRequested,
    GuestDeclined,
    HealthCheckFailed,
    JobOpened,
    MachineJoined,
    MachineLost,
    MachinesRequested,
    SessionlessWorkers,
    WorkerCameBack,
)
from swift_ft.recovery.events.recovery import (
    CommunicationFailed,
    DeadlinePassed,
    GroupAwaited,
    HelpDeclined,
    ReplayFailed,
    StatusReported,
    WorkerReady,
)
from swift_ft.recovery.events.worlds import (
    ChangeGivenUp,
    ChangePlanned,
    NextPrepared,
    StateOffered,
    StateTaken,
    SwitchRequested,
)

__all__ = [
    "EVENTS",
    "OF_A_GENERATION",
    "REQUESTED_AHEAD",
    "AuditBegun",
    "AuditEnded",
    "ChangeGivenUp",
    "ChangePlanned",
    "CheckpointCommitted",
    "CheckpointDamaged",
    "CheckpointRequested",
    "CheckpointsDoubted",
    "CommunicationFailed",
    "DeadlinePassed",
    "DrainRequested",
    "Event",
    "FaultInjected",
    "GroupAwaited",
    "GuestDeclined",
    "HealthCheckFailed",
    "HelpDeclined",
    "JobClosed",
    "JobOpened",
    "LayoutBoundaryReached",
    "LayoutDeclined",
    "LayoutRequested",
    "MachineJoined",
    "MachineLost",
    "MachinesRequested",
    "NextPrepared",
    "PaceNoted",
    "PartPersisted",
    "ReplayFailed",
    "ScriptExited",
    "ScriptFailed",
    "SessionlessWorkers",
    "SharesRequested",
    "StateOffered",
    "StateTaken",
    "StatusReported",
    "StepDiffered",
    "SwitchRequested",
    "WorkerCameBack",
    "WorkerFinished",
    "WorkerReady",
]

Event = (
    JobOpened
    | MachineJoined
    | HealthCheckFailed
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
