"""The hook on DDP's private seams, on one process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swift_ft.errors import UnsupportedError
from swift_ft.faults import failpoints
from swift_ft.faults.failpoints import Point
from swift_ft.torch_adapters import ddp
from swift_ft.torch_adapters.comm_errors import is_broken_communication
from swift_ft.torch_adapters.ddp import DataParallelHook
from swift_ft.torch_adapters.ddp_construction import construct_within
from swift_ft.torch_adapters.ddp_passes import after_backward, trial_forward
from swift_ft.torch_core import outputs
from swift_ft.torch_core.outputs import Output


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

    def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.buckets.append(len(parameters))


pytestmark = pytest.mark.usefixtures("one_process")


def hooked(events: Any, **options: Any) -> tuple[DataParallelHook, list[list[list[int]]]]:
    layouts: list[list[list[int]]] = []
    torch.manual_seed(0)
    model = DistributedDataParallel(Crooked(), bucket_cap_mb=1, **options)
    return DataParallelHook(model, events, layouts.append), layouts


def backward(hook: DataParallelHook) -> list[torch.Tensor]:
    hook.begin(0)
    hook.model.zero_grad()
    hook.model(torch.ones(2, 300)).sum().backward()
    return [p.grad.clone() for p in hook.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_the_layout_is_the_one_that_ddp_goes_on_with(options: dict[str, Any]) -> None:
    hook, layouts = hooked(Events(), **options)
    for _ in range(3):
        backward(hook)
    index = {parameter: i for i, parameter in enumerate(hook.model.parameters())}
    reducer: Any = hook.model.reducer
    used = [[index[p] for p in bucket.parameters()] for bucket in reducer._get_zeros_like_grad_buckets()]
    assert layouts == [used]
    assert len(used) > 1


class Words(nn.Module):
    """Two tables whose gradients are sparse, among layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(7, 5, sparse=True)
        self.layer = nn.Linear(5, 5)
        self.second = nn.Embedding(7, 5, sparse=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layer(self.first(x)) + self.second(x))
        return out


def test_a_sparse_gradient_has_a_bucket_of_its_own_in_the_layout() -> None:
    layouts: list[list[list[int]]] = []
    hook = DataParallelHook(DistributedDataParallel(Words()), Events(), layouts.append)
    before = []
    for again in (False, True):
        if again:
            hook.reset(layouts[0], sync_buffers=True)
        hook.begin(0)
        hook.model.zero_grad()
        hook.model(torch.arange(6)).sum().backward()
        before.append([p.grad.to_dense() for p in hook.model.parameters() if p.grad is not None])
    (layout,) = layouts
    assert [0] in layout
    assert [3] in layout
    assert sorted(index for bucket in layout for index in bucket) == list(range(6))
    assert all(map(torch.equal, *before))


@pytest.fixture
def shown() -> Iterator[list[Output]]:
    """What is shown to whoever verifies a step: copies, since averages come into the same memory."""
    found: list[Output] = []

    def note(output: Output) -> None:
        copies = {name: tensor.clone() for name, tensor in output.tensors.items()}
        found.append(dataclasses.replace(output, tensors=copies))

    outputs.listen("test", note)
    yield found
    outputs.listen("test", None)


def test_what_a_worker_gives_and_what_it_gets_are_shown(
    shown: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum that came out wrong is seen as what has arrived."""
    arrived = DataParallelHook._arrived

    def changed(self: DataParallelHook, bucket: dist.GradBucket) -> None:
        bucket.buffer().add_(1.0)
        arrived(self, bucket)

    monkeypatch.setattr(DataParallelHook, "_arrived", changed)
    hook, _ = hooked(Events())
    backward(hook)
    given = {name: t for one in shown if not one.received for name, t in one.tensors.items()}
    got = {name: t for one in shown if one.received for name, t in one.tensors.items()}
    names = [name for name, _ in hook.model.module.named_parameters()]
    assert {*given} == {outputs.gradient_of(name) for name in names}
    assert {*got} == {f"the average of {name}" for name in names}
    for name in names:
        assert torch.equal(got[f"the average of {name}"], given[outputs.gradient_of(name)] + 1.0)
    assert not any(map(outputs.is_gradient, got)), "it is not this worker's own"
    places = [one.place for one in shown]
    assert len({*places}) == len(places)


def test_sparse_gradients_are_shown_as_rows_and_values(shown: list[Output]) -> None:
    hook = DataParallelHook(DistributedDataParallel(Words()), Events(), lambda _: None)
    hook.begin(0)
    hook.model(torch.arange(6)).sum().backward()
    tensors = {name: tensor for one in shown for name, tensor in one.tensors.items()}
    assert tensors["the average of first.weight (rows)"].tolist() == [[*range(6)]]
    assert tensors["the average of first.weight (values)"].shape == (6, 5)
    assert outputs.gradient_of("second.weight (values)") in tensors
    assert outputs.gradient_of("layer.weight") in tensors
    assert all(tensor.layout == torch.strided for tensor in tensors.values())


@pytest.mark.parametrize("frozen", ["layers.1", "layers"])
def test_what_was_frozen_after_ddp_is_averaged_when_it_is_thawed(frozen: str) -> None:
    events, layouts = Events(), list[list[list[int]]]()
    inner = Crooked()
    with within_own_construction():
        model = DistributedDataParallel(inner, bucket_cap_mb=1, find_unused_parameters=True)
    part = inner.get_submodule(frozen).requires_grad_(False)
    hook = DataParallelHook(model, events, layouts.append)
    assert hook.frozen_at_first == []
    hook.reset(None, sync_buffers=True)
    assert not any(p.requires_grad for p in part.parameters())
    part.requires_grad_(True)
    backward(hook)
    assert sum(events.buckets) == len(list(inner.parameters()))


def test_what_was_frozen_before_ddp_is_never_averaged() -> None:
    events = Events()
    inner = Crooked()
    inner.layers[1].requires_grad_(False)
    with within_own_construction():
        model = DistributedDataParallel(inner)
    inner.layers[1].requires_grad_(True)
    hook = DataParallelHook(model, events, lambda _: None)
    assert hook.frozen_at_first == list(inner.layers[1].parameters())
    hook.reset(None, sync_buffers=True)
    backward(hook)
    assert sum(events.buckets) == len(list(inner.parameters())) - 2
    assert inner.layers[1].weight.grad is not None


@contextlib.contextmanager
def within_own_construction() -> Iterator[None]:
    """Within the block, models are constructed as in a worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "__init__", DistributedDataParallel.__init__)
        construct_within(contextlib.nullcontext)
        yield


