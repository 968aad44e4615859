"""The hook on DDP's private seams, on one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swift_ft.data_parallel import DataParallelHook
from swift_ft.errors import UnsupportedError


class Crooked(nn.Module):
    """Layers that are used in another order than they are made in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in (3, 1, 5, 0, 2, 4):
            x = self.layers[index](x)
        return x


class Events:
    def __init__(self) -> None:
        self.buckets: list[int] = []

    def reducing(self, bucket: int) -> None: ...

    def sent(self, bucket: int) -> None: ...

    def reduced(self, bucket: int, parameters: Sequence[torch.Tensor]) -> None:
        self.buckets.append(len(parameters))


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def hooked(events: Any, **options: Any) -> tuple[DataParallelHook, list[list[list[int]]]]:
    layouts: list[list[list[int]]] = []
    torch.manual_seed(0)
    model = DistributedDataParallel(Crooked(), bucket_cap_mb=1, **options)
    return DataParallelHook(model, events, lambda layout, _: layouts.append(layout)), layouts


def backward(hook: DataParallelHook) -> list[torch.Tensor]:
    hook.begin()
    hook.model.zero_grad()
    hook.model(torch.ones(2, 300)).sum().backward()
    return [p.grad.clone() for p in hook.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_the_layout_is_the_one_that_ddp_goes_on_with(options: dict[str, Any]) -> None:
    hook, layouts = hooked(Events(), **options)
    for _ in range(3):
        backward(hook)
    index = {parameter: i for i, parameter in enumerate(hook.model.parameters())}
    reducer: Any = hook.model.reducer
    used = [[index[p] for p in bucket.parameters()] for bucket in reducer._get_zeros_like_grad_buckets()]
    assert layouts == [used]
    assert len(used) > 1


def test_unused_parameters_keep_the_first_layout() -> None:
    hook, layouts = hooked(Events(), find_unused_parameters=True)
    backward(hook)
    backward(hook)
    assert layouts == []


def test_a_reset_starts_from_a_layout_and_changes_no_gradient() -> None:
    events = Events()
    hook, layouts = hooked(events)
    before = backward(hook)
    events.buckets.clear()
    hook.reset(layouts[0])
    after = backward(hook)
    assert events.buckets == [len(bucket) for bucket in layouts[0]]
    assert len(after) == len(before) == 12
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def accumulated(hook: DataParallelHook) -> None:
    """A step of two microbatches as a pipeline does it: only the last backward is to average."""
    hook.begin()
    hook.model.zero_grad()
    with hook.model.no_sync():
        outputs = [hook.model(torch.ones(3, 300)) for _ in range(2)]
        outputs[0].sum().backward()
    hook.model(torch.ones(3, 300)).sum().backward()


def test_of_several_microbatches_a_layout_names_each_parameter_once() -> None:
    hook, layouts = hooked(Events())
    accumulated(hook)
    (layout,) = layouts
    assert sorted(index for bucket in layout for index in bucket) == list(range(12))


def test_a_first_step_after_a_warm_up_is_done_again() -> None:
    """A forward alone, as in a pipeline's exchange of shapes, and DDP averages the first microbatch, too."""
    told: list[bool] = []
    events = Events()
    hook, _ = hooked(events)
    hook._on_layout = lambda _, again: told.append(again)
    hook.model(torch.ones(3, 300))
    accumulated(hook)
    assert told == [False, True]
    first, events.buckets = events.buckets, []
    hook.reset(None, first_alone=True)
    accumulated(hook)
    assert events.buckets == first
    assert sum(first) == 2 * 12
    events.buckets = []
    hook.reset(None)
    accumulated(hook)
    assert sum(events.buckets) == 12


def test_a_backward_that_waits_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo may never wake it: the abort does, and what is under way is given up."""

    class Never:
        def get_future(self) -> torch.futures.Future[Any]:
            return torch.futures.Future()

    begun = threading.Event()

    class Sent(Events):
        def sent(self, bucket: int) -> None:
            begun.set()

    hook, _ = hooked(Sent())
    with monkeypatch.context() as patched:
        patched.setattr(dist, "all_reduce", lambda *_, **__: Never())
        aborting = threading.Thread(target=lambda: begun.wait(30) and hook.break_off())
        aborting.start()
        with pytest.raises(RuntimeError, match="the group was aborted"):
            backward(hook)
        aborting.join(30)
    hook.settle(0.01)
    hook.reset(None)
    assert len(backward(hook)) == 12


def test_where_an_abort_wakes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of accelerators, on the host: the same gradients."""
    hook, _ = hooked(Events())
    ours = backward(hook)
    monkeypatch.setattr("swift_ft.data_parallel._needs_waking", lambda _: False)
    hook, _ = hooked(Events())
    assert all(torch.equal(a, b) for a, b in zip(backward(hook), ours, strict=True))


def test_an_optimizers_error_is_raised_by_the_backward() -> None:
    class Failing(Events):
        def reduced(self, bucket: int, parameters: Sequence[torch.Tensor]) -> None:
            raise RuntimeError("no such learning rate")

    hook, _ = hooked(Failing())
    with pytest.raises(RuntimeError, match="no such learning rate"):
        backward(hook)
    assert hook.broken is None  # else it would count as a peer's death


def test_what_is_not_supported() -> None:
    with pytest.raises(UnsupportedError, match="attach_ddp"):
        DataParallelHook(nn.Linear(2, 2), Events(), lambda *_: None)
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
    with pytest.raises(UnsupportedError, match="communication hook"):
        DataParallelHook(model, Events(), lambda *_: None)
