"""The errors of swift_ft, as one tree.

SwiftError
├── UsageError(ValueError)        the user can fix it: one line with cause and remedy, exit code 2
│   ├── NotLaunchedError          the script was not started by swift-run
│   ├── NotAttachedError          a step began before a schedule or a model was attached
│   ├── SessionInUseError         a second Session in the same process
│   ├── StoreNotWritableError     the store's URL cannot be written
│   ├── StoreInUseError           the store holds another run, and neither --resume nor --fresh was given
│   ├── TopologyMismatchError     the checkpoint was made by another topology
│   ├── ChangedBatchError         a repeated iteration got another batch than before
│   ├── IncompleteStateError      training changes something that is not in Session(state)
│   └── UnsupportedError          stock PyTorch supports it, swift_ft does not (yet)
├── RecoveryError                 a recovery mode failed; the global checkpoint is the next one
│   ├── LogMissingError           a message that a replay needs is not in the log
│   ├── LogTornError              a segment ends before its footer
│   ├── LogCorruptError           bytes do not match their checksum
│   ├── ForeignLogError           a segment belongs to another run
│   ├── DivergenceError           a replay produced bytes that differ from the original's
│   └── CannotHelpError           other workers cannot compute microbatches of a replay
├── CheckpointError               a checkpoint could not be written or read
│   └── DamagedCheckpointError    its bytes are not those that were saved, or they are gone
├── UndoError                     the last optimizer step cannot be undone (any more)
├── GaveUpError                   no recovery mode is left, or one exceeded its deadline
│   └── JobEndedError             the job has ended, and all launchers say why
├── RendezvousLostError           the rendezvous store does not answer
│   └── NotRestoredError          it was restarted, and what the run had there is not complete
├── KeptOutError                  this machine takes no part in the run, and another one may: exit code 78
├── SchedulerError                the scheduler could not be asked, or refuses
└── FencedError                   this process belongs to a generation that is over
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CannotHelpError",
    "ChangedBatchError",
    "CheckpointError",
    "DamagedCheckpointError",
    "DivergenceError",
    "FencedError",
    "ForeignLogError",
    "GaveUpError",
    "IncompleteStateError",
    "JobEndedError",
    "KeptOutError",
    "LogCorruptError",
    "LogMissingError",
    "LogTornError",
    "NotAttachedError",
    "NotLaunchedError",
    "NotRestoredError",
    "RecoveryError",
    "RendezvousLostError",
    "SchedulerError",
    "SessionInUseError",
    "StoreInUseError",
    "StoreNotWritableError",
    "SwiftError",
    "TopologyMismatchError",
    "UndoError",
    "UnsupportedError",
    "UsageError",
    "first_line",
]


class SwiftError(Exception):
    """Base of all errors of swift_ft.

    Args:
        message: what happened, and what to do next.
        fields: facts for a program to read (``path``, ``key``, ``rank``, ``iteration`` ...).
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields


class UsageError(SwiftError, ValueError):
    """The user can fix it. Ends the process with exit code 2 and one line."""


class NotLaunchedError(UsageError):
    """The script was not started by ``swift-run``."""


class NotAttachedError(UsageError):
    """A step began before ``session.attach_pipeline(schedule)`` or ``session.attach_ddp(model)``."""


class SessionInUseError(UsageError):
    """A process can hold one :class:`swift_ft.Session` at a time."""


class StoreNotWritableError(UsageError):
    """The store's URL cannot be written."""


class StoreInUseError(UsageError):
    """The store holds another run."""


class TopologyMismatchError(UsageError):
    """The store's checkpoint was made by another number of machines, workers or stages."""


class ChangedBatchError(UsageError):
    """A repeated or replayed iteration got another batch than before."""


class IncompleteStateError(UsageError):
    """Training changes a parameter, an optimizer or a scheduler that is not in ``Session(state)``."""


class UnsupportedError(UsageError):
    """Stock PyTorch supports it, swift_ft does not (yet)."""


class RecoveryError(SwiftError):
    """A recovery mode failed; the next one is tried."""


class LogMissingError(RecoveryError):
    """A message that a replay needs is not in the log."""


class LogTornError(RecoveryError):
    """A segment ends before its footer."""


class LogCorruptError(RecoveryError):
    """Bytes in a segment do not match their checksum."""


class ForeignLogError(RecoveryError):
    """A log segment in this store belongs to another run."""


class DivergenceError(RecoveryError):
    """A replay produced bytes that differ from the original's.

    Where this worker has computed them, the field ``computed_in`` is the iteration.
    """


class CannotHelpError(RecoveryError):
    """Other workers cannot compute microbatches of a replay; it continues without them."""


class CheckpointError(SwiftError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """The bytes of a committed checkpoint are not those that were saved, or they are gone."""


class UndoError(SwiftError):
    """The last optimizer step cannot be undone (any more)."""


class GaveUpError(SwiftError):
    """No recovery mode is left, or one exceeded its deadline."""


class JobEndedError(GaveUpError):
    """The job has ended, and this worker learned it while it recovered. All launchers say why."""


class RendezvousLostError(SwiftError):
    """The rendezvous store does not answer."""


class NotRestoredError(RendezvousLostError):
    """The store was restarted, and cannot get back all that the run had there. It will not get better."""


class KeptOutError(SwiftError):
    """A machine differs from the others of the run, or is not healthy: another one fills its slot.

    Ends its launcher with an exit code of its own, so that a scheduler does not take it for the run's end.
    """


class SchedulerError(SwiftError):
    """The scheduler of the cluster could not be asked for machines, or refuses."""


class FencedError(SwiftError):
    """The process belongs to a generation that is over, and must not act any more."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
