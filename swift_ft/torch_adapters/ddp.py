"""The hook on DistributedDataParallel, which averages gradients on the group of the current generation.

After a failure the hook recreates DDP's reducer, which forgets the aborted backward. The new reducer starts
from the buckets that were in use (:mod:`swift_ft.torch_adapters.ddp_buckets`).

Private parts used (tested on torch 2.11 to 2.14):

- of a DDP model: ``_build_debug_param_to_name_mapping``, ``_ddp_init_helper``, ``parameters_to_ignore``,
  ``_has_rebuilt_buckets``, ``_comm_hooks``, ``reducer``, ``require_forward_param_sync``, ``static_graph``,
  ``bucket_bytes_cap``, ``bucket_bytes_cap_list``.

Buffers: see :mod:`swift_ft.torch_adapters.ddp_buffers`. Its forward and backward passes:
:mod:`swift_ft.torch_adapters.ddp_passes`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from swift_ft.errors import UnsupportedError, first_line
from swift_ft.faults.failpoints import Point, hit
from swift_ft.observe.spans import recorder
from swift_ft.torch_adapters.accepted_ddp import accepted_ddp, synchronised_norms
from swift_ft.torch_adapters.comm_errors import is_broken_communication
from swift_ft.torch_adapters.ddp_buckets import Layout, assigned, predicted
from swift_ft.torch_adapters.ddp_buffers import BufferSync
from swift_ft.torch_adapters.ddp_construction import averaged
from swift_ft.torch_adapters.ddp_passes import after_backward, end_when, note_failed_forwards
from swift_ft.torch_adapters.lasting_group import beginning
from swift_ft.torch_adapters.lasting_work import unlogged_future
from swift_ft.torch_adapters.step_failures import step_failures
from swift_ft.torch_adapters.transports import aborts_in_silence
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output
from swift_ft.torch_core.tensors import sparse_indices, sparse_values

_abandoned: list[dist.ProcessGroup] = []

_BUFFERS = -1
"""Among the numbers of buckets, stands for the module's buffers."""

OnReduced = Callable[[Sequence[torch.Tensor]], None]
"""Called with the parameters of a bucket once their gradients are averages. In any thread, one at a time."""


