"""The default process group, one per generation: formed, left, and aborted from another thread."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from swift_ft.recovery.failures import is_communication
from swift_ft.waits import Waits

__all__ = ["GenerationGroup"]

STUCK_S = 10.0
"""After an abort, for a call of torch's communication to end: it takes milliseconds."""

_ALONE_S = 30.0
"""For a collective in a step that is replayed alone."""


class GenerationGroup:
    """The default group of the current generation, and the script's own groups, made anew in each.

    Args:
        rendezvous: a client of the rendezvous store that belongs to the training thread.
        rank: this worker.
        world: number of workers.
        timeout_s: for forming a group. What the script does with it may take as long as it allowed itself.
        called_off: whether nobody waits any more for the group that is due. :meth:`abort` follows when that
            becomes so.

    Attributes:
        close: of those that replay together, with helpers; ends with the default group.
    """

    def __init__(
        self,
        rendezvous: Store,
        *,
        rank: int,
        world: int,
        timeout_s: float,
        called_off: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._world = world
        self._timeout_s = timeout_s
        self._called_off = called_off
        self._backend: str | None = None
        self._patience = timedelta(seconds=timeout_s)  # the script's, from its own group on
        self._waits = Waits()
        self._lock = threading.Lock()
        self._sockets: dict[int, str] = {}
        self._forming: dict[int, str] | None = None  # connections that were open before
        self._stuck: threading.Timer | None = None
        self.close: dist.ProcessGroup | None = None
        self._aborted: list[Callable[[], None]] = []
        self._followed: list[tuple[list[int], Callable[[dist.ProcessGroup], None]]] = []

    def follow(
        self,
        group: dist.ProcessGroup,
        renewed: Callable[[dist.ProcessGroup], None],
        aborted: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a group of the script's anew in each generation. All members call this in the same order.

        Args:
            group: the default group, or one of some workers (of a ``DeviceMesh``, say).
            renewed: called with each new one.
            aborted: called when one was aborted, in any thread.
        """
        self._aborted.append(aborted)
        self._followed.append((dist.get_process_group_ranks(group), renewed))

    def leave(self) -> None:
        """Let go of the group. Its connections end, whoever still holds it: neighbours wait for that."""
        if not dist.is_initialized():
            self._forming = None
            return
        if self._backend is None:
            self._remember()
        self.abort()
        self._forming = None
        with self._lock:
            if self._stuck is not None:
                self._stuck.cancel()
            self._stuck = None
        self.close = None
        dist.destroy_process_group()
        gc.collect()

    def join(self, generation: int) -> None:
        """Form the group of a generation, together with all other workers.

        Raises:
            RuntimeError: as torch does, if somebody does not come in time.
        """
        self.leave()
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
        self._forming = before = _tcp_connections()
        self._initialise(PrefixStore(f"groups/{generation}", self._rendezvous))
        for ranks, renewed in self._followed:
            renewed(self._some(ranks, members_only=True))
        with self._lock:
            self._sockets, self._forming = _new_connections(before), None

    def join_portion(self, name: str, portion: tuple[int, ...], *, closely: bool = False) -> None:
        """Form a group in which only some take part: those that replay together, and are all there.

        Ranks and the size of the world stay what they are, for the script; the others are never connected.

        Args:
            name: of this group, for all that take part.
            portion: they, by rank.
            closely: also form :attr:`close`, for collectives among them.

        Raises:
            RuntimeError: as torch does, if one of them does not answer.
        """
        self.leave()
        os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
        self._forming = before = _tcp_connections()
        self._initialise(PrefixStore(f"replays/{name}", self._rendezvous))
        connections = []
        for ranks, renewed in self._followed:
            group = self._some(ranks, members_only=True)
            connections += [(group, rank) for rank in portion if rank in ranks and rank != self._rank]
            renewed(group)
        self._apart(partial(_first_messages, connections))
        if closely:
            os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
            self.close = self._some(list(portion), members_only=True)
        with self._lock:
            self._sockets, self._forming = _new_connections(before), None

    def _initialise(self, store: Store) -> None:
        # Names are numbers. A group that could not be formed has used one up, which newcomers do not know.
        dist.distributed_c10d._world.group_count = 0
        hook = sys.excepthook
        with self._formed_apart():
            dist.init_process_group(
                self._backend,
                store=store,
                rank=self._rank,
                world_size=self._world,
                timeout=self._patience,
            )
        sys.excepthook = hook  # torch puts one more around it each time

    @contextlib.contextmanager
    def part(self, ranks: tuple[int, ...]) -> Iterator[dist.ProcessGroup]:
        """A group of some workers, within the block. Everybody calls it, member or not.

        Raises:
            RuntimeError: as torch does, if somebody does not come in time.
        """
        before = _tcp_connections()
        group = self._some(list(ranks))
        with self._lock:
            self._sockets |= _new_connections(before)
        try:
            yield group
        finally:
            if self._rank in ranks and group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def _some(self, ranks: list[int], members_only: bool = False) -> dist.ProcessGroup:
        world = dist.group.WORLD
        assert world is not None
        if len(ranks) == self._world:
            return world
        with self._formed_apart():
            group: dist.ProcessGroup = dist.new_group(
                ranks, timeout=self._patience, use_local_synchronization=members_only
            )
        return group

    @contextlib.contextmanager
    def _formed_apart(self) -> Iterator[None]:
        """Within the block, torch's groups over gloo are formed in another thread, and in time.

        gloo takes one timeout, for each later message, for an address that is not there yet, and five times
        that for a peer that does not connect.
        """
        apart = self._apart
        module: Any = dist.distributed_c10d
        original: type[dist.ProcessGroupGloo] = module.ProcessGroupGloo

        class FormedApart(original):  # type: ignore[misc, valid-type]  # a variable
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                apart(partial(original.__init__, self, *args, **kwargs))

        module.ProcessGroupGloo = FormedApart
        try:
            yield
        finally:
            module.ProcessGroupGloo = original

    def _apart(self, function: Callable[[], object]) -> None:
        self._waits.call_or_abort(function, self._timeout_s, self._called_off)

    def give_up_soon(self) -> bool:
        """Let an operation on the group that the script made fail soon: nobody takes part in it.

        Returns:
            False if there is no group.
        """
        if not dist.is_initialized():
            return False
        if self._backend is None:
            self._remember()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_ALONE_S))
        return True

    def abort(self) -> None:
        """Break what the group waits for, from any thread: the waiting call raises within milliseconds.

        gloo cannot abort, so its connections end underneath it. (Connections that another thread opened in
        the milliseconds of :meth:`join` go with them; stores' clients retry.)
        """
        with self._lock:
            if self._forming is not None:
                self._sockets |= _new_connections(self._forming)
            for fd, name in self._sockets.items():
                with contextlib.suppress(OSError):
                    if str(Path(f"/proc/self/fd/{fd}").readlink()) == name:
                        _shut_down(fd)
            if self._sockets and self._stuck is None:
                self._stuck = threading.Timer(STUCK_S, _end_if_stuck)
                self._stuck.daemon = True
                self._stuck.start()
            self._sockets = {}
        for aborted in (self._waits.abort, *self._aborted):
            aborted()

    def _remember(self) -> None:
        """Note how the script made its group, to make the next ones alike."""
        group = dist.group.WORLD
        assert group is not None
        self._backend = str(dist.distributed_c10d._world.pg_map[group][0])
        backend = group._get_backend(group._device_types[0])
        self._patience = backend.options._timeout


def _first_messages(connections: Sequence[tuple[dist.ProcessGroup, int]]) -> None:
    """One each way: what is not connected yet could not be shut down by an abort."""
    messages = [
        (exchange(tensor, other, group=group), tensor)
        for group, other in connections
        for exchange, tensor in ((dist.isend, torch.zeros(1)), (dist.irecv, torch.zeros(1)))
    ]
    for work, _ in messages:
        assert work is not None
        work.wait()


def _end_if_stuck() -> None:
    """Rarely, gloo forgets to wake a thread whose connection closed in the middle of a send.

    Nothing else can wake it: it counts as dead, and is replaced. A thread that computes is left alone.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is not None and is_communication(frame.f_code.co_filename, frame.f_code.co_name):
        print("swift_ft: gloo does not let go of this worker, which ends here", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def _tcp_connections() -> dict[int, str]:
    """Open TCP connections of this process: the kernel's names by descriptor."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fd, name = int(link.name), str(link.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(fd)) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6):
                        copy.getpeername()  # raises for a socket that only listens
                        found[fd] = name
    return found


def _new_connections(before: dict[int, str]) -> dict[int, str]:
    """Told apart by name: an older group closes its sockets in between, and descriptors are used again."""
    return {fd: name for fd, name in _tcp_connections().items() if before.get(fd) != name}


def _shut_down(fd: int) -> None:
    # For reading only: a send that gloo begins now must not fail, since it would tell nobody of that one.
    with socket.socket(fileno=os.dup(fd)) as copy:
        copy.shutdown(socket.SHUT_RD)