def test_a_backward_ends_at_the_next_gradient_after_an_abort() -> None:
    """It would compute all of them before it waits for an average."""
    events = Events()
    hook, layouts = hooked(events)
    before = backward(hook)
    last = hook.model.module.layers[4].bias  # its gradient is the first one
    handle = last.register_post_accumulate_grad_hook(lambda _: hook.abort())
    computed: list[int] = []
    for layer in hook.model.module.layers:
        layer.weight.register_post_accumulate_grad_hook(lambda _: computed.append(1))
    with pytest.raises(RuntimeError, match="aborted") as caught:
        backward(hook)
    assert is_broken_communication(caught.value, hook.broken)
    assert len(computed) < len(hook.model.module.layers)
    hook.drain(60.0)
    handle.remove()
    hook.reset(layouts[0], sync_buffers=True)
    assert all(map(torch.equal, before, backward(hook)))


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
    hook.reset(layouts[0], sync_buffers=True)
    after = backward(hook)
    assert events.buckets == [len(bucket) for bucket in layouts[0]]
    assert len(after) == len(before) == 12
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def accumulated(hook: DataParallelHook) -> None:
    """A step of two microbatches as a pipeline does it: only the last backward is to average."""
    hook.begin(0)
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


def test_an_exchange_of_shapes_leaves_no_trace() -> None:
    """After a forward alone, DDP would average the first microbatch, too: in the first step only."""
    events = Events()
    hook, _ = hooked(events)
    assert hook.model.require_forward_param_sync
    with trial_forward(hook.model):
        hook.model(torch.ones(3, 300))
    assert hook.model.require_forward_param_sync
    accumulated(hook)
    assert sum(events.buckets) == 12


def test_a_backward_that_waits_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo may never wake it: the abort does, and what is under way is given up."""

    class Never:
        def get_future(self) -> torch.futures.Future[Any]:
            return torch.futures.Future()

    begun = threading.Event()

    def note(point: Point, *_: object) -> None:
        if point == Point.REDUCING:
            begun.set()

    hook, _ = hooked(Events())
    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "_listener", None)  # restored afterwards
        failpoints.listen(note)
        patched.setattr(dist, "all_reduce", lambda *_, **__: Never())

        def abort() -> None:
            if begun.wait(30):
                hook.abort()

        aborting = threading.Thread(target=abort)
        aborting.start()
        with pytest.raises(RuntimeError, match="the group was aborted"):
            backward(hook)
        aborting.join(30)
    hook.drain(0.01)
    hook.reset(None, sync_buffers=True)
    assert len(backward(hook)) == 12


def test_where_an_abort_wakes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of accelerators, on the host: the same gradients."""
    hook, _ = hooked(Events())
    ours = backward(hook)
    monkeypatch.setattr("swift_ft.torch_adapters.ddp._needs_waking", lambda _: False)
    hook, _ = hooked(Events())
    assert all(torch.equal(a, b) for a, b in zip(backward(hook), ours, strict=True))


def test_an_optimizers_error_is_raised_by_the_backward() -> None:
    class Failing(Events):
        def __call__(self, parameters: Sequence[torch.Tensor]) -> None:
            raise RuntimeError("no such learning rate")

    hook, _ = hooked(Failing())
    with pytest.raises(RuntimeError, match="no such learning rate"):
        backward(hook)
    assert hook.broken is None  # else it would count as a peer's death


