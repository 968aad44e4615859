"""Where an abort is silent, no update begins before its gradients have arrived. The device is a fake."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from swift_ft import wrap_optimizer
from swift_ft.errors import DivergenceError
from swift_ft.torch_adapters import device_waits
from swift_ft.torch_adapters.abortable_waits import AbortableWaits
from swift_ft.torch_adapters.comm_errors import is_broken_communication, may_come_of_abort
from swift_ft.torch_adapters.communication import wait_on_host
from swift_ft.torch_adapters.device_waits import DeviceWaits
from swift_ft.torch_adapters.lasting_group import beginning
from swift_ft.torch_adapters.lasting_work import LastingWork
from swift_ft.torch_adapters.step_failures import step_failures
from swift_ft.torch_core.module_hooks import hooks_of


class Device:
    """Does all that it was given when the test says so, or when the groups are aborted."""

    def __init__(self) -> None:
        self.idle = threading.Event()
        self.asked = threading.Event()
        self.waits = 0

    def recorded(self, device: torch.device) -> object:
        assert device.type == "cuda"
        return self._wait

    def _wait(self) -> None:
        self.waits += 1
        self.asked.set()
        assert self.idle.wait(30)


class Step:
    """One parameter on a device, and what waits for it."""

    def __init__(self) -> None:
        self.device, self.waits = Device(), AbortableWaits()
        self.waits.silent = True
        LastingWork.waits = self.waits
        devices = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 0)]
        self.on_device = DeviceWaits(self.waits, lambda: devices)
        self.on_device.watch()
        self.parameter = torch.nn.Parameter(torch.ones(1))
        self.parameter.grad = torch.ones(1)
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.5)
        step_failures.begin()
        self.on_device.begin()

    def in_the_wait(self, act: object) -> threading.Thread:
        """Do something as soon as the training thread waits for the device."""

        def run() -> None:
            assert self.device.asked.wait(30)
            assert self.parameter.item() == 1.0  # no update was made
            act()  # type: ignore[operator]

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def abort(self) -> None:
        """As NCCL does: the device goes on, with anything in the gradients."""
        self.waits.abort()
        self.device.idle.set()


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    made = Step()
    monkeypatch.setattr(device_waits, "_end_of_stream", made.device.recorded)
    yield made
    made.on_device.close()
    LastingWork.waits = None
    step_failures.begin()


def test_an_update_waits_for_its_gradients(step: Step) -> None:
    thread = step.in_the_wait(step.device.idle.set)
    step.optimizer.step()
    thread.join()
    assert (step.parameter.item(), step.device.waits) == (0.5, 1)
    step.on_device.finish()  # nothing has communicated since
    assert step.device.waits == 1


def test_an_update_of_what_was_aborted_is_not_made(step: Step) -> None:
    thread = step.in_the_wait(step.abort)
    with pytest.raises(RuntimeError, match="aborted") as caught:
        step.optimizer.step()
    thread.join()
    assert step.parameter.item() == 1.0
    assert is_broken_communication(caught.value)
    assert "aborted" in str(step_failures.cause)  # also if the script catches the error


def test_nor_if_the_abort_came_before(step: Step) -> None:
    step.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        step.optimizer.step()
    assert step.parameter.item() == 1.0


def test_a_device_that_never_answers_is_given_up(step: Step) -> None:
    step.waits.limit_s = 0.05
    with pytest.raises(RuntimeError, match=r"no answer within 0\.05 s") as caught:
        step.optimizer.step()
    assert is_broken_communication(caught.value)
    step.device.idle.set()


def test_an_abort_after_the_update_leaves_the_step_complete(step: Step) -> None:
    step.device.idle.set()
    step.optimizer.step()
    step.waits.abort()
    step.on_device.finish()
    assert step_failures.cause is None


def test_unless_something_communicated_after_it(step: Step) -> None:
    step.device.idle.set()
    step.optimizer.step()
    with beginning():  # the average of a loss, say
        pass
    step.waits.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        step.on_device.finish()
    assert step_failures.cause is not None


STREAM_WAITS: dict[str, Callable[[Any], object]] = {
    "wait": lambda work: work.wait(),
    "synchronize": lambda work: work.synchronize(),
    "block_current_stream": lambda work: work.block_current_stream(),
}


@pytest.mark.parametrize("way", [*STREAM_WAITS, "is_completed", "is_success"])
def test_or_was_waited_for_after_it(way: str, step: Step) -> None:
    """A wait on a device returns at once: the operation may have begun long before, and end later."""
    step.device.idle.set()
    work: Any = LastingWork(_Done(over=True))  # type: ignore[arg-type]
    step.optimizer.step()
    getattr(work, way)()
    step.waits.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        step.on_device.finish()


FUTURES: dict[str, Callable[[torch.futures.Future[Any]], object]] = {
    "wait": lambda future: future.wait(),
    "then": lambda future: future.then(lambda done: done.value()).wait(),
    "with others": lambda future: torch.futures.wait_all([future]),
}


@pytest.mark.parametrize("way", FUTURES)
def test_or_was_waited_for_by_its_future(way: str, step: Step) -> None:
    """Which was given before, to whoever likes."""
    step.device.idle.set()
    future = LastingWork(_Done()).get_future()  # type: ignore[arg-type]
    step.optimizer.step()
    FUTURES[way](future)
    before = step.device.waits
    step.optimizer.step()
    assert step.device.waits > before
    step.waits.abort()
    with pytest.raises(RuntimeError, match="aborted"):
        step.optimizer.step()
    assert step.parameter.item() == 0.0  # after two updates


def test_futures_of_groups_that_are_gone_are_not_awaited(step: Step) -> None:
    step.device.idle.set()
    LastingWork(_Done()).get_future()  # type: ignore[arg-type]
    step.waits.renew()
    step.waits.silent = True
    for _ in range(2):
        step.optimizer.step()
    assert step.device.waits == 1


@pytest.mark.parametrize("way", STREAM_WAITS)
def test_a_wait_after_an_abort_fails(way: str, step: Step) -> None:
    step.waits.abort()
    with pytest.raises(RuntimeError, match="aborted") as caught:
        STREAM_WAITS[way](LastingWork(_Done()))  # type: ignore[arg-type]
    assert is_broken_communication(caught.value)
    assert step_failures.cause is not None


def communicate(step: Step) -> float:
    """A backward pass of another model, say, in which a peer dies."""
    with beginning():
        pass
    step.abort()
    return 0.25


CLOSURES: dict[str, Callable[[torch.optim.Optimizer, Callable[[], float]], object]] = {
    "by place": lambda optimizer, closure: optimizer.step(closure),
    "by name": lambda optimizer, closure: optimizer.step(closure=closure),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("way", CLOSURES)
def test_an_update_of_what_its_closure_has_received(way: str, wrapped: bool, step: Step) -> None:
    step.device.idle.set()
    if wrapped:
        wrap_optimizer(step.optimizer)
    assert CLOSURES[way](step.optimizer, lambda: 0.5) == 0.5
    assert step.parameter.item() == 0.5
    with pytest.raises(RuntimeError, match="aborted"):
        CLOSURES[way](step.optimizer, lambda: communicate(step))
    assert step.parameter.item() == 0.5


def test_each_closure_of_a_step_is_waited_for(step: Step) -> None:
    step.device.idle.set()
    optimizer = torch.optim.LBFGS([step.parameter], max_iter=3, tolerance_change=0, tolerance_grad=0)
    calls = list[int]()

    def closure() -> float:
        with beginning():
            calls.append(len(calls))
        step.parameter.grad = 2 * step.parameter.detach()
        return float(step.parameter.detach() ** 2)

    optimizer.step(closure)
    assert len(calls) > 1
    assert step.device.waits == 1 + len(calls)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("of_all", [False, True])
def test_an_update_of_what_hooks_have_received(of_all: bool, wrapped: bool, step: Step) -> None:
    """Of the optimizer, or of all, registered behind the one that waits."""
    step.device.idle.set()
    if wrapped:
        wrap_optimizer(step.optimizer)
    register: Any = register_optimizer_step_pre_hook if of_all else step.optimizer.register_step_pre_hook
    hooks = [register(lambda *_: None)]
    step.optimizer.step()
    assert len([*hooks_of(step.optimizer)]) == (not of_all), "the script's only"
    hooks.append(register(lambda *_: communicate(step) and None))
    with pytest.raises(RuntimeError, match="aborted"):
        step.optimizer.step()
    assert step.parameter.item() == 0.5
    for hook in hooks:
        hook.remove()
    assert [*hooks_of(step.optimizer)] == []


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_hook_that_removes_itself_or_adds_another(wrapped: bool, step: Step) -> None:
    """As with torch alone, where nothing comes behind it."""
    step.device.idle.set()
    if wrapped:
        wrap_optimizer(step.optimizer)
    calls: list[str] = []

    def once(*_: object) -> None:
        calls.append("once")
        handle.remove()
        handles.append(step.optimizer.register_step_pre_hook(lambda *_: calls.append("later")))

    handles: list[Any] = []
    handle = step.optimizer.register_step_pre_hook(once)
    step.optimizer.step()
    step.optimizer.step()
    assert calls == ["once", "later"]
    handles[0].remove()
    assert [*hooks_of(step.optimizer)] == []


def test_a_hook_that_fails_leaves_none_of_ours_behind(step: Step) -> None:
    step.device.idle.set()

    def fail(*_: object) -> None:
        raise OSError("a disk is full")

    handle = step.optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="a disk"):
        step.optimizer.step()
    handle.remove()
    step.optimizer.step()
    assert [*hooks_of(step.optimizer)] == []
    assert step.parameter.item() == 0.5


def test_each_update_waits_for_what_communicated_before_it(step: Step) -> None:
    """A discriminator and a generator have two backward passes and two updates in one step."""
    step.device.idle.set()
    step.optimizer.step()
    step.optimizer.step()  # of gradients that have arrived
    assert step.device.waits == 1
    with beginning():
        pass
    step.optimizer.step()
    assert step.device.waits == 2


def test_without_an_update_the_end_of_a_step_waits(step: Step) -> None:
    """Its gradients are carried over into the next one."""
    step.device.idle.set()
    step.on_device.finish()
    assert step.device.waits == 1


def test_an_error_of_the_device_is_the_scripts(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("an illegal address was encountered")

    monkeypatch.setattr(device_waits, "_end_of_stream", lambda _: fail)
    with pytest.raises(ValueError, match="illegal address"):
        step.on_device.finish()
    assert step_failures.cause is None


def test_over_gloo_nothing_waits(step: Step) -> None:
    step.waits.silent = False
    step.optimizer.step()
    step.on_device.finish()
    assert (step.parameter.item(), step.device.waits) == (0.5, 0)


class _Done:
    """An operation that is enqueued.

    Args:
        over: it says that it is done.
    """

    def __init__(self, *, over: bool = False) -> None:
        self._over = over

    def wait(self) -> None:
        """Return at once."""

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """Not on the device."""
        return self._over

    is_success = is_completed

    def get_future(self) -> torch.futures.Future[Any]:
        """Completed when it is enqueued."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize(("silent", "waited"), [(True, 2), (False, 0)])
