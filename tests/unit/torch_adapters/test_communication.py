"""Conformance: the private parts of groups that `torch_adapters` uses, on a real group of one process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

from swift_ft.torch_adapters import comm_errors, lasting_work
from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.communication import (
    backend_name,
    begin,
    device_of,
    silent_devices,
    take_device,
    wait_for,
)
from swift_ft.torch_adapters.lasting_group import LastingGroup
from swift_ft.torch_adapters.lasting_work import LastingWork
from swift_ft.torch_adapters.rendezvous_store import PrefixStore, Store, TCPStore
from swift_ft.torch_adapters.script_operations import SCATTERED_SUMS
from swift_ft.torch_adapters.step_failures import step_failures

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_knows_its_device_and_backend(group: dist.ProcessGroup) -> None:
    assert device_of(group) == CPU
    assert backend_name(group, CPU) == "gloo"
    assert backend_name(group, torch.device("cuda", 1)) == "gloo"
    assert backend_name(group, torch.device("meta")) == ""


class OverNccl:
    """A group of torch that takes tensors of GPUs, and perhaps of the host over gloo."""

    def __init__(self, *, host: bool = False) -> None:
        self._device_types = [*([CPU] if host else []), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        names = {"cpu": "gloo", "cuda": "nccl"}
        return SimpleNamespace(name=lambda: names[device.type])


@pytest.mark.parametrize(
    ("current", "state", "named", "expected"),
    [
        pytest.param(0, [CPU], None, "cuda", id="no state on a GPU"),
        pytest.param(1, ["cuda:1"], None, "cuda", id="the current one"),
        pytest.param(1, ["cuda:0", "cuda:1"], None, "cuda", id="the current one is among them"),
        pytest.param(0, ["cuda:3", "cuda:2", CPU], None, "cuda:2", id="set_device was not called"),
        pytest.param(0, ["cuda:1"], "cuda:5", "cuda:5", id="the script has named one"),
    ],
)
def test_a_worker_communicates_on_its_own_device(
    current: int, state: list[Any], named: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all workers of a host would form their communicators on its first one, in silence."""
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    monkeypatch.setattr(LastingGroup, "device", torch.device(named) if named else None)
    take_device([torch.device(one) for one in state])
    nccl: Any = OverNccl()
    assert device_of(nccl) == torch.device(expected)
    both: Any = OverNccl(host=True)
    assert device_of(both) == CPU
    assert silent_devices(both) == silent_devices(nccl) == [torch.device(expected)]


@pytest.mark.parametrize(
    ("named", "given", "expected"),
    [
        ("cuda:1", "cuda", "cuda:1"),
        (None, "cuda", "cuda"),
        ("cuda:1", "cuda:0", "cuda:0"),
        ("cuda:1", "cpu", "cpu"),
    ],
)
def test_a_barrier_is_on_the_device_of_its_worker(
    named: str | None, given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LastingGroup, "device", torch.device(named) if named else None)
    seen: list[torch.device] = []

    class Native(OverNccl):
        group_name, group_desc = "0", ""

        def rank(self) -> int:
            return 0

        size = rank

        def barrier(self, opts: Any) -> None:
            seen.append(opts.device)

    native: Any = Native()
    opts = SimpleNamespace(device=torch.device(given))
    LastingGroup(native).barrier(opts=opts)
    assert seen == [torch.device(expected)]


def test_no_abort_of_gloo_is_silent(group: dist.ProcessGroup) -> None:
    assert silent_devices(group) == []


def test_the_fake_backend_waits_for_nothing(group: dist.ProcessGroup) -> None:
    """It is there for all devices, also for those that this host has not."""
    fake = dist.new_group([0], backend="fake")
    assert isinstance(fake, dist.ProcessGroup)
    assert len(fake._device_types) > 1
    assert silent_devices(fake) == []
    dist.destroy_process_group(fake)


def test_operations_begin_and_end() -> None:
    assert begin([]) == []
    wait_for([])
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    wait_for([work])
    assert tensor.tolist() == [1, 1]


def test_the_schedules_wait_through_the_function_that_is_replaced() -> None:
    """``AbortableWaits.install`` replaces a name of the module, so every schedule must look it up there."""
    assert list(inspect.signature(schedules._wait_batch_p2p).parameters) == ["work"]
    for kind in (schedules.Schedule1F1B, schedules.ScheduleGPipe, schedules._PipelineScheduleRuntime):
        assert "_wait_batch_p2p(" in inspect.getsource(kind._step_microbatches)
    waits_itself = [
        line for line in inspect.getsource(schedules).splitlines() if ".wait()" in line and "work" in line
    ]
    assert len(waits_itself) <= 1, waits_itself


def test_how_the_script_formed_its_group_can_be_read(group: Any) -> None:
    """What ``GenerationGroup`` asks torch for, to form the next group alike."""
    assert dist.distributed_c10d._world.pg_map[group][0] == "gloo"
    assert isinstance(dist.distributed_c10d._world.group_count, int)
    backend = group._get_backend(group._device_types[0])
    assert backend.options._timeout == timedelta(seconds=77)
    group.set_timeout(timedelta(seconds=66))
    assert backend.options._timeout == timedelta(seconds=66)