def test_ddp_still_has_the_private_parts_that_the_hook_uses() -> None:
    """Conformance: names and signatures, on a real model. What they do is tested above."""
    model: Any = DistributedDataParallel(nn.Linear(2, 2))
    parameters, sparse = model._build_params_for_reducer()
    assert [p is q for p, q in zip(parameters, model.parameters(), strict=True)] == [True, True]
    assert sparse == [False, False]
    assert list(model._build_debug_param_to_name_mapping(parameters)) == [0, 1]
    assert list(inspect.signature(model._ddp_init_helper).parameters) == [
        *("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph")
    ]
    assert model._comm_hooks == []
    assert model._has_rebuilt_buckets is False
    assert model.mixed_precision is None
    assert model.parameters_to_ignore == set()
    assert callable(model._sync_buffers)
    assert "self.reducer._rebuild_buckets()" in inspect.getsource(inspect.unwrap(model._pre_forward))
    assert callable(model.reducer.prepare_for_backward)
    assert (model.bucket_bytes_cap_default, [*model.bucket_bytes_cap_list]) == (True, [])
    chosen: Any = DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=1)
    assert (chosen.bucket_bytes_cap_default, chosen.bucket_bytes_cap) == (False, 2**20)
    listed: Any = DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb_list=[1, 2])
    assert [*listed.bucket_bytes_cap_list] == [2**20, 2**21]
    sizes = [dist._DEFAULT_FIRST_BUCKET_BYTES, model.bucket_bytes_cap]
    layout, _ = dist._compute_bucket_assignment_by_size(parameters, sizes, sparse, [1, 0])
    assert sorted(index for bucket in layout for index in bucket) == [0, 1]
    assert "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters


def test_what_is_not_supported() -> None:
    with pytest.raises(UnsupportedError, match="attach_ddp"):
        DataParallelHook(nn.Linear(2, 2), Events(), lambda *_: None)
    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, lambda _, bucket: torch.futures.Future())
    with pytest.raises(UnsupportedError, match="communication hook"):
        DataParallelHook(model, Events(), lambda *_: None)


def test_synchronised_norms_use_the_group_of_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP takes them on GPUs only, so its own check is switched off here."""
    monkeypatch.setattr(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None)
    group = dist.new_group()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), layer := nn.SyncBatchNorm(2)))
    hook = DataParallelHook(model, Events(), lambda _: None)
    hook.renew(group)
    hook.reset(None, sync_buffers=True)
    assert layer.process_group is group


def test_a_synchronised_norm_with_a_group_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
    model.module.append(nn.SyncBatchNorm(2, process_group=(own := object())))
    ranks = dist.get_process_group_ranks
    monkeypatch.setattr(
        dist, "get_process_group_ranks", lambda group: [0, 1] if group is own else ranks(group)
    )
    with pytest.raises(UnsupportedError, match="SyncBatchNorm has a group of its own"):
        DataParallelHook(model, Events(), lambda _: None)


def test_after_a_backward_pass_ddp_has_finished_it() -> None:
    """The buffers of the first replica are adopted then, when gradients are in place."""
    hook, _ = hooked(Events())
    found: list[bool] = []
    model: Any = hook.model
    reduce = hook._reduce

    def first(bucket: Any) -> Any:
        if bucket.index() == 0:
            after_backward(lambda: found.append(all(p.grad is not None for p in model.parameters())))
        return reduce(bucket)

    hook._reduce = first  # type: ignore[method-assign]
    for _ in range(2):
        backward(hook)
    assert found == [True, True]
    hook.broken = "Connection closed by peer"
    with pytest.raises(RuntimeError, match="closed by peer"):
        backward(hook)
    assert len(found) == 2


def test_a_static_graph_is_refused() -> None:
    """A session makes the reducer anew before the first step, and its first backward would fail."""
    model = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    assert model.static_graph
    with pytest.raises(UnsupportedError, match="static_graph=True does not survive"):
        DataParallelHook(model, Events(), lambda *_: None)


@pytest.mark.parametrize(
    ("device", "silent", "refused"), [("meta", True, True), ("cpu", True, False), ("meta", False, False)]
)
def test_early_updates_on_a_device_whose_aborts_are_silent(
    device: str, silent: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddp, "aborts_in_silence", lambda _: silent)
    model: Any = torch.nn.Linear(1, 1, device=device)
    group = DistributedDataParallel(nn.Linear(1, 1)).process_group
    check = functools.partial(ddp._refuse_early_updates, model, group)
    if refused:
        with pytest.raises(UnsupportedError, match="leave wait_free out"):
            check()
    else:
        check()


def test_memory_that_is_gone_as_an_average_begins_is_no_broken_communication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook, _ = hooked(Events())

    def begin(_: object) -> None:
        raise torch.OutOfMemoryError("no memory for the copy of the buffers")

    monkeypatch.setattr(hook.buffers, "begin", begin)
    with pytest.raises(RuntimeError, match="no memory") as caught:
        backward(hook)
    assert hook.broken is None
    assert not is_broken_communication(caught.value, hook.broken)
