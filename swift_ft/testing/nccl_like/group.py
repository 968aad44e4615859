"""A process group whose operations behave as NCCL's do, on CPUs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from swift_ft.testing.nccl_like.collectives import Member, transfer
from swift_ft.testing.nccl_like.communicator import Communicator, NcclLikeWork, StreamOperation, device
from swift_ft.testing.nccl_like.mesh import Interrupt, Mesh

NAME = "nccl_like"
"""The backend's name for ``init_process_group``."""

_ALL = "all"
"""The communicator of the whole group. A pair has one of its own for messages outside of a batch."""

_CPU = torch.device("cpu")

Tensors = list[torch.Tensor]

_ProcessGroup: Any = dist.ProcessGroup
"""Its stub has several forms of each method, of which torch itself calls one, and lacks the constructor."""


HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""The variable of torch for NCCL. It counts when a group is made; 0 switches the watchdog off."""

PATIENCE = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
"""The variable of torch for the longest time, in seconds, that a communicator of NCCL may take to form."""

_LOOK_S = 0.05

_of_process = 0


class NcclLikeGroup(_ProcessGroup):  # type: ignore[misc]  # see there
    """Registered with torch as ``nccl_like``.

    Args:
        store: where the members find each other.
        rank: this member's.
        size: number of members.
        timeout: after which the watchdog ends the process.

    Raises:
        DistBackendError: from any operation after an abort, for good.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._timeout_s = timeout.total_seconds()
        self._name = self._description = ""
        self._lock = threading.Lock()
        self._interrupt = Interrupt()
        self._communicators: dict[str, Communicator] = {}
        self._batch: list[StreamOperation] | None = None
        self._batch_sends: dict[int, Tensors] = {}
        self._batch_receives: dict[int, Tensors] = {}
        self._batch_work = self._work([])
        watch(self)

    # ---------------------------------------------------------------------------------------- its life

    def abort(self) -> None:
        """End all that waits. Returns when the communicators are gone; none of this group works again.

        It waits until a communicator that forms has done so, or has failed; and for the device, on which
        operations of other groups may run.
        """
        self.shutdown()
        device.over()  # as the host waits that gives memory of a device back

    def shutdown(self) -> None:
        """As :meth:`abort`, and waits for no other group."""
        self._interrupt.set()
        with self._lock:
            communicators = list(self._communicators.values())
            self._communicators.clear()
        for communicator in communicators:
            communicator.join()

    def overdue(self, now: float) -> bool:
        """Whether an operation has had its turn for longer than the timeout."""
        running = [communicator.running for communicator in [*self._communicators.values()]]
        begun = [work.begun_at for work in running if work is not None and work.begun_at is not None]
        return any(now - begun_at > self._timeout_s for begun_at in begun)

    @property
    def formed(self) -> list[str]:
        """The communicators that exist: ``all``, and those of pairs."""
        return sorted(self._communicators)

    # ------------------------------------------------------------------------------ what torch asks for

    def name(self) -> str:
        """Of the backend."""
        return NAME

    supports_coalescing = True
    supports_splitting = False
    bound_device_id = None

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _get_backend_name(self) -> str:
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def getGroupName(self) -> str:
        """As torch registers the group."""
        return self._name

    def getGroupDesc(self) -> str:
        """The purpose of the group, as torch gave it."""
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def set_timeout(self, timeout: timedelta) -> None:
        """For the watchdog."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    # -------------------------------------------------------------------------------------- collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """All take the reduction."""
        op = _reduction(opts)
        return self._collective(tensors, _each(lambda member, each: member.all_reduce(each, op), tensors))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        """All take what one gives."""
        return self._collective(
            tensors,
            _each(lambda member, each: member.broadcast(each, opts.rootRank), tensors),
            fills=self.rank() != opts.rootRank,
        )

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        """One takes the reduction."""
        return self._collective(
            tensors,
            _each(lambda member, each: member.reduce(each, opts.rootRank, opts.reduceOp), tensors),
            fills=self.rank() == opts.rootRank,
        )

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """All take what each gives."""
        return self._collective(
            [tensor for each in outputs for tensor in each],
            _each(lambda member, each: member.all_gather(*each), zip(outputs, inputs, strict=True)),
        )

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """As :meth:`allgather`."""
        by_input = [[of_rank[i] for of_rank in outputs] for i in range(len(inputs))]
        return self.allgather(by_input, inputs)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> dist.Work:
        """As :meth:`allgather`, into one tensor."""
        return self.all_gather_single_coalesced([output], [given])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Several of :meth:`all_gather_single`."""
        return self.allgather([self._parts(output) for output in outputs], inputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        """One takes what each gives."""
        taken = outputs[0] if outputs else []
        return self._collective(taken, lambda member: member.gather(taken, inputs[0], opts.rootRank))

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        """Each takes its part of what one gives."""
        given = inputs[0] if inputs else []
        return self._collective(outputs, lambda member: member.scatter(outputs[0], given, opts.rootRank))

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """Each takes the reduction of its parts."""
        op = _reduction(opts)
        each_of = zip(outputs, inputs, strict=True)
        return self._collective(
            outputs, _each(lambda member, each: member.reduce_scatter(each[0], each[1], op), each_of)
        )

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> dist.Work:
        """As :meth:`reduce_scatter`, from one tensor."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Several of :meth:`reduce_scatter_single`."""
        return self.reduce_scatter(outputs, [self._parts(given) for given in inputs], opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Each gives a part to each."""
        return self._collective(
            outputs, lambda member: member.all_to_all(dict(enumerate(inputs)), dict(enumerate(outputs)))
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        """As :meth:`alltoall`, of one tensor into one."""
        taken = list(output.split(output_sizes)) if output_sizes else self._parts(output)
        return self.alltoall(taken, list(given.split(input_sizes)) if input_sizes else self._parts(given))

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        """All wait for all."""
        return self._collective([], Member.barrier)

    # --------------------------------------------------------------------------------- point to point

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Send. Tags mean nothing: messages of a pair match in their order."""
        return self._message(tensors, peer, {peer: tensors}, {})

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        """Receive."""
        return self._message(tensors, peer, {}, {peer: tensors})

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """NCCL has no such operation.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"backend {NAME} does not support recv_anysource")

    def _start_coalescing(self, device: torch.device) -> None:
        self._usable()
        self._batch, self._batch_sends, self._batch_receives = [], {}, {}
        self._batch_work = self._work([])

    def _end_coalescing(self, device: torch.device) -> dist.Work | None:
        batch, self._batch = self._batch or [], None
        sends, receives = self._batch_sends, self._batch_receives
        if not (batch or sends or receives):
            return None

        def run(mesh: Mesh) -> None:
            for operation in batch:
                operation(mesh)
            transfer(mesh, sends, receives)

        return self._enqueue(_ALL, run, self._batch_work)

    # ---------------------------------------------------------------------------------------- enqueueing

    def _parts(self, tensor: torch.Tensor) -> Tensors:
        return list(tensor.view(-1).chunk(self.size()))

    def _work(self, tensors: Sequence[torch.Tensor], filled: Sequence[torch.Tensor] = ()) -> NcclLikeWork:
        return NcclLikeWork(tensors, filled, self.rank())

    def _collective(
        self, tensors: Sequence[torch.Tensor], act: Callable[[Member], None], *, fills: bool = True
    ) -> dist.Work:
        """Enqueue an operation of all members.

        Args:
            tensors: its result.
            act: does it.
            fills: this member receives them.
        """

        def run(mesh: Mesh) -> None:
            act(Member(mesh, self.rank(), self.size()))

        filled = tensors if fills else ()
        if self._batch is not None:
            self._batch.append(run)
            self._batch_work.filled += filled
            return self._batch_work
        return self._enqueue(_ALL, run, self._work(tensors, filled))

    def _message(
        self, tensors: Tensors, peer: int, sends: dict[int, Tensors], receives: dict[int, Tensors]
    ) -> dist.Work:
        if self._batch is not None:
            for given, of_batch in ((sends, self._batch_sends), (receives, self._batch_receives)):
                if given:
                    of_batch.setdefault(peer, []).extend(tensors)
            self._batch_work.filled += [tensor for given in receives.values() for tensor in given]
            return self._batch_work
        low, high = sorted((self.rank(), peer))
        other = int(peer == high)  # the number of the peer within the pair
        within = partial(
            transfer,
            sends=dict.fromkeys([other] * len(sends), tensors),
            receives=dict.fromkeys([other] * len(receives), tensors),
        )
        filled = tensors if receives else ()
        return self._enqueue(f"{low}:{high}", within, self._work(tensors, filled))

    def _enqueue(self, name: str, operation: StreamOperation, work: NcclLikeWork) -> dist.Work:
        try:
            communicator = self._communicator(name)
        except TimeoutError as error:
            raise dist.DistBackendError(str(error)) from error
        communicator.enqueue(operation, work)
        return work

    def _communicator(self, name: str) -> Communicator:
        """Formed at its first operation: the caller waits for all other members."""
        with self._lock:
            self._usable()
            if name not in self._communicators:
                _, _, high = name.partition(":")
                rank, size = (int(self.rank() == int(high)), 2) if high else (self.rank(), self.size())
                store = dist.PrefixStore(f"communicator {name}", self._store)
                patience_s = float(os.environ.get(PATIENCE, 1800.0))
                self._communicators[name] = Communicator(store, rank, size, name, self._interrupt, patience_s)
            return self._communicators[name]

    def _usable(self) -> None:
        if self._interrupt.is_set:
            raise dist.DistBackendError(f"NCCL-like communicator was aborted on rank {self.rank()}")


def _each(act: Callable[[Member, Any], None], of: Iterable[Any]) -> Callable[[Member], None]:
    """Several operations in one."""
    operands = list(of)

    def all_of_them(member: Member) -> None:
        for each in operands:
            act(member, each)

    return all_of_them


def _reduction(opts: Any) -> Any:
    """Of what torch gives: options, or the reduction itself, or neither."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


# Ends a process in which an operation takes longer than its group allows, unless that is switched off.
#
# As NCCL's does in torch: it cannot know whether the tensors are still right. Whoever recovers switches it
# off.


class Watched(Protocol):
    """A group."""

    def overdue(self, now: float) -> bool:
        """Whether an operation takes too long."""


_lock = threading.Lock()
_groups: weakref.WeakSet[Watched] = weakref.WeakSet()


def watch(group: Watched) -> None:
    """Watch a group until it is destroyed."""
    global _of_process  # one thread for a process, and another one in a forked one
    if os.environ.get(HANDLING, "") == "0":
        return
    with _lock:
        _groups.add(group)
        if _of_process != os.getpid():
            _of_process = os.getpid()
            threading.Thread(target=_look, name="nccl-like watchdog", daemon=True).start()


def _look() -> None:
    while True:
        time.sleep(_LOOK_S)
        with _lock:
            groups = list(_groups)
        if any(group.overdue(time.monotonic()) for group in groups):
            print("NCCL-like watchdog: an operation timed out, so this process ends", file=sys.stderr)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGABRT)
        del groups