def test_the_host_reads_nothing_before_it_has_arrived(silent: bool, waited: int, step: Step) -> None:
    """What a recovery receives: lengths, a state, its digests; on whichever device that is."""
    step.waits.silent = silent
    step.device.idle.set()
    wait_on_host([_Done()], GPUS)  # type: ignore[list-item]
    assert step.device.waits == waited


def test_what_an_abort_has_left_is_not_read(step: Step) -> None:
    thread = step.in_the_wait(step.abort)
    with pytest.raises(RuntimeError, match="aborted") as caught:
        wait_on_host([_Done()], GPUS)  # type: ignore[list-item]
    thread.join()
    assert is_broken_communication(caught.value)


def test_the_host_itself_has_no_streams(step: Step) -> None:
    wait_on_host([_Done()], [torch.device("cpu")])  # type: ignore[list-item]
    assert step.device.waits == 0


ERRORS: list[BaseException] = [
    ValueError("the loss is not finite"),
    torch.OutOfMemoryError("of a size that was to be received"),
    DivergenceError("other bits"),
    SystemExit("the loss is not finite"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_may_come_of_what_an_abort_has_left(error: BaseException, step: Step) -> None:
    assert not may_come_of_abort(error)
    step.waits.abort()
    assert may_come_of_abort(error)
    step.waits.renew()
    assert not may_come_of_abort(error)


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(None), KeyboardInterrupt()], ids=repr)
def test_an_end_that_blames_nothing_comes_from_elsewhere(error: BaseException, step: Step) -> None:
    step.waits.abort()
    assert not may_come_of_abort(error)


def test_what_was_there_before_the_abort_is_not_in_doubt(step: Step) -> None:
    step.device.idle.set()
    step.optimizer.step()  # waits for all that has begun
    step.waits.abort()
    assert not may_come_of_abort(ERRORS[0])
    step.waits.begun()
    assert may_come_of_abort(ERRORS[0])


def test_gloo_says_what_has_failed(step: Step) -> None:
    step.waits.silent = False
    step.waits.abort()
    assert not may_come_of_abort(ERRORS[0])


def test_without_a_session_nothing_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LastingWork, "waits", None)
    assert not may_come_of_abort(ERRORS[0])
