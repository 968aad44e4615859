"""The process groups of a generation: formed, left, and aborted from another thread.

What differs between gloo and NCCL is in `transports.py`.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import xxhash
from torch.distributed import DistError

from swift_ft.config import store_keys
from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.directed_group import DirectedGroup
from swift_ft.torch_adapters.gathering import gather
from swift_ft.torch_adapters.lasting_group import LastingGroup
from swift_ft.torch_adapters.lasting_work import LastingWork
from swift_ft.torch_adapters.present_members import PresentMembers
from swift_ft.torch_adapters.rendezvous_store import AbortableStore, PrefixStore, RendezvousStore, Store
from swift_ft.torch_adapters.script_groups import forget, script_groups
from swift_ft.torch_adapters.transports import (
    AbortedCommunicators,
    GlooConnections,
    Transport,
    aborts_in_silence,
)

_SHORT_TIMEOUT_S = 30.0
"""The longest time that a collective may take in a step that one worker replays alone."""


@dataclass(frozen=True, slots=True)
class _Followed:
    """A group of the script to be renewed with each generation. See :meth:`GenerationGroup.follow`."""

    group: LastingGroup
    on_renew: Callable[[dist.ProcessGroup], None]
    peers: Callable[[], Collection[int]]


class GenerationGroup:
    """The groups of the script in the current generation. They are formed again in each.

    Args:
        rendezvous: a client of the rendezvous store.
        rank: this worker.
        world_size: number of workers.
        timeout_s: for forming a group. The script's operations keep the timeout that the script chose.
        is_cancelled: whether the group that is being formed is no longer needed. :meth:`abort` follows when
            that changes to true.

    Attributes:
        waits: where the training thread waits, so that :meth:`abort` ends the wait.
        helper_group: of the workers that compute a replay in parallel; None if there is none. It ends with
            the default group.
    """

    def __init__(
        self,
        rendezvous: RendezvousStore,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._is_cancelled = is_cancelled
        self.waits = LastingWork.waits = AbortableWaits(is_cancelled)
        self._transports: tuple[Transport, ...] = (
            GlooConnections(self._in_waiter),
            AbortedCommunicators(self._in_waiter, self.waits.beginnings.over),
        )
        self._retired: list[dist.ProcessGroup] = []  # left, and not destroyed yet
        self.helper_group: dist.ProcessGroup | None = None
        self._own_groups: list[dist.ProcessGroup] = []  # that carry messages, in this generation
        self._on_abort: list[Callable[[], None]] = []
        self._followed: list[_Followed] = []
        self._store: Store | None = None  # of the current generation
        self._connection: Store | None = None  # beneath it
        self._left: list[Store] = []  # beneath groups that are not destroyed yet, where only C++ refers to it
        self._joining: int | None = None  # the generation whose groups it forms or has; None: other groups
        self._own = 0  # groups that the script does not know, in this generation
        script_groups.install()

    def follow(
        self,
        group: dist.ProcessGroup,
        on_renew: Callable[[dist.ProcessGroup], None] = lambda _: None,
        on_abort: Callable[[], None] = lambda: None,
        peers: Callable[[], Collection[int]] = lambda: (),
    ) -> None:
        """Have a group of the script formed in each generation and for each replay.

        Args:
            group: the default group, or one of some workers (of a ``DeviceMesh``, say).
            on_renew: called with each new group of torch beneath.
            on_abort: called in any thread when the group was aborted.
            peers: the global ranks with which this worker's stages exchange messages. Theirs say the same.
        """
        assert isinstance(group, LastingGroup)
        self._on_abort.append(on_abort)
        self._followed.append(_Followed(group, on_renew, peers))

    def leave(self) -> None:
        """Leave all groups. Their connections end even if something still refers to them: neighbours wait."""
        self.abort()
        for transport in self._transports:
            transport.end()
        self._retired += script_groups.end()
        for group in self._own_groups:
            self._retire(group)
        self._own_groups.clear()
        if self.helper_group is not None:
            self._retire(self.helper_group)
        self.helper_group = None

    def join(self, generation: int) -> None:
        """Form the groups of a generation, together with all other workers.

        Raises:
            RuntimeError: as torch does, if a worker does not arrive in time.
        """
        connection = self._begin(store_keys.groups(generation), lazily=False)
        self._joining = generation
        connection.set(store_keys.joining(generation, self._rank), "")  # it waits for no answer
        for group in script_groups.groups:
            self._renew(group)
        if self.waits.silent:
            self._gather("everybody", self._world_size)
        for transport in self._transports:
            transport.connect_all()
        for group in script_groups.groups:
            if group.gathering is not None:
                group.gathering.formed()
        self._meet(range(self._world_size))
        self._formed()

    def missing(self) -> list[int]:
        """After :meth:`join` has failed: workers that did not even begin; empty if the store does not say."""
        if self._joining is None:
            return []
        keys = [store_keys.joining(self._joining, rank) for rank in range(self._world_size)]
        with contextlib.suppress(DistError, RuntimeError):  # it is lost, too
            return [rank for rank, key in enumerate(keys) if not self._rendezvous.check([key])]
        return []

    def join_replay_group(
        self, name: str, replay_group: tuple[int, ...], *, with_helpers: bool = False
    ) -> None:
        """Form a group in which only the workers take part that replay together.

        The script sees the usual ranks and world size; the other workers are never connected.

        Args:
            name: of this group, the same on all that take part.
            replay_group: the ranks that take part; all of them are alive.
            with_helpers: also form :attr:`helper_group`, for collectives among them.

        Raises:
            RuntimeError: as torch does, if one of them does not answer in time.
        """
        self._begin(store_keys.replays(name), lazily=True)
        connections = []
        followed = {script_groups.default, *(followed.group for followed in self._followed)}
        together = {self._rank, *replay_group}
        for group in script_groups.groups:
            ranks = dist.get_process_group_ranks(group)
            shared = together.intersection(ranks)
            if group not in followed and len(shared) < min(2, len(ranks)):
                continue  # its operations are served
            self._renew(group)
            if len(shared) > 1 and not together.issuperset(ranks):
                self._give_present(group, sorted(shared))
            connections += [
                (group.native, rank) for rank in replay_group if rank in ranks and rank != self._rank
            ]
        for transport in self._transports:
            transport.connect(connections)
        self._meet(replay_group)
        if with_helpers:
            self.helper_group = self._new_group(list(replay_group))
        self._formed()

    def _begin(self, folder: str, *, lazily: bool) -> Store:
        """Leave the groups, and have others formed over a folder of the store.

        Args:
            folder: in the store.
            lazily: two workers connect when they speak, and not before.

        Returns:
            the connection to the store.
        """
        self.leave()
        self.waits.renew()
        for transport in self._transports:
            transport.begin(lazily=lazily)
        if self._connection is not None:
            self._left.append(self._connection)
        self._connection = connection = self._rendezvous.connection()
        self._store = PrefixStore(folder, connection)
        self._joining, self._own = None, 0
        return connection

    def _renew(self, group: LastingGroup) -> None:
        assert self._store is not None
        with self._forming():
            script_groups.renew(group, self._store)
        self._made(group.native)
        of_group = [followed for followed in self._followed if followed.group is group]
        if of_group and aborts_in_silence(group.native):
            self._give_directions(group)
        for followed in of_group:
            followed.on_renew(group.native)

    def _give_directions(self, group: LastingGroup) -> None:
        """Let messages between stages go over a communicator for each direction."""
        ranks = dist.get_process_group_ranks(group)
        assert self._store is not None
        messages = DirectedGroup(
            group.native, ranks, partial(self._new_pair, self._store), partial(self._gather, size=2)
        )
        script_groups.give_ranks(messages, group)
        self._own_groups.append(messages)
        group.messages = messages

    def _meet(self, present: Collection[int]) -> None:
        """Form the communicators between the stages of those that form a group now."""
        for followed in self._followed:
            messages = followed.group.messages
            if isinstance(messages, DirectedGroup):
                self._in_waiter(partial(messages.meet, {*followed.peers()} & {*present}))

    def _give_present(self, group: LastingGroup, present: list[int]) -> None:
        """Let the script's batches of messages go over a communicator of those that replay together.

        That of the whole group waits for all of its members.
        """
        if aborts_in_silence(group.native):
            beneath = self._form_own(partial(store_keys.present_group, group.group_name), present)
            self._own_groups.append(beneath)
            ranks = dist.get_process_group_ranks(group)
            group.present = PresentMembers(beneath, [ranks.index(rank) for rank in present])

    def _new_pair(self, store: Store, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        pair = script_groups.form(name, ranks, store)
        self._own_groups.append(pair)
        self._made(pair)
        return pair

    def _made(self, group: dist.ProcessGroup) -> None:
        for transport in self._transports:
            transport.made(group)
        if aborts_in_silence(group):
            self.waits.silent, self.waits.limit_s = True, script_groups.timeout_s
            if self.waits.over:  # by an abort that did not know this group
                self.abort()

    def _formed(self) -> None:
        for transport in self._transports:
            transport.formed()

    def destroy_left(self) -> None:
        """Destroy the groups that were left, and close their connections to the store, if there are any.

        Call it once training goes on.
        To find the garbage that still refers to them holds the interpreter for 30 ms, and in a recovery all
        others would wait for them.
        """
        if self._retired or self._left:
            left = self._retired, self._left
            self._retired, self._left = [], []
            threading.Thread(target=_destroy, args=left, name="swift-retired-groups", daemon=True).start()

    @contextlib.contextmanager
    def subgroup(self, ranks: tuple[int, ...]) -> Iterator[dist.ProcessGroup]:
        """A group of some workers, within the block. All workers call it, members or not.

        Raises:
            RuntimeError: as torch does, if a worker does not arrive in time.
        """
        group = self._new_group(list(ranks))
        try:
            yield group
        finally:
            if len(ranks) < self._world_size and self._rank in ranks:
                self._retire(group)

    def _new_group(self, ranks: list[int]) -> dist.ProcessGroup:
        """A group that the script does not know. All workers call this in the same order, members or not."""
        self._own += 1
        if self._rank not in ranks:
            return script_groups.default.native
        if len(ranks) == self._world_size:
            if (gathering := script_groups.default.gathering) is not None:
                gathering.meet(None, self._in_waiter)
            return script_groups.default.native
        return self._form_own(partial(store_keys.own_group, self._own), ranks)

    def _form_own(self, name_of: Callable[[str], str], ranks: list[int]) -> dist.ProcessGroup:
        """A group of torch that only some workers form; all of them do."""
        assert self._store is not None
        # In one generation, several sets of workers may replay at once: their groups must not meet.
        members = xxhash.xxh3_64_hexdigest(",".join(map(str, ranks)).encode())
        with self._forming():
            group = script_groups.form(name_of(members), ranks, self._store)
        self._made(group)
        if aborts_in_silence(group):
            self._gather(name_of(members), len(ranks))
        return group

    def _gather(self, name: str, size: int) -> None:
        """Wait for all that form a communicator: no abort ends the forming of one."""
        assert self._store is not None
        timeout = timedelta(seconds=self._timeout_s)
        function = partial(gather, self._store, store_keys.members(name), size, timeout)
        if threading.current_thread() is threading.main_thread():
            self._in_waiter(function)
        else:  # it is the waiter's
            function()

    def _retire(self, group: dist.ProcessGroup) -> None:
        forget(group)
        self._retired.append(group)

    def _forming(self) -> contextlib.ExitStack:
        with contextlib.ExitStack() as stack:
            for transport in self._transports:
                stack.enter_context(transport.forming())
            return stack.pop_all()

    def _in_waiter(self, function: Callable[[], object]) -> None:
        self.waits.call_or_abort(_on_this_device(function), self._timeout_s, self._is_cancelled)

    def shorten_timeout(self) -> bool:
        """Make operations on the script's group fail soon: no other worker takes part in them.

        Returns:
            False if there is no group.
        """
        if not dist.is_initialized() or script_groups.default.ended:
            return False
        native = script_groups.default.native
        if aborts_in_silence(native):
            native.abort()
        else:
            native.set_timeout(timedelta(seconds=_SHORT_TIMEOUT_S))
        return True

    def abort(self) -> None:
        """End what the group waits for, from any thread: the waiting call raises within milliseconds.

        The waits learn of it first: where an abort is silent, they must not take what it left for a result.
        """
        for abort in (self.waits.abort, *self._on_abort):
            abort()
        for transport in self._transports:
            transport.abort()
        if isinstance(self._connection, AbortableStore):
            self._connection.abort()


def _on_this_device(function: Callable[[], object]) -> Callable[[], object]:
    """For another thread: there, the current device is the first one until it is told."""
    if not torch.cuda.is_initialized():
        return function
    device = torch.cuda.current_device()

    def call() -> None:
        torch.cuda.set_device(device)
        function()

    return call


def _destroy(groups: list[dist.ProcessGroup], connections: list[Store]) -> None:
    """Drop what may be the last references to groups, and then to their connections, in a thread of its own.

    Rarely, the destructor of a group never returns: one whose peer died while a thread waited for it.
    """
    groups.clear()
    gc.collect()
    connections.clear()