def test_torch_looks_up_the_class_of_gloo_groups_when_it_makes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """``GenerationGroup`` replaces it in between."""
    module: Any = dist.distributed_c10d
    made: list[object] = []

    class Noted(module.ProcessGroupGloo):  # type: ignore[misc]  # torch's class is only known at run time
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(module, "ProcessGroupGloo", Noted)
    group: Any = dist.new_group([0])
    assert [type(backend) for backend in made] == [Noted]
    assert group._get_backend(CPU) is made[0]


def test_collectives_are_where_broken_connections_are_recognized() -> None:
    """`comm_errors` knows communication by the files and functions in a traceback."""
    all_reduce: Any = inspect.unwrap(dist.all_reduce)
    assert comm_errors.is_communication(all_reduce.__code__.co_filename, "all_reduce")
    assert comm_errors.is_communication(str(Path(schedules.__file__)), schedules._wait_batch_p2p.__name__)
    assert comm_errors.is_communication(str(Path(schedules.__file__)), schedules._batch_p2p.__name__)
    engine: Any = torch.autograd.graph._engine_run_backward
    assert engine.__name__ in comm_errors._ENGINES
    assert torch.nn.parallel.DistributedDataParallel._pre_forward.__name__ in comm_errors._ENGINES


ARGUMENTS: dict[str, Callable[[], object]] = {
    "a type, when it is waited for": lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)),
    "an operation": lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND),
    "a length, as it begins": lambda: dist.all_gather([torch.ones(3)], torch.ones(4)),
    "lengths of parts": lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [3], [4]),
    "a layout": lambda: dist.broadcast(torch.ones(2).to_sparse(), 0),
}


@pytest.mark.parametrize("call", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_an_argument_that_torch_does_not_take_is_no_broken_communication(
    call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError) as caught:
        call()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert comm_errors.is_communication(last.filename, last.name)  # so the place alone does not tell
    assert not comm_errors.is_broken_communication(caught.value)
    waits = AbortableWaits(lambda: True)  # the generation is over, and any call would fail
    monkeypatch.setattr(LastingWork, "waits", waits)
    assert comm_errors.is_broken_communication(caught.value)


BROKEN = [
    RuntimeError(
        "[/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4711"
    ),
    RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection reset by peer"),
    RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 500ms for recv operation"),
    RuntimeError(
        "[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 64 vs 32"
    ),
    RuntimeError("Gloo connectFullMesh failed with no error"),
    RuntimeError("[gloo/rendezvous/store.cc:9] Wait timeout for key(s): 0/1"),
    RuntimeError("Rank 1 failed to pass monitoredBarrier in 500 ms"),
    RuntimeError("Operation timed out!"),
    RuntimeError("the process group has ended with its generation: a worker was lost"),
    dist.DistNetworkError("The client socket has failed to connect to 10.0.0.7"),
    dist.DistBackendError("NCCL error: ncclRemoteError: A call failed possibly due to a network error"),
    dist.DistBackendError("NCCL communicator was aborted on rank 0"),
    dist.DistBackendError("[Rank 0] Watchdog caught collective operation timeout"),
    dist.DistBackendError("NCCL error: ncclSystemError: System call (e.g. socket, malloc) failed"),
]
MISUSED = [
    dist.DistBackendError(
        "NCCL error: ncclInvalidUsage: Last error: Duplicate GPU detected : rank 0 and rank 1"
    ),
    dist.DistBackendError("NCCL error: ncclInvalidArgument: Invalid value for an argument"),
]


@pytest.mark.parametrize("error", [*BROKEN, *MISUSED], ids=str)
def test_what_broken_connections_and_mistaken_calls_say(error: RuntimeError) -> None:
    """The texts are those of torch 2.11 to 2.14; the frame is that of every wait for an operation."""
    with pytest.raises(RuntimeError) as caught:
        failed_wait(error)
    assert caught.value is error
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert comm_errors.is_communication(last.filename, last.name)
    assert comm_errors.is_broken_communication(error) == (error in BROKEN)


class Ended:
    """An operation that has failed in C++: of its wait there is no frame of Python."""

    def __init__(self, error: RuntimeError) -> None:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            future: asyncio.Future[None] = loop.create_future()
            future.set_exception(error)
        self.wait = future.result

    def is_completed(self) -> bool:
        """Yes."""
        return True


def failed_wait(error: RuntimeError) -> None:
    """A script waits for it."""
    LastingWork(Ended(error)).wait()  # type: ignore[arg-type]


# Who waits for a collective of gloo.


def collectives(group: Any) -> dict[str, Callable[[], Any]]:
    """A call of each that the installed torch has. Of those with other arguments, one of the same kind."""

    def one() -> torch.Tensor:
        return torch.ones(2)

    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: group.allreduce([one()]),
        "allreduce_coalesced": lambda: group.allreduce_coalesced([one()]),
        "broadcast": lambda: group.broadcast(one(), 0),
        "barrier": lambda: group.barrier(),
        "reduce": lambda: group.reduce(one(), 0),
        "allgather": lambda: group.allgather([[one()]], [one()]),
        "_allgather_base": lambda: group._allgather_base(one(), one()),
        "all_gather_single": lambda: group.all_gather_single(one(), one()),
        "gather": lambda: group.gather([[one()]], [one()], dist.GatherOptions()),
        "scatter": lambda: group.scatter([one()], [[one()]], dist.ScatterOptions()),
        "alltoall": lambda: group.alltoall([one()], [one()]),
        "alltoall_base": lambda: group.alltoall_base(one(), one(), [], []),
        "reduce_scatter": lambda: group.reduce_scatter([one()], [[one()]]),
        "_reduce_scatter_base": lambda: group._reduce_scatter_base(one(), one()),
        "reduce_scatter_single": lambda: group.reduce_scatter_single(one(), one()),
        "reduce_scatter_tensor_coalesced": lambda: group.reduce_scatter_tensor_coalesced([one()], [one()]),
    }
    return {name: call for name, call in calls.items() if hasattr(group, name)}


