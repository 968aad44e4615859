"""Transports: the beginning and the end of a generation's groups, for each kind of backend.

gloo forms a group at once, fails where a peer is gone, and cannot abort: its connections are shut down
underneath it. NCCL forms communicators when they are first used, says nothing where a peer is gone, and ends
its waits only if the communicators are aborted, in which case the waits raise nothing. A script may use both.

Private parts used (tested on torch 2.11 to 2.14):

- ``distributed_c10d.ProcessGroupGloo``: torch looks it up there when it makes a group. Of its options
  ``_devices``, ``_threads`` and ``_timeout``.
- ``TORCH_GLOO_LAZY_INIT``: whether gloo connects at once or with the first message. It is a property of the
  device.
- ``TORCH_NCCL_*``: what torch's watchdog does where a peer is gone, and how communicators form.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from swift_ft.host.alarms import Alarm, alarms
from swift_ft.torch_adapters.comm_errors import is_communication
from swift_ft.torch_adapters.communication import GLOO, silent_devices
from swift_ft.torch_adapters.connections import new_connections, shut_down, tcp_connections

_logger = logging.getLogger(__name__)

_NCCL = {  # they count when a group is made
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog ends no process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # nor does the thread that writes what a failed operation was
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # four times as long the watchdog holds all of its group
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # and a watchdog that an abort holds up is no reason to end
}
_UNLESS_SET = {
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",  # else nothing ends the forming of a communicator
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",  # torch's half an hour is for training without recovery
}

STUCK_S = 10.0
"""The longest time that a call of torch may take to end after an abort. It takes milliseconds."""

_BEGIN_S = 1.0
"""The longest time that an abort waits for an operation that is being given to NCCL."""


class Transport(Protocol):
    """Begins and ends the groups of a generation. The training thread makes all calls but :meth:`abort`."""

    def begin(self, *, lazily: bool) -> None:
        """Groups are formed from now on; with ``lazily``, two workers connect when they speak."""

    def forming(self) -> AbstractContextManager[None]:
        """Surrounds the making of a group."""

    def made(self, group: dist.ProcessGroup) -> None:
        """A group of torch was made."""

    def connect(self, peers: Sequence[tuple[dist.ProcessGroup, int]]) -> None:
        """Do what has to be done so that an abort also ends waits for these peers, by their global ranks."""

    def connect_all(self) -> None:
        """All workers are here: connect what no part of them could connect later."""

    def formed(self) -> None:
        """All groups of the generation were made. Those that are made afterwards belong to it, too."""

    def abort(self) -> None:
        """End what the groups wait for. From any thread, and soon: the journal's thread calls this."""

    def end(self) -> None:
        """The groups were left: none of them is used any more."""


