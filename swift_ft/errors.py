"""The errors of swift_ft, as one tree.

SwiftError
├── UsageError(ValueError)        the user can fix it: one line with cause and remedy, exit code 2
│   ├── NotLaunchedError          the script was not started by swift-run
│   ├── NotAttachedError          a step began before a schedule or a model was attached
│   ├── SessionInUseError         a second Session in the same process
│   ├── StoreNotWritableError     the store's URL cannot be written
│   ├── StoreInUseError           the store holds another run, and neither --resume nor --fresh was given
│   ├── TopologyMismatchError     the checkpoint was made by another topology
│   └── UnsupportedError          something that stock PyTorch allows and swift_ft does not (yet)
├── RecoveryError                 a way back is closed; the global checkpoint is the next one
│   ├── LogMissingError           a message that a replay needs is not in the log
│   ├── LogTornError              a segment ends before its footer
│   ├── LogCorruptError           bytes do not match their checksum
│   ├── ForeignLogError           a segment belongs to another run
│   ├── DivergenceError           a replay produced other bytes than the original did
│   └── CannotHelpError           microbatches of a replay cannot be computed by other workers
├── CheckpointError               a checkpoint could not be written or read
├── UndoError                     the last optimizer step cannot be taken back (any more)
├── GaveUpError                   no way back is left, or the deadline of one passed
├── RendezvousLostError           the rendezvous store does not answer
└── FencedError                   this process belongs to a generation that is over
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CannotHelpError",
    "CheckpointError",
    "DivergenceError",
    "FencedError",
    "ForeignLogError",
    "GaveUpError",
    "LogCorruptError",
    "LogMissingError",
    "LogTornError",
    "NotAttachedError",
    "NotLaunchedError",
    "RecoveryError",
    "RendezvousLostError",
    "SessionInUseError",
    "StoreInUseError",
    "StoreNotWritableError",
    "SwiftError",
    "TopologyMismatchError",
    "UndoError",
    "UnsupportedError",
    "UsageError",
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
    """Something that the user can fix. Ends the process with exit code 2 and one line."""


class NotLaunchedError(UsageError):
    """The script was started by something else than ``swift-run``."""


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


class UnsupportedError(UsageError):
    """Stock PyTorch allows it, swift_ft does not (yet)."""


class RecoveryError(SwiftError):
    """A way back is closed; the next one on the list is taken."""


class LogMissingError(RecoveryError):
    """A message that a replay needs is not in the log."""


class LogTornError(RecoveryError):
    """A segment ends before its footer."""


class LogCorruptError(RecoveryError):
    """Bytes in a segment do not match their checksum."""


class ForeignLogError(RecoveryError):
    """A log segment in this store belongs to another run."""


class DivergenceError(RecoveryError):
    """A replay produced other bytes than the original did."""


class CannotHelpError(RecoveryError):
    """Microbatches of a replay cannot be computed by other workers; it goes on without them."""


class CheckpointError(SwiftError):
    """A checkpoint could not be written or read."""


class UndoError(SwiftError):
    """The last optimizer step cannot be taken back (any more)."""


class GaveUpError(SwiftError):
    """No way back is left, or the deadline of one passed."""


class RendezvousLostError(SwiftError):
    """The rendezvous store does not answer."""


class FencedError(SwiftError):
    """The process belongs to a generation that is over and must not act any more."""