def test_collectives_of_gloo_complete_their_futures_by_themselves(group: dist.ProcessGroup) -> None:
    """But for those that gloo makes of others: their wait computes them."""
    with_future, unknown = set(), set()
    for name, call in collectives(group).items():
        try:
            work = call()
        except RuntimeError as error:  # torch 2.11 has no all-to-all of lists
            if "does not support" not in str(error):
                raise
            unknown.add(name)
            continue
        if (future := lasting_work._future_of(work)) is not None:
            with_future.add(name)
            future.wait()  # of the future alone
        work.wait()
        assert work.is_completed() or future is None, name
    assert unknown <= {"alltoall"}
    assert with_future == collectives(group).keys() - {*SCATTERED_SUMS} - unknown
    assert LastingGroup(group).completes_futures


class UnderWay:
    """An operation that a thread of torch's ends. Notes the threads that wait for it."""

    def __init__(self, error: RuntimeError | None = None, *, has_future: bool = True) -> None:
        self.waiting: list[str] = []
        self._error, self._has_future = error, has_future
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        end: Any = partial(self._future.set_result, None)
        if error is not None:
            end = partial(self._future.set_exception, error)
        self._ending = threading.Timer(0.05, end)
        self._ending.start()

    def is_completed(self) -> bool:
        """Not when it is asked."""
        return False

    def get_future(self) -> torch.futures.Future[Any]:
        """If it has one."""
        if not self._has_future:
            raise RuntimeError("Work::getFuture not implemented.")
        return self._future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As C++ does: what fails is raised, without a frame of Python."""
        del timeout
        self.waiting.append(threading.current_thread().name)
        self._ending.join()
        if self._error is not None:
            Ended(self._error).wait()
        return True


HERE = threading.main_thread().name


@pytest.mark.parametrize(
    ("work", "by_itself", "timeout", "waiting"),
    [
        pytest.param(UnderWay, True, timedelta(0), HERE, id="a collective"),
        pytest.param(UnderWay, False, timedelta(0), "swift-gloo-waits", id="a message"),
        pytest.param(UnderWay, True, timedelta(seconds=60), "swift-gloo-waits", id="a limit of its own"),
        pytest.param(
            partial(UnderWay, has_future=False), True, timedelta(0), "swift-gloo-waits", id="no future"
        ),
    ],
)
def test_who_waits_for_an_operation(
    work: Callable[[], UnderWay],
    by_itself: bool,
    timeout: timedelta,
    waiting: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LastingWork, "waits", AbortableWaits())
    native: Any = work()
    assert LastingWork(native, on_host=True, by_itself=by_itself).wait(timeout)
    assert native.waiting == [waiting]


def test_a_collective_that_breaks_raises_what_gloo_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastingWork, "waits", AbortableWaits())
    native: Any = UnderWay(BROKEN[0])
    step_failures.begin()
    with pytest.raises(RuntimeError, match="Connection closed by peer") as caught:
        LastingWork(native, on_host=True, by_itself=True).wait()
    assert comm_errors.is_broken_communication(caught.value)
    assert step_failures.cause is not None
    step_failures.begin()


def test_a_group_knows_which_operations_end_by_themselves(group: dist.ProcessGroup) -> None:
    handle: Any = LastingGroup(group)
    assert handle._ends_by_itself("allreduce")
    assert not handle._ends_by_itself("send")
    assert not handle._ends_by_itself("_reduce_scatter_base")
    other: Any = LastingGroup(dist.new_group([0], backend="fake"))
    assert not other._ends_by_itself("allreduce")
    dist.destroy_process_group(other.native)


def test_stores_are_the_public_classes() -> None:
    assert (PrefixStore, Store, TCPStore) == (dist.PrefixStore, dist.Store, dist.TCPStore)


def test_an_error_that_is_its_own_cause_is_no_broken_communication() -> None:
    """``raise error from error`` is legal, also by way of another one."""
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not comm_errors.is_broken_communication(one)
    one.__cause__ = one
    assert not comm_errors.is_broken_communication(one)