class GlooConnections:
    """gloo: an abort shuts down its connections. A worker that gloo does not wake then ends.

    All groups that connect at once share a device of gloo's, which is a port and a thread: without that, to
    form a group takes 10 ms longer (`benchmarks/recovery/groups.py`).

    Connections to checkpoint and log stores that another thread opens while groups form end with them; these
    clients retry.

    Args:
        in_waiter: calls a function that blocks in a thread which an abort can leave behind.
    """

    def __init__(self, in_waiter: Callable[[Callable[[], object]], None]) -> None:
        self._in_waiter = in_waiter
        self._lock = threading.Lock()
        self._sockets: dict[int, str] = {}
        self._before: dict[int, str] | None = None  # while groups form: the connections that were open before
        self._stuck: Alarm | None = None
        self._shared: Any = None  # the options of the first group that connects at once

    def begin(self, *, lazily: bool) -> None:
        """Count all connections that are made from now on as those of the groups."""
        os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazily))
        self._before = tcp_connections()

    @contextlib.contextmanager
    def forming(self) -> Iterator[None]:
        """Within the block, torch forms gloo groups in the waiter's thread, with its timeout.

        gloo has a single timeout. It holds for each later message and for an address that is not published
        yet; for a peer that does not connect, gloo waits five times as long.
        """
        gloo, in_waiter = self, self._in_waiter
        module: Any = dist.distributed_c10d
        original: Any = module.ProcessGroupGloo

        class FormedInWaiter(original):  # type: ignore[misc]  # torch's class, or one that wraps it
            def __init__(self, *place: Any, timeout: timedelta, **others: Any) -> None:
                options = None if any(others.values()) else gloo._with_shared_device(timeout)
                if options is not None:
                    in_waiter(partial(original.__init__, self, *place, options))
                    return
                in_waiter(partial(original.__init__, self, *place, timeout=timeout, **others))
                if not _connects_lazily():
                    gloo._shared = self.options

        module.ProcessGroupGloo = FormedInWaiter
        before = tcp_connections() if self._before is None else None
        try:
            yield
        finally:
            module.ProcessGroupGloo = original
            if before is not None:
                with self._lock:
                    self._sockets |= new_connections(before)

    def _with_shared_device(self, timeout: timedelta) -> Any:
        """The options of another group that connects at once; None where there is no device yet to share."""
        if self._shared is None or _connects_lazily():
            return None
        # With the devices of the first group: to make them anew is half of what torch's own way of
        # reconfiguring a group saves (decision 60).
        options = type(self._shared)()
        options._devices, options._threads = self._shared._devices, self._shared._threads
        options._timeout = timeout
        return options

    def made(self, group: dist.ProcessGroup) -> None:
        """Its connections are known by the time in which they were opened."""

    def connect(self, peers: Sequence[tuple[dist.ProcessGroup, int]]) -> None:
        """Send one message each way, and connect at once from now on.

        An abort can only shut down connections that are open.
        """
        over_gloo = [(group, rank) for group, rank in peers if not aborts_in_silence(group)]
        self._in_waiter(partial(_first_messages, over_gloo))
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"

    def connect_all(self) -> None:
        """Nothing to do: gloo connects where it forms a group."""

    def formed(self) -> None:
        """All connections of the generation are open."""
        with self._lock:
            if self._before is not None:
                self._sockets = new_connections(self._before)
            self._before = None

    def abort(self) -> None:
        """Shut all connections down, with the one to the rendezvous store, where gloo waits for addresses."""
        with self._lock:
            if self._before is not None:
                self._sockets |= new_connections(self._before)
            shut_down(self._sockets)
            if self._sockets and self._stuck is None:
                self._stuck = alarms.after(STUCK_S, partial(_end_if_stuck, GLOO))
            self._sockets = {}

    def end(self) -> None:
        """No wait is left that could be stuck."""
        self._before = None
        with self._lock:
            if self._stuck is not None:
                self._stuck.cancel()
            self._stuck = None


