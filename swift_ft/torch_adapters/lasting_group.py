"""A process group whose handle lives on, while the group beneath it is replaced after each failure.

A script keeps its groups: in variables, in device meshes and DTensors, as names in functional collectives. So
the object that it got stays the same. What changes is the group of torch to which it passes each call.

torch asks a subclass of ``ProcessGroup`` for each operation, from C++ as well: DDP's reducer, functional
collectives and autograd find the methods below.

Private parts used (tested on torch 2.11 to 2.14): the methods of ``ProcessGroup`` that have an underscore;
``getGroupName`` and ``getGroupDesc``, which C++ looks up on subclasses.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.forks import keep_in_children
from swift_ft.torch_adapters.gathering import Gathering
from swift_ft.torch_adapters.lasting_work import End, LastingWork, call_all, forwarded, note_failure
from swift_ft.torch_adapters.present_members import PresentMembers
from swift_ft.torch_adapters.script_operations import (
    ALIKE,
    PERSONAL,
    POINT_TO_POINT,
    SCATTERED_SUMS,
    GroupInterceptor,
    Operation,
)
from swift_ft.torch_adapters.served import NoBackend, ServedWork
from swift_ft.torch_adapters.versions.group_hooks import WHEN, GroupHooks
from swift_ft.torch_adapters.versions.group_methods import those_of

FORWARDED = (
    *("_enable_collectives_timing", "_has_hooks"),
    *("_backend_id", "_register_backend", "_get_backend_name", "_id"),
    *("_get_sequence_number_for_group", "_set_sequence_number_for_group", "_register_on_completion_hook"),
    *("_set_default_backend", "_wait_for_pending_works", "split_group", "merge_remote_group"),
    *("get_backend", "get_group_store", "set_timeout", "name", "_add_ephemeral_timeout"),
)
"""Other methods of the group beneath. Not every torch has all of them."""

REFUSED = {
    "new_window": "memory that others write into cannot be logged",
    "reconfigure": "its groups are formed anew after each loss, without the script",
    "get_reconfigure_handle": "its groups are formed anew after each loss, without the script",
}
"""Methods that a session has no use for, and why."""

_GLOO: Any = getattr(dist, "ProcessGroupGloo", ())

_MATCH_TAGS = ("gloo", "mpi", "ucc")
"""Backends that give a receive the next message with its tag. NCCL, and what is like it, ignores tags."""


class LastingGroup(dist.ProcessGroup):
    """Stands for one group of the script in all generations.

    Args:
        native: the group of torch that comes first.

    Attributes:
        messages: carries messages between stages, where the group beneath cannot; None otherwise.
        present: as ``messages``, for the script's own in a replay of only some members.
        interceptor: decides about each operation, on all groups; None before training begins.
        hooks: of the script, on the group.
        gathering: where members meet before a communicator forms; None where an abort ends the forming.
        device: of this worker, where the script has named one, or its state is not on the current one.
        bound_device_id: always None: torch would split other groups off this one, whose communicator ends
            with each generation.

    Raises:
        RuntimeError: from an operation, if there is no group beneath: its generation has ended.
    """

    interceptor: ClassVar[GroupInterceptor | None] = None
    device: ClassVar[torch.device | None] = None
    supports_window = supports_reconfigure = False
    bound_device_id = None

    def __init__(self, native: dist.ProcessGroup) -> None:
        super().__init__(native.rank(), native.size())  # type: ignore[call-arg]  # the stub lacks it
        self._native: dist.ProcessGroup | None = native
        keep_in_children(native)
        self._name, self._description = native.group_name, native.group_desc
        self._devices = native._device_types
        self.hooks = GroupHooks()
        self._batch: list[End] | None = None  # of its operations
        self._members: tuple[int, ...] | None = None  # once they were asked for
        self._by_itself: bool | None = None  # likewise
        # At once, and for all generations: a replay has messages served when there is no group beneath.
        self._match_tags = {device.type for device, name in backends_of(native) if name in _MATCH_TAGS}
        self.messages: dist.ProcessGroup | None = None
        self.present: PresentMembers | None = None
        self.gathering: Gathering | None = None

    @property
    def native(self) -> dist.ProcessGroup:
        """The group of torch in the current generation."""
        if self._native is None:
            raise RuntimeError("the process group has ended with its generation: a worker was lost")
        return self._native

    @property
    def ended(self) -> bool:
        """Whether there is no group beneath."""
        return self._native is None

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks, in the order of their ranks in the group."""
        if self._members is None:
            self._members = tuple(dist.get_process_group_ranks(self))
        return self._members

    @property
    def completes_futures(self) -> bool:
        """Whether collectives on the host complete their futures by themselves, as gloo's do."""
        if self._by_itself is None:
            served = any(device.type == "cpu" for device in self._devices)
            self._by_itself = served and isinstance(self.native._get_backend(torch.device("cpu")), _GLOO)
        return self._by_itself

    def renew(self, native: dist.ProcessGroup) -> None:
        """Pass all further calls to another group of the same workers."""
        self.messages = self.present = self._batch = self.gathering = None
        self.hooks.give(native)
        keep_in_children(native)
        self._native, self._members, self._by_itself = native, None, None

    def end(self) -> dist.ProcessGroup | None:
        """Take away the group beneath. Operations fail from now on. Returns that group.

        torch does not end a batch in which an operation has raised.
        """
        native, self._native = self._native, None
        self.messages = self.present = self._batch = self.gathering = None
        return native

    def shutdown(self) -> None:
        """End the group beneath, if there is one."""
        if self._native is not None:
            self._native.shutdown()

    def abort(self) -> None:
        """Abort the operations of the group beneath, if there is one."""
        if self._native is not None:
            self._native.abort()

    def _start_coalescing(self, device: torch.device) -> None:
        """Operations are given to the backend together, by :meth:`_end_coalescing`."""
        self._meet("batch")
        self._carrier("send")._start_coalescing(device)
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Any:
        ends, self._batch = self._batch or [], None
        with beginning():
            work: Any = self._carrier("send")._end_coalescing(device)
        if work is not None:
            return LastingWork(work, ends, on_host=holds_thread(device))
        call_all(ends)
        return ServedWork([])  # nothing was left to begin, and scripts wait for what a batch gives

    def _meet(self, operation: str, *args: Any) -> None:
        """Wait for the other members, where the operation may form a communicator."""
        messages = operation in ("send", "recv", "batch")
        if self.gathering is None or self._batch is not None or (messages and self.present is not None):
            return
        peer = args[1] if messages and args else None
        waits, in_training = LastingWork.waits, threading.current_thread() is threading.main_thread()
        self.gathering.meet(peer, waits.call_or_abort if waits is not None and in_training else _call)

    def _tag(self, operation: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Of a message, where its sender and its receiver match it by that; else 0."""
        if operation not in ("send", "recv") or _first_of(args).device.type not in self._match_tags:
            return 0
        return int(kwargs.get("tag", args[2] if len(args) > 2 else 0))

    def _ends_by_itself(self, operation: str) -> bool:
        """Whether an operation on the host completes its future if nobody waits for it: no message does."""
        waited_for = operation in POINT_TO_POINT or operation in SCATTERED_SUMS
        return not waited_for and self.completes_futures

    def _carrier(self, operation: str) -> Any:
        """The group of torch that carries an operation. Collectives take all members, who are here then."""
        if self.present is not None and operation in ("send", "recv"):
            return self.present
        return self.native

    def _get_backend(self, device: torch.device) -> Any:
        """Of a group that has ended, too: torch asks before a batch, which a replay may serve."""
        return NoBackend(self) if self._native is None else self._native._get_backend(device)

    # What stays the same in all generations, and can be asked for between two of them.

    def getGroupName(self) -> str:
        """As torch registers the group."""
        return str(self._name)

    def getGroupDesc(self) -> str:
        """The purpose of the group."""
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return self._devices


def backends_of(group: dist.ProcessGroup) -> list[tuple[torch.device, str]]:
    """The devices of whose tensors a group of torch takes care, with the name of the backend of each."""
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch wraps each of them.
    found: list[tuple[torch.device, Any]] = [(d, group._get_backend(d)) for d in group._device_types]
    return [(device, getattr(backend, "wrapped_pg", backend).name()) for device, backend in found]


def beneath(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group of torch that carries what is not an operation of the script.

    Raises:
        RuntimeError: it has ended with its generation.
    """
    return group.native if isinstance(group, LastingGroup) else group


def messenger(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """As :func:`beneath`, for messages between stages."""
    native = beneath(group)
    return getattr(group, "messages", None) or native


@contextlib.contextmanager
def unintercepted() -> Iterator[None]:
    """Within the block, operations are of no step: a repetition of the step does without them."""
    interceptor, LastingGroup.interceptor = LastingGroup.interceptor, None
    try:
        yield
    finally:
        LastingGroup.interceptor = interceptor


def beginning(on: dist.ProcessGroup | None = None) -> AbstractContextManager[None]:
    """Surrounds the beginning of an operation: of a group of the script, or beneath one.

    Args:
        on: the group, where it may be one of the script: that surrounds its own, once its members have met.

    Raises:
        RuntimeError: the groups were aborted, and nothing begins any more.
    """
    waits = LastingWork.waits
    if waits is None or isinstance(on, LastingGroup):
        return contextlib.nullcontext()
    waits.begun()
    waits.raise_if_aborted()
    return waits.beginnings


def holds_thread(device: torch.device) -> bool:
    """Whether a wait for an operation on a device holds the thread that waits: elsewhere a stream waits."""
    return device.type == "cpu"


def _operation(name: str) -> Any:
    def communicate(self: LastingGroup, *args: Any, **kwargs: Any) -> Any:
        try:
            return begin(self, *args, **kwargs)
        except Exception as error:
            note_failure(error)
            raise

    def begin(self: LastingGroup, *args: Any, **kwargs: Any) -> Any:
        ends: list[End] = []
        if (interceptor := LastingGroup.interceptor) is not None:
            on_end, operation = interceptor.begin_unseen(name, len(self.members)), None
            if on_end is None:
                tag = self._tag(name, args, kwargs)
                operation = Operation.of(name, self.group_name, self.members, args, tag)
                on_end = interceptor.begin(operation)
                if on_end is None:
                    return ServedWork(operation.tensors)
            ends = [(on_end, operation)]
        if name == "barrier":
            _give_device(*args, **kwargs)
        self._meet(name, *args)
        with beginning():
            work = getattr(self._carrier(name), name)(*args, **kwargs)
        if self._batch is not None:
            self._batch += ends
            return work
        if isinstance(work, dist.Work):
            on_host = _on_host(self, args)
            return LastingWork(work, ends, on_host=on_host, by_itself=on_host and self._ends_by_itself(name))
        call_all(ends)
        return work

    communicate.__name__ = name
    return communicate


def _give_device(opts: Any = None) -> None:
    """Let a barrier be on this worker's device: torch asks the group, which names none, or takes any."""
    device, given = LastingGroup.device, getattr(opts, "device", None)
    if device is not None and given is not None and (given.type, given.index) == (device.type, None):
        opts.device = device


def _call(function: Callable[[], object]) -> None:
    function()


def _on_host(group: LastingGroup, args: Sequence[Any]) -> bool:
    """Whether a wait for an operation holds its thread: by its tensors, or by its group if it has none."""
    given = _first_of(args)
    if isinstance(given, torch.Tensor):
        return holds_thread(given.device)
    return all(holds_thread(device) for device in group._device_types)


def _first_of(args: Sequence[Any]) -> Any:
    """The first tensor of the first argument; the argument itself if it has none."""
    given: Any = args[0] if args else None
    while isinstance(given, list | tuple) and given:
        given = given[0]
    return given


def _refused(name: str, why: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(f"A session has no place for a process group's {name}(): {why}.")

    refuse.__name__ = name
    return refuse


def _hooked(when: str) -> tuple[Any, Any]:
    def register(self: LastingGroup, hook_id: int, hook: Callable[..., None]) -> None:
        self.hooks.register(self.native, when, hook_id, hook)

    def unregister(self: LastingGroup, hook_id: int) -> None:
        self.hooks.unregister(self.native, when, hook_id)

    return register, unregister


for _name in those_of(dist.ProcessGroup, (*ALIKE, *PERSONAL, *POINT_TO_POINT)):
    setattr(LastingGroup, _name, _operation(_name))
for _name in those_of(dist.ProcessGroup, FORWARDED):
    setattr(LastingGroup, _name, forwarded(_name, "native"))
for _name in those_of(dist.ProcessGroup, tuple(REFUSED)):
    setattr(LastingGroup, _name, _refused(_name, REFUSED[_name]))
for _when in WHEN:
    for _name, _method in zip(("register", "unregister"), _hooked(_when), strict=True):
        setattr(LastingGroup, f"{_name}_{_when}_hook", _method)
