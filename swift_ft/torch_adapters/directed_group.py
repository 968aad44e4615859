"""A group whose messages go over a communicator for each direction between two members.

NCCL matches a message by its communicator: a batch of sends and receives goes over that of the whole group,
and a single message over that of its pair. So both sides have to make batches of the same messages. After a
loss they do not: a stage that is ahead repeats its messages one by one, and messages that come from a log
leave a batch. With a communicator for each direction, nothing but the order of messages counts, no two
members wait for each other because both send first, and none of them waits for a third one.

Forming a communicator holds both of its members. Those between stages form when a generation begins
(:meth:`DirectedGroup.meet`), in an order in which members cannot wait for each other in a circle. With the
first message they might: a stage that is ahead begins with what it receives, and in a ring of stages all
others may wait for what it sends after that.

torch 2.14 gives its stages such groups itself.

Private parts used (tested on torch 2.11 to 2.14): the methods of ``ProcessGroup`` that have an underscore.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from swift_ft.torch_adapters.communication import silent_devices
from swift_ft.torch_adapters.lasting_group import beginning
from swift_ft.torch_adapters.script_operations import ALIKE, PERSONAL
from swift_ft.torch_adapters.versions.group_methods import those_of

_ProcessGroup: Any = dist.ProcessGroup
"""Its stub has several forms of each method, and lacks the constructor."""


class DirectedGroup(_ProcessGroup):  # type: ignore[misc]  # see there
    """Stands for a group of torch in one generation.

    Args:
        native: that group, for all but messages.
        ranks: its members, by their global ranks.
        form: makes a group of two of them; both call it with the same name.
        gather: returns once both have called it with the same name.
    """

    def __init__(
        self,
        native: dist.ProcessGroup,
        ranks: Sequence[int],
        form: Callable[[str, Sequence[int]], dist.ProcessGroup],
        gather: Callable[[str], None],
    ) -> None:
        super().__init__(native.rank(), native.size())
        self._native = native
        self._ranks = list(ranks)
        self._form = form
        self._gather = gather
        self._lock = threading.Lock()
        self._ended = False
        self._to: dict[int, dist.ProcessGroup] = {}
        self._from: dict[int, dist.ProcessGroup] = {}

    def meet(self, ranks: Collection[int]) -> None:
        """Form the communicators with some members, by their global ranks. They call this, too.

        All meet in one order, of pairs: the first pair that has not met has nothing else to wait for.
        """
        for rank in sorted(ranks):
            self._meet(self._ranks.index(rank))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Send to a member."""
        self._meet(peer)
        with beginning():
            return self._to[peer].send(tensors, 1, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Receive from a member."""
        self._meet(peer)
        with beginning():
            return self._from[peer].recv(tensors, 0, tag)

    def shutdown(self) -> None:
        """The groups beneath end by themselves, and no other one is formed.

        An abort ends a first message without an error, and the thread that waited for it goes on.
        """
        with self._lock:
            self._ended = True

    def _meet(self, peer: int) -> None:
        """Before the first message between two members: form both directions, in the same order on both."""
        if peer in self._to:
            return
        me = self.rank()
        for sender, receiver in ((min(me, peer), max(me, peer)), (max(me, peer), min(me, peer))):
            name = f"{self._native.group_name}/{sender}-{receiver}"
            group = self._formed(name, sender, receiver)
            self._gather(name)
            way = self._to if sender == me else self._from
            way[peer] = group
            for device in silent_devices(group):
                nothing = [torch.zeros(1, device=device)]
                work = group.send(nothing, 1, 0) if sender == me else group.recv(nothing, 0, 0)
                work.wait()

    def _formed(self, name: str, sender: int, receiver: int) -> dist.ProcessGroup:
        with self._lock:
            if self._ended:
                raise RuntimeError("the process group has ended with its generation")
            return self._form(name, [self._ranks[sender], self._ranks[receiver]])

    def _get_backend(self, device: torch.device) -> Any:
        return _OneByOne(self._native._get_backend(device))

    @property
    def _device_types(self) -> list[torch.device]:
        return self._native._device_types

    def getGroupName(self) -> str:
        """As torch registers the group."""
        return str(self._native.group_name)

    group_name = property(getGroupName)


class _OneByOne:
    """A backend to which a batch is given message by message."""

    supports_coalescing = False

    def __init__(self, native: Any) -> None:
        self._native = native

    def name(self) -> str:
        """Of the backend."""
        return str(self._native.name())


def _forwarded(name: str) -> Any:
    def forward(self: DirectedGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._native, name)(*args, **kwargs)

    forward.__name__ = name
    return forward


for _name in those_of(dist.ProcessGroup, (*ALIKE, *PERSONAL)):
    setattr(DirectedGroup, _name, _forwarded(_name))