class DataParallelHook:
    """Attaches to a DDP model.

    Args:
        model: stock DDP, without a communication hook of its own, or another library's wrapper of it.
        on_reduced: called for each bucket whose all-reduce is complete.
        on_layout: called in the first averaged backward, with the buckets that DDP will use from then on.
        on_backward_ended: called at the end of each averaged backward of a step in which ``on_reduced``
            updates (see :meth:`begin`).

    Attributes:
        broken: why communication failed in this step; None if it did not.
        buffers: gives all replicas the buffers of the first one, where DDP does so.

    Raises:
        UnsupportedError: for a model that is not DDP's, or has a hook already.
    """

    def __init__(
        self,
        model: Any,
        on_reduced: OnReduced,
        on_layout: Callable[[Layout], None],
        on_backward_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model = accepted_ddp(model)
        note_failed_forwards()
        self.broken: str | None = None
        self.group: dist.ProcessGroup = model.process_group
        self.buffers = BufferSync(model)
        self._on_reduced = on_reduced
        self._iteration = 0
        self._on_layout = on_layout
        self._on_backward_ended = on_backward_ended
        self._updates_early = False  # in this step
        self._layout_known = False
        self._order: list[int] = []
        self._aborted = threading.Event()  # since the step began
        self._choice = averaged(model)
        with self._choice.as_constructed(model):  # torch takes no hook on a frozen parameter
            self._handles = self._watch_order()
            end_when(self._aborted, self.model)
        self._failure: Exception | None = None
        self._under_way: set[int] = set()  # buckets
        self._awaited: dict[int, torch.futures.Future[None]] = {}  # who completes one takes it out first
        self._backward = 0
        self._buffers_arrival: torch.futures.Future[None] | None = None
        self._one_at_a_time = threading.Condition()
        self._all_begun = 0.0  # when this worker had all its gradients; monotonic
        self._waited_s = 0.0
        self._averaged_at: float | None = None  # monotonic
        self._register()

    @property
    def signature(self) -> str:
        """A digest, equal where DDP may make the same buckets: of as many replicas of such parameters."""
        model: Any = self.model
        with self._choice.as_constructed(model):  # some may be frozen by now
            names = model._build_debug_param_to_name_mapping(self._choice.parameters).values()
        of_each = [(*tensor.shape, str(tensor.dtype)) for tensor in self._choice.parameters]
        caps = (model.bucket_bytes_cap, model.bucket_bytes_cap_list, model.find_unused_parameters)
        described = repr((self.group.size(), caps, [*names], of_each))
        return xxhash.xxh3_128_hexdigest(described.encode())

    @property
    def frozen_at_first(self) -> list[torch.nn.Parameter]:
        """Parameters that DDP never averages, since they required no gradient when it was constructed."""
        others = {*self._choice.parameters}
        ignored = self.model.parameters_to_ignore
        named = self.model.module.named_parameters()
        return [parameter for name, parameter in named if parameter not in others and name not in ignored]

    @property
    def averaged(self) -> list[str]:
        """Names of the parameters that it averages. None if some of them have sparse gradients."""
        names = {parameter: name for name, parameter in self.model.module.named_parameters()}
        return [] if any(self._choice.sparse) else [names[one] for one in self._choice.parameters]

    def take_waited_s(self) -> float:
        """Seconds since the last call in which this worker had its gradients, and waited for averages."""
        with self._one_at_a_time:
            waited, self._waited_s = self._waited_s, 0.0
        return waited

    def take_since_averages_s(self) -> float:
        """Seconds since this worker had all averages, as a rule of its update. 0 if there were none."""
        with self._one_at_a_time:
            averaged_at, self._averaged_at = self._averaged_at, None
        return 0.0 if averaged_at is None else time.monotonic() - averaged_at

    def renew(self, group: dist.ProcessGroup) -> None:
        """From the next :meth:`reset` on, use another group of the same workers."""
        self.group = group

    def begin(self, iteration: int, *, updates_early: bool = False) -> None:
        """The step of an iteration begins.

        Args:
            iteration: which one.
            updates_early: ``on_reduced`` updates parameters. Averaged gradients are put in place before it
                then, so that an optimizer can use them at once; otherwise DDP does it at the end of backward.

        Raises:
            UnsupportedError: it updates early, and the host cannot wait for averages one by one, or some
                parameters may be unused.
        """
        if updates_early and not self._updates_early:
            _refuse_early_updates(self.model, self.group)
            _refuse_unused(self.model)
        self._updates_early = updates_early
        self._iteration = iteration
        self._aborted.clear()
        self.buffers.forget()
        if self._layout_known:  # not before: no hook may be removed while the engine goes through them
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def abort(self) -> None:
        """Make a backward fail that waits for an all-reduce, or soon will. May be called from any thread."""
        self._aborted.set()
        with self._one_at_a_time:
            self.broken = self.broken or "the group was aborted"
            awaited = list(self._awaited.values())
            self._awaited.clear()
        for arrival in awaited:
            arrival.set_result(None)

    def drain(self, timeout_s: float) -> None:
        """Wait until no all-reduce is under way.

        gloo does not always wake a thread whose connection closed during a send. An all-reduce that has not
        ended in time is abandoned: when it ends later, its result is ignored. Its group is kept for good,
        because destroying it would wait for that thread.
        """
        with self._one_at_a_time:
            if not self._one_at_a_time.wait_for(lambda: not self._under_way, timeout_s):
                _abandoned.append(self.group)
                self._under_way.clear()
            self._backward += 1

    def reset(self, layout: Layout | None, *, sync_buffers: bool) -> None:
        """Forget an aborted backward and continue with the current group.

        Args:
            layout: the buckets that were in use; None for those that DDP begins with.
            sync_buffers: give all replicas the first one's buffers in the next forward pass.
        """
        model: Any = self.model
        model.process_group = self.group
        model._has_rebuilt_buckets = False
        parameters, sparse = self._choice.parameters, self._choice.sparse
        with self._choice.as_constructed(model), assigned(layout):
            names = model._build_debug_param_to_name_mapping(parameters)
            model._ddp_init_helper(parameters, sparse, names, model.static_graph)
        model._comm_hooks.clear()
        self._register()
        for layer in synchronised_norms(self.model):
            layer.process_group = self.group
        model.require_forward_param_sync = sync_buffers
        self._buffers_arrival = None
        self.broken = self._failure = None

    # ------------------------------------------------------------------------- DDP's communication hook

    def _register(self) -> None:
        # A lambda, because DDP compares a hook's annotations with its own classes, not with their names.
        self.model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; as DDP does without a hook, it is scaled first and summed then."""
        index = bucket.index()
        if not self._layout_known and bucket.is_last():
            self._layout_known = True
            if (layout := predicted(self.model, self._choice, self._order)) is not None:
                self._on_layout(layout)
        if bucket.is_last():
            self._all_begun = time.monotonic()
        try:
            hit(Point.REDUCE, self._iteration, index)
            if index == 0:  # the first in every backward
                self._share_buffers()
                if self._updates_early:
                    after_backward(self._on_backward_ended)
            gradients = bucket.buffer()
            gradients.mul_(1.0 / self.group.size())
            if outputs.are_watched():
                self._show(bucket)
            on_end = recorder.on_collective(recorder.now()) if recorder.active else None
            with beginning():
                work = dist.all_reduce(gradients, group=self.group, async_op=True)
        except RuntimeError as error:
            if is_broken_communication(error):  # and not one of memory
                self.broken = first_line(error)
                step_failures.broken(self.broken)
            raise
        future = unlogged_future(work)
        if on_end is not None:
            future.add_done_callback(on_end)
        return self._averaged(bucket, future)

    def _show(self, bucket: dist.GradBucket) -> None:
        gradients = {outputs.gradient_of(name): tensor for name, tensor in self._tensors_of(bucket)}
        members = tuple(dist.get_process_group_ranks(self.group))
        outputs.show(Output(f"bucket {bucket.index()} of gradients", gradients, members))

    def _show_average(self, bucket: dist.GradBucket) -> None:
        averages = {f"the average of {name}": tensor for name, tensor in self._tensors_of(bucket)}
        outputs.show(Output(f"bucket {bucket.index()} of averages", averages, received=True))

    def _tensors_of(self, bucket: dist.GradBucket) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in a bucket, by parameter; rows and values if it is sparse."""
        names = {parameter: name for name, parameter in self.model.module.named_parameters()}
        own = [names[parameter] for parameter in bucket.parameters()]
        if bucket.buffer().layout == torch.strided:
            yield from zip(own, bucket.gradients(), strict=True)
            return
        (name,) = own  # each sparse gradient has a bucket to itself
        yield f"{name} (rows)", sparse_indices(bucket.buffer())
        yield f"{name} (values)", sparse_values(bucket.buffer())

    def _share_buffers(self) -> None:
        """Begin to send the first replica's buffers: who completes the iteration has them."""
        work, self._buffers_arrival = self.buffers.begin(self.group), None
        if work is None:
            return
        after_backward(self.buffers.adopt)
        if _needs_waking(self.buffers.flat):
            self._buffers_arrival = self._arrival(_BUFFERS, unlogged_future(work), lambda: None)

    def _averaged(
        self, bucket: dist.GradBucket, reduced: torch.futures.Future[Any]
    ) -> torch.futures.Future[torch.Tensor]:
        """The future that DDP waits for. For gloo it is a separate one, which an abort can complete."""
        index, backward = bucket.index(), self._backward
        if not _needs_waking(bucket.buffer()):
            with self._one_at_a_time:
                self._under_way.add(index)
            hit(Point.REDUCING, self._iteration, index)

            def done(future: torch.futures.Future[Any]) -> torch.Tensor:
                if bucket.is_last():
                    self._wait_for_buffers()
                self._done(index, future, backward, lambda: self._arrived(bucket))
                return self._outcome(bucket)

            return reduced.then(done)
        arrival = self._arrival(index, reduced, lambda: self._arrived(bucket))
        if bucket.is_last() and self._buffers_arrival is not None:
            both = torch.futures.collect_all([arrival, self._buffers_arrival])
            return both.then(lambda _: self._outcome(bucket))
        return arrival.then(lambda _: self._outcome(bucket))

    def _wait_for_buffers(self) -> None:
        try:
            self.buffers.wait()
        except RuntimeError as error:
            self.broken = first_line(error)

    def _arrival(
        self, number: int, future: torch.futures.Future[Any], act: Callable[[], None]
    ) -> torch.futures.Future[None]:
        """Completed when communication has ended and been acted on, or by an abort."""
        backward = self._backward
        arrival: torch.futures.Future[None] = torch.futures.Future()
        with self._one_at_a_time:
            self._under_way.add(number)
            self._awaited[number] = arrival
        if number != _BUFFERS:
            hit(Point.REDUCING, self._iteration, number)
        future.add_done_callback(lambda done: self._done(number, done, backward, act))
        return arrival

    def _done(
        self, number: int, future: torch.futures.Future[Any], backward: int, act: Callable[[], None]
    ) -> None:
        """Communication ended or failed. Called in any thread."""
        with self._one_at_a_time:
            if backward != self._backward:
                return  # it was abandoned
            try:
                future.value()
            except RuntimeError as error:
                self.broken = first_line(error)
            try:
                if self.broken is None:
                    act()
            except Exception as error:  # of a wait-free optimizer, say: the waiting backward raises it
                self._failure = error
            self._under_way.discard(number)
            if not self._under_way and self._all_begun:
                self._averaged_at = now = time.monotonic()
                self._waited_s, self._all_begun = self._waited_s + now - self._all_begun, 0.0
            arrival = self._awaited.pop(number, None)
            self._one_at_a_time.notify_all()
        if arrival is not None:
            arrival.set_result(None)

    def _outcome(self, bucket: dist.GradBucket) -> torch.Tensor:
        if self._failure is not None:
            raise self._failure
        if self.broken is not None:
            step_failures.broken(self.broken)
            raise RuntimeError(self.broken)
        return bucket.buffer()

    def _arrived(self, bucket: dist.GradBucket) -> None:
        if outputs.are_watched():
            self._show_average(bucket)
        if not self._updates_early:
            self._reduced(bucket)
            return
        is_dense = bucket.buffer().layout == torch.strided
        # A sparse gradient has a bucket to itself, which has no views.
        averages = bucket.gradients() if is_dense else [bucket.buffer()]
        of_each = [*zip(bucket.parameters(), averages, strict=True)]
        for parameter, average in of_each:
            if not is_dense:
                parameter.grad = average
            elif parameter.grad is None:
                parameter.grad = average.clone()
            elif parameter.grad.data_ptr() != average.data_ptr():  # else it is a view of the bucket
                parameter.grad.copy_(average)
        self._reduced(bucket)
        for parameter, average in of_each:
            # DDP writes the averages once more: here, where no undo needs the old values. All views of a
            # bucket count their changes in place together, and ``.data`` by itself: who clips another
            # optimizer's gradients has not changed these.
            parameter.grad = average.data

    def _reduced(self, bucket: dist.GradBucket) -> None:
        hit(Point.REDUCED, self._iteration, bucket.index())
        self._on_reduced(bucket.parameters())
        hit(Point.UPDATE, self._iteration, bucket.index())

    def _watch_order(self) -> list[RemovableHandle]:
        return [
            parameter.register_post_accumulate_grad_hook(lambda _, i=index: self._order.append(i))
            for index, parameter in enumerate(self._choice.parameters)
        ]


def _refuse_early_updates(model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    """On a device, an average counts as there when it is enqueued: an abort may leave anything in it."""
    on_device = any(parameter.device.type != "cpu" for parameter in model.parameters())
    if on_device and aborts_in_silence(group):
        raise UnsupportedError(
            "wrap_optimizer(wait_free=True) updates parameters while others still travel, and over NCCL the "
            "host does not know then whether an average has arrived: leave wait_free out.",
            alike=True,
        )


def _refuse_unused(model: DistributedDataParallel) -> None:
    """DDP leaves a parameter alone that no replica has used, which it knows when all buckets are there."""
    if model.find_unused_parameters:
        raise UnsupportedError(
            "wrap_optimizer(wait_free=True) would also update parameters that no replica has used in a step, "
            "by gradients of 0: leave out wait_free, or find_unused_parameters=True.",
            alike=True,
        )


def _needs_waking(gradients: torch.Tensor) -> bool:
    """Whether this is gloo on the host. Elsewhere an abort wakes all, and the future carries the streams."""
    return gradients.device.type == "cpu"
