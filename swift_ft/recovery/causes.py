"""Causes of losses and of failed scripts: whose fault it was, and what a person should do. Pure.

Whoever sees a failure first says in its event what it knows. What it leaves open follows from the kind of the
event here, for all participants alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from swift_ft.recovery import events as ev


class Cause(StrEnum):
    """Whose fault a failure is."""

    SCRIPT = "script"
    """An error of the user's program, or of a library that it uses."""
    DATA = "data"
    """A sample that the user's dataset could not read or make."""
    NATIVE = "native code"
    """A signal that code in C or C++ gets for its own error, such as SIGSEGV."""
    MEMORY = "out of memory"
    """The kernel, Python or a device had no memory left."""
    MACHINE = "machine"
    """A whole machine is gone, is silent, or computes something else than the others."""
    DEVICE = "device"
    """An accelerator reports an error."""
    NETWORK = "network"
    """Connections between living machines break."""
    STORE = "store"
    """The store of logs and checkpoints cannot be used, or has lost or changed files."""
    SIGNAL = "signal from outside"
    """A scheduler or a person has stopped or killed a process."""
    INJECTED = "injected fault"
    """A test's, of ``--inject``."""
    RUNTIME = "swift_ft"
    """The runtime itself."""


ADVICE = {
    Cause.SCRIPT: "mend the script, and begin it again with --resume",
    Cause.DATA: "mend this sample, or let the dataset leave it out, and begin again with --resume",
    Cause.NATIVE: "look at what the library does there; if it is one machine each time, replace it",
    Cause.MEMORY: "let the script use less memory, or give the machine more",
    Cause.MACHINE: "look at this machine's kernel log, power and hardware",
    Cause.DEVICE: "look at the device and the driver's log; if it comes again, drain the machine",
    Cause.NETWORK: "look at the links between these machines, and at their errors",
    Cause.STORE: "look at the store's disk or server, and run swift-recover verify",
    Cause.SIGNAL: "nothing if somebody meant it; else see who sent it (scheduler, limits, a person)",
    Cause.INJECTED: "nothing",
    Cause.RUNTIME: "report it to the developers of swift_ft, with this run's --events-out",
}
"""The next step of a person, by cause."""

_OWN_ERRORS = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"})

# Names of classes of errors, and parts of texts where torch has no class of its own, or one for too much.
_NAMES = {
    Cause.MEMORY: ("OutOfMemoryError", "MemoryError"),
    Cause.INJECTED: ("InjectedError",),
    Cause.DEVICE: ("AcceleratorError",),
    Cause.NETWORK: ("DistBackendError", "DistNetworkError", "DistStoreError", "RendezvousLostError"),
    Cause.STORE: ("StoreNotWritableError", "StoreGoneError", "CheckpointError"),
    Cause.RUNTIME: ("GaveUpError", "UndoError", "RecoveryError"),
}
_TEXTS_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "cannot allocate memory"),
    "_STATUS_ALLOC_FAILED",  # of cuBLAS, cuDNN and others
)
_TEXTS_OF_SCRIPT = ("device-side assert",)
"""An index out of range, as a rule: the kernel checks what the script gives it."""
_TEXTS = {
    Cause.NETWORK: (
        *("gloo/transport/", "Connection closed by peer", "Connection reset by peer"),
        *("ncclRemoteError", "ncclSystemError", "NCCL communicator was aborted"),
    ),
    Cause.DEVICE: ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "HIP error"),
}


def cause_of_signal(name: str) -> Cause:
    """Whose fault the end of a process by a signal is.

    Args:
        name: of the signal, such as ``SIGSEGV``.
    """
    return Cause.NATIVE if name in _OWN_ERRORS else Cause.SIGNAL


def cause_of_error(names: Iterable[str], text: str) -> Cause:
    """Whose fault an exception is.

    Args:
        names: of its class and of the classes above.
        text: its message.
    """
    found = {*names}
    # torch raises all errors of CUDA as one class, and most others of memory, devices and connections as
    # plain RuntimeError; the system says by a number that it has no memory, which Python puts into the text.
    said = "RuntimeError" in found
    if (said or "OSError" in found) and _says(text, _TEXTS_OF_MEMORY):
        return Cause.MEMORY
    if said and _says(text, _TEXTS_OF_SCRIPT):
        return Cause.SCRIPT
    for cause, known in _NAMES.items():
        if found & {*known}:
            return cause
    for cause, texts in _TEXTS.items():
        if said and _says(text, texts):
            return cause
    # The script's own connections, to a server of its data for example.
    return Cause.NETWORK if "ConnectionError" in found else Cause.SCRIPT


def _says(text: str, parts: tuple[str, ...]) -> bool:
    return any(part.lower() in text.lower() for part in parts)


def cause_of(event: ev.Event) -> Cause:
    """Whose fault an event is that interrupts a job: what the event says, or what its kind does."""
    match event:
        case ev.MachineLost(out_of_memory=True):
            return Cause.MEMORY
        case ev.MachineLost(stopped_by=number) if number:
            return Cause.SIGNAL
        case ev.MachineLost(cause=said) | ev.ScriptFailed(cause=said) | ev.JobClosed(cause=said) if said:
            return Cause(said)
        case ev.ScriptFailed():
            return Cause.SCRIPT
        case ev.CommunicationFailed():
            return Cause.NETWORK
        case ev.CheckpointDamaged():
            return Cause.STORE
        case ev.ReplayFailed(diverged=diverged):
            return Cause.MACHINE if diverged else Cause.STORE
        case ev.JobClosed():
            return Cause.SIGNAL if event.exit_code > 128 else Cause.RUNTIME
    return Cause.MACHINE


def evidence_of(event: ev.Event) -> tuple[str, ...]:
    """The facts by which a cause was found, besides the event's reason."""
    return event.evidence if isinstance(event, ev.MachineLost | ev.ScriptFailed) else ()