class AbortedCommunicators:
    """NCCL, and what is like it: a thread aborts the communicators of a generation that is over.

    None is used again. torch's watchdog is switched off: it would end this process, which is alive and has
    its state, because another one is dead. An abort waits for calls that give an operation to NCCL, and for
    communicators that form, which fail by themselves after ``TORCH_NCCL_NONBLOCKING_TIMEOUT``.

    The communicators of whole groups form when a generation begins, and not when they are first used: after
    a loss, some stages are an iteration ahead. One would wait in its step for all members of a batch's group,
    and another one for a message of that step before it comes to its own first batch.

    Args:
        in_waiter: calls a function that blocks in a thread which an abort can leave behind.
        has_begun: waits until no call gives an operation to a backend; False if there is one after so many
            seconds.
    """

    def __init__(
        self, in_waiter: Callable[[Callable[[], object]], None], has_begun: Callable[[float], bool]
    ) -> None:
        self._in_waiter = in_waiter
        self._has_begun = has_begun
        os.environ.update(_NCCL)
        for name, value in _UNLESS_SET.items():
            os.environ.setdefault(name, value)
        self._lock = threading.Lock()
        self._groups: list[dist.ProcessGroup] = []
        self._aborting: threading.Thread | None = None

    def begin(self, *, lazily: bool) -> None:
        """Nothing to do: nothing connects before the first operation."""

    @contextlib.contextmanager
    def forming(self) -> Iterator[None]:
        """Making a group waits for no one."""
        yield

    def made(self, group: dist.ProcessGroup) -> None:
        """It is aborted with the others, in the order in which they were made."""
        if aborts_in_silence(group):
            with self._lock:
                self._groups.append(group)

    def connect(self, peers: Sequence[tuple[dist.ProcessGroup, int]]) -> None:
        """Nothing to do: an abort also ends what is not connected."""

    def connect_all(self) -> None:
        """Form the communicator of each group. All workers do so in the order in which groups were made."""
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            self._in_waiter(partial(_first_collective, group))

    def formed(self) -> None:
        """Nothing to do."""

    def abort(self) -> None:
        """Abort all communicators, in a thread of their own: an abort of NCCL waits for its device."""
        with self._lock:
            groups, self._groups = self._groups, []
            if groups:
                self._aborting = threading.Thread(
                    target=self._abort_all, args=(groups, self._aborting), name="swift-abort", daemon=True
                )
                self._aborting.start()

    def end(self) -> None:
        """Wait until the aborts are done. A worker whose device does not answer ends."""
        with self._lock:
            aborting, self._aborting = self._aborting, None
        if aborting is not None:
            patience_s = STUCK_S + float(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"])
            aborting.join(patience_s)
            if aborting.is_alive():
                _end_process("NCCL did not abort", patience_s)

    def _abort_all(self, groups: list[dist.ProcessGroup], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        if not self._has_begun(_BEGIN_S):
            _logger.debug("an operation still begins, or its communicator forms")
        # Side by side: an abort waits for its device, on which operations of the other groups hang.
        aborts = [threading.Thread(target=_abort, args=(group,), daemon=True) for group in groups]
        groups.clear()
        for abort in aborts:
            abort.start()
        for abort in aborts:
            abort.join()


def _abort(group: dist.ProcessGroup) -> None:
    try:
        group.abort()
    except RuntimeError:  # gloo's part of a group of two backends; NCCL's aborts what it can
        _logger.debug("a group could not be aborted", exc_info=True)


def _connects_lazily() -> bool:
    return os.environ.get("TORCH_GLOO_LAZY_INIT") == "1"


def aborts_in_silence(group: dist.ProcessGroup) -> bool:
    """Whether an abort of a group ends waits without an error, on one of its devices at least."""
    return bool(silent_devices(group))


def _first_collective(group: dist.ProcessGroup) -> None:
    """Returns once all members have come, and the device is done."""
    for device in silent_devices(group):  # a group of two backends has gloo for the host, which is connected
        one = torch.ones(1, device=device)
        group.allreduce([one]).wait()
        one.item()


def _first_messages(connections: Sequence[tuple[dist.ProcessGroup, int]]) -> None:
    """Send one message each way."""
    messages = [
        (exchange(tensor, other, group=group), tensor)
        for group, other in connections
        for exchange, tensor in ((dist.isend, torch.zeros(1)), (dist.irecv, torch.zeros(1)))
    ]
    for work, _ in messages:
        assert work is not None
        work.wait()


def _end_if_stuck(transport: str) -> None:
    """End this process if its main thread is stuck in communication.

    Rarely, gloo does not wake a thread whose connection closed during a send, and nothing else can. The
    worker then counts as dead and is replaced. A thread that computes is left alone.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is not None and is_communication(frame.f_code.co_filename, frame.f_code.co_name):
        _end_process(f"{transport} did not end a wait", STUCK_S)


def _end_process(what: str, within_s: float) -> None:
    _logger.error(
        "%s within %g s after its connections closed: this worker ends, and is replaced",
        what,
        within_s,
        extra={"event": "worker_stuck"},
    )
    logging.shutdown()  # flushes
    os.kill(os.getpid(), signal.SIGKILL)
