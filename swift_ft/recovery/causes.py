"""Causes of losses and of failed scripts: whose fault it was, and what a person should do. Pure.

Whoever sees a failure first says in its event what it knows. What it leaves open follows from the kind of the
event here, for all participants alike.
"""

from __future__ import annotations

import errno
import re
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
    """Connections between living machines break, or those to a server that the script needs."""
    STORE = "store"
    """The store, or another disk or file server, cannot be used, or has lost or changed files."""
    SCHEDULER = "scheduler"
    """The scheduler, in whose job a launcher runs, has stopped it."""
    SIGNAL = "signal from outside"
    """A person, or whoever else, has stopped or killed a process."""
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
    Cause.SCHEDULER: "ask the scheduler why (time limit, preemption, a person); requeue what it stopped",
    Cause.SIGNAL: "nothing if somebody meant it; else see who sent it (scheduler, limits, a person)",
    Cause.INJECTED: "nothing",
    Cause.RUNTIME: "report it to the developers of swift_ft, with this run's --events-out",
}
"""The next step of a person, by cause."""

_OWN_ERRORS = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"})

# Names of classes of errors (see names_of), and parts of texts where torch has no class of its own, or one
# for too much.
_NAMES = {
    Cause.MEMORY: ("OutOfMemoryError", "MemoryError"),
    Cause.INJECTED: ("swift_ft.InjectedError",),
    Cause.DEVICE: ("AcceleratorError",),
    Cause.NETWORK: (
        *("DistBackendError", "DistNetworkError", "DistStoreError", "swift_ft.RendezvousLostError"),
        # The script's own connections, to a server of its data for example: Python's errors, and those of
        # clients that are often used (urllib3, requests, httpx, aiohttp, botocore).
        *("ConnectionError", "TimeoutError", "gaierror", "URLError", "IncompleteRead"),
        *("ReadTimeout", "ReadTimeoutError", "ConnectTimeout", "ConnectTimeoutError", "TimeoutException"),
        *("NewConnectionError", "MaxRetryError", "ChunkedEncodingError", "NetworkError"),
        *("ClientConnectionError", "EndpointConnectionError", "ConnectionClosedError"),
    ),
    Cause.STORE: (
        *("swift_ft.StoreNotWritableError", "swift_ft.StoreGoneError", "swift_ft.CheckpointError"),
    ),
    Cause.RUNTIME: ("swift_ft.GaveUpError", "swift_ft.UndoError", "swift_ft.RecoveryError"),
}
_NUMBERS = {
    Cause.NETWORK: frozenset(
        {
            *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.ECONNABORTED, errno.ECONNRESET),
            *(errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        }
    ),
    Cause.STORE: frozenset({errno.EIO, errno.ESTALE, errno.EREMOTEIO}),
}
"""The system's numbers for what a script cannot mend. A disk that is full is none of them."""
_NUMBER = re.compile(r"\[Errno (\d+)\]")
_BUSY_SERVER = re.compile(r"(?:^|HTTP Error |error ')(?:429|5\d\d)\b")
"""At the begin of an answer: the server is to blame, or there are too many of us. 404 is the script's."""
_MISTAKEN_ADDRESS = ("unknown url type", "no host given")
_OWN_PIPE = "BrokenPipeError"
"""To a process on this machine, as a rule: clients of servers make errors of their own of it."""
_TEXTS_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "cannot allocate memory"),
    "_STATUS_ALLOC_FAILED",  # of cuBLAS, cuDNN and others
)
_TEXTS_OF_SCRIPT = ("device-side assert", "ncclInvalidUsage", "ncclInvalidArgument")
"""An index out of range, as a rule, which the kernel checks; and two workers on one device."""
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


def names_of(kind: type[BaseException]) -> list[str]:
    """The names of a class of errors and of the classes above: swift_ft's own with its name before them."""
    return [f"{'swift_ft.' * _is_ours(one)}{one.__name__}" for one in kind.__mro__]


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "swift_ft"


def cause_of_error(names: Iterable[str], text: str) -> Cause:
    """Whose fault an exception is.

    Args:
        names: see :func:`names_of`.
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
    if (answered := _cause_of_answer(found, text)) is not None:
        return answered
    for cause, known in _NAMES.items():
        if found & {*known}:
            return cause
    for cause, texts in _TEXTS.items():
        if said and _says(text, texts):
            return cause
    return Cause.SCRIPT


def _cause_of_answer(found: set[str], text: str) -> Cause | None:
    """Of what the system or a server has answered; None if the classes say enough."""
    number = _NUMBER.search(text) if "OSError" in found else None
    for cause, numbers in _NUMBERS.items():
        if number is not None and int(number[1]) in numbers:
            return cause
    if found & {"HTTPError", "HTTPStatusError"} and _BUSY_SERVER.search(text):
        return Cause.NETWORK
    # Python makes one class of an answer, of an address that is none, and of a file (file://).
    answer = "HTTPError" in found or number is not None or _says(text, _MISTAKEN_ADDRESS)
    return Cause.SCRIPT if _OWN_PIPE in found or ("URLError" in found and answer) else None


def _says(text: str, parts: tuple[str, ...]) -> bool:
    return any(part.lower() in text.lower() for part in parts)


def cause_of(event: ev.Event) -> Cause:
    """Whose fault an event is that interrupts a job: what the event says, or what its kind does."""
    match event:
        case ev.MachineLost(cause=said) | ev.ScriptFailed(cause=said) | ev.JobClosed(cause=said) if said:
            return Cause(said)
        case ev.MachineLost(stopped_by=number) if number:
            return Cause.SIGNAL
        case ev.ScriptFailed():
            return Cause.SCRIPT
        case ev.DeadlinePassed(machines=late, located=located) if {*late} <= {*located}:
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
    told = ev.MachineLost | ev.ScriptFailed | ev.DeadlinePassed | ev.JobClosed
    return event.evidence if isinstance(event, told) else ()
