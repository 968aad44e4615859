"""The hook on DistributedDataParallel: the one module that knows its private seams (tested on torch 2.13).

Gradients are averaged in DDP's communication hook, on whatever group is the present one. After a failure the
reducer is made anew, which forgets the aborted backward. It starts from the buckets that were in use: with
more than two replicas the order of a sum depends on where in a bucket an element lies.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from swift_ft.errors import UnsupportedError

__all__ = ["BucketEvents", "DataParallelHook", "join_without_sync"]

_torch: Any = dist  # with the private names that DDP itself looks up there

_given_up: list[dist.ProcessGroup] = []

Layout = list[list[int]]
"""Indices of the parameters in each bucket, in the order in which buckets are reduced."""


class BucketEvents(Protocol):
    """What the hook tells about each bucket of gradients."""

    def reducing(self, bucket: int) -> None:
        """The bucket is full on this worker. Called in backward."""

    def sent(self, bucket: int) -> None:
        """Its all-reduce has begun. Called in backward."""

    def reduced(self, bucket: int, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of these parameters are everybody's average. Called in any thread, one at a time."""


class DataParallelHook:
    """Attaches to a DDP model.

    Args:
        model: stock DDP, without a communication hook of its own.
        events: is told about each bucket.
        on_layout: called in the first backward, with the buckets that DDP will use from then on; and once
            more, with True, if there is another averaged backward in the same step. That is so in a pipeline
            that exchanged shapes: torch's warm-up leaves DDP about to average the first microbatch alone.
        fill_gradients: put averaged gradients in place before ``events.reduced``, so that an optimizer can
            use them at once; otherwise DDP does it at the end of backward.

    Attributes:
        broken: what the communication in this step failed of, if it did.

    Raises:
        UnsupportedError: for a model that is no DDP, or has a hook already.
    """

    def __init__(
        self,
        model: Any,
        events: BucketEvents,
        on_layout: Callable[[Layout, bool], None],
        fill_gradients: bool = False,
    ) -> None:
        _check(model)
        self.model: DistributedDataParallel = model
        self.broken: str | None = None
        self.group: dist.ProcessGroup = model.process_group
        self._events = events
        self._on_layout = on_layout
        self._fill_gradients = fill_gradients
        self._layout_told = False
        self._new_layout: Layout | None = None  # told in this step
        self._order: list[int] = []
        self._handles = self._watch_order()
        self._failure: Exception | None = None
        self._under_way: set[int] = set()  # buckets
        self._awaited: dict[int, torch.futures.Future[None]] = {}  # who completes one takes it out first
        self._backward = 0
        self._one_at_a_time = threading.Condition()
        self._register()

    @property
    def replica(self) -> int:
        """The place of this worker among its replicas, from 0."""
        return self.group.rank()

    def renew(self, group: dist.ProcessGroup) -> None:
        """From the next :meth:`reset` on, use another group of the same workers."""
        self.group = group

    def begin(self) -> None:
        """A step begins."""
        self._new_layout = None
        if self._layout_told:  # not before: no hook may be removed while the engine goes through them
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def break_off(self) -> None:
        """Let a backward that waits for an all-reduce fail now. From any thread."""
        with self._one_at_a_time:
            self.broken = self.broken or "the group was aborted"
            awaited = list(self._awaited.values())
            self._awaited.clear()
        for arrival in awaited:
            arrival.set_result(None)

    def settle(self, timeout_s: float) -> None:
        """Wait until no all-reduce is under way any more.

        gloo forgets to wake a thread whose connection closed in the middle of a send. What has not ended at
        the deadline is given up: whenever it ends, nothing follows from it. Its group is kept for good, since
        letting it go would wait for that thread.
        """
        with self._one_at_a_time:
            if not self._one_at_a_time.wait_for(lambda: not self._under_way, timeout_s):
                _given_up.append(self.group)
                self._under_way.clear()
            self._backward += 1

    def reset(self, layout: Layout | None, first_alone: bool = False) -> None:
        """Forget an aborted backward and go on with the group of now.

        Args:
            layout: the buckets that were in use; None for those that DDP begins with.
            first_alone: average the first microbatch alone, as after the warm-up of a pipeline.
        """
        model: Any = self.model
        model.process_group = self.group
        model._has_rebuilt_buckets = False
        parameters, sparse = model._build_params_for_reducer()
        names = model._build_debug_param_to_name_mapping(parameters)
        with _assigned(layout):
            model._ddp_init_helper(parameters, sparse, names, model.static_graph)
        model._comm_hooks.clear()
        self._register()
        if first_alone:
            model.reducer.prepare_for_backward([])
        model.require_forward_param_sync = True
        self.broken = self._failure = None

    # ------------------------------------------------------------------------- DDP's communication hook

    def _register(self) -> None:
        # A lambda, because DDP compares a hook's annotations with its own classes, not with their names.
        self.model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket; as DDP does without a hook, it is scaled first and summed then."""
        index = bucket.index()
        if self._new_layout is not None:
            self._on_layout(self._new_layout, True)
            self._new_layout = None
        if not self._layout_told and bucket.is_last():
            self._tell_layout()
        try:
            self._events.reducing(index)
            gradients = bucket.buffer()
            gradients.mul_(1.0 / self.group.size())
            work = dist.all_reduce(gradients, group=self.group, async_op=True)
        except RuntimeError as error:
            self.broken = str(error).splitlines()[0]
            raise
        return self._averaged(bucket, work.get_future())

    def _averaged(
        self, bucket: GradBucket, reduced: torch.futures.Future[Any]
    ) -> torch.futures.Future[torch.Tensor]:
        """What DDP waits for. Of gloo's it is a future of our own, which an abort can complete."""
        index, backward = bucket.index(), self._backward
        with self._one_at_a_time:
            self._under_way.add(index)
        if not _needs_waking(bucket.buffer()):
            self._events.sent(index)

            def done(future: torch.futures.Future[Any]) -> torch.Tensor:
                self._done(future, bucket, backward)
                return self._outcome(bucket)

            return reduced.then(done)
        arrival: torch.futures.Future[None] = torch.futures.Future()
        with self._one_at_a_time:
            self._awaited[index] = arrival
        self._events.sent(index)
        reduced.add_done_callback(lambda future: self._done(future, bucket, backward))
        return arrival.then(lambda _: self._outcome(bucket))

    def _done(self, future: torch.futures.Future[Any], bucket: GradBucket, backward: int) -> None:
        """An all-reduce ended, in whatever thread, or failed."""
        with self._one_at_a_time:
            if backward != self._backward:
                return  # it was given up long ago
            try:
                future.value()
            except RuntimeError as error:
                self.broken = str(error).splitlines()[0]
            try:
                if self.broken is None:
                    self._arrived(bucket)
            except Exception as error:  # an optimizer's, say: raised by the backward that waits for this
                self._failure = error
            self._under_way.discard(bucket.index())
            arrival = self._awaited.pop(bucket.index(), None)
            self._one_at_a_time.notify_all()
        if arrival is not None:
            arrival.set_result(None)

    def _outcome(self, bucket: GradBucket) -> torch.Tensor:
        if self._failure is not None:
            raise self._failure
        if self.broken is not None:
            raise RuntimeError(self.broken)
        return bucket.buffer()

    def _arrived(self, bucket: GradBucket) -> None:
        parameters = bucket.parameters()
        if not self._fill_gradients:
            self._events.reduced(bucket.index(), parameters)
            return
        averages = bucket.gradients()
        for parameter, average in zip(parameters, averages, strict=True):
            if parameter.grad is None:
                parameter.grad = average.clone()
            elif parameter.grad.data_ptr() != average.data_ptr():  # else it is a view of the bucket
                parameter.grad.copy_(average)
        self._events.reduced(bucket.index(), parameters)
        for parameter, average in zip(parameters, averages, strict=True):
            # DDP writes the averages once more: here, and not where an undo may look for them.
            parameter.grad = average

    def _tell_layout(self) -> None:
        """After the first backward DDP makes its buckets anew, by the order in which gradients came."""
        self._layout_told = True
        model: Any = self.model
        parameters, sparse = model._build_params_for_reducer()
        order = self._order[-len(parameters) :]  # of this backward: those before it averaged nothing
        if (model.find_unused_parameters and not model.static_graph) or {*order} != {*range(len(parameters))}:
            return  # DDP keeps the buckets that it began with
        config = model._bucket_config
        _, limits = config.compute_bucket_size_limits(
            static_graph=model.static_graph, find_unused_parameters=model.find_unused_parameters
        )
        limits = limits or [config.first_bucket_bytes_cap, model.bucket_bytes_cap]
        layout, _ = _torch._compute_bucket_assignment_by_size(
            [parameters[i] for i in order], limits, [sparse[i] for i in order], order
        )
        self._new_layout = layout
        self._on_layout(layout, False)

    def _watch_order(self) -> list[RemovableHandle]:
        model: Any = self.model
        parameters, _ = model._build_params_for_reducer()
        return [
            parameter.register_post_accumulate_grad_hook(lambda _, i=index: self._order.append(i))
            for index, parameter in enumerate(parameters)
        ]


def _needs_waking(gradients: torch.Tensor) -> bool:
    """gloo's, on the host. Elsewhere an abort wakes all, and the future carries the streams."""
    return gradients.device.type == "cpu"


@contextlib.contextmanager
def _assigned(layout: Layout | None) -> Iterator[None]:
    """Within: torch assigns parameters to these buckets, where it would group them by size."""
    if layout is None:
        yield
        return
    original = _torch._compute_bucket_assignment_by_size
    reverse = layout[::-1]  # DDP turns them round: it expects the order of the forward
    limits = [2**62] * len(layout)
    _torch._compute_bucket_assignment_by_size = lambda *_, **__: (reverse, limits)
    try:
        yield
    finally:
        _torch._compute_bucket_assignment_by_size = original


def _check(model: Any) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise UnsupportedError(
            f"attach_ddp() takes a torch.nn.parallel.DistributedDataParallel, not a {type(model)}."
        )
    if model._comm_hooks:
        raise UnsupportedError(
            "The model has a communication hook already, and swift_ft needs that place: do not register one."
        )
    if model.mixed_precision is not None:
        raise UnsupportedError(
            "DDP's mixed_precision needs the communication hook for itself: use torch.autocast instead."
        )


def join_without_sync() -> None:
    """In a process that replaces a lost worker: let DDP be made without talking to anybody.

    DDP compares shapes and sends parameters when it is made; the others are in the middle of their work, and
    this worker's state comes from one of them anyway.
    """
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def quiet(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "init_sync": False})

    DistributedDataParallel.__init__ = quiet  # type: ignore[method-assign]  # init_sync is torch's own switch
