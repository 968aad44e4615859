"""Messages of a device reach the host in bubbles (§5.1, §6 of the paper), on a fake device."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.logging import LogStats, MessageKey
from swift_ft.logging.format.record import RecordKind
from swift_ft.logging.writing.copier import BufferPool, Copier
from swift_ft.logging.writing.uploader import LogTimeoutError
from tests.support.fake_device import FakeDevice
from tests.support.log import key


class Host:
    """Receives copied messages; the test decides when they are written and their buffers released."""

    def __init__(self) -> None:
        self.got: list[tuple[RecordKind, MessageKey, torch.Tensor]] = []
        self.unwritten: list[Callable[[], None]] = []

    def __call__(
        self, kind: RecordKind, name: MessageKey, host: torch.Tensor, written: Callable[[], None]
    ) -> None:
        self.got.append((kind, name, host.clone()))
        self.unwritten.append(written)

    def write_all(self) -> None:
        while self.unwritten:
            self.unwritten.pop(0)()

    @property
    def keys(self) -> list[MessageKey]:
        return [name for _, name, _ in self.got]


class Setup:
    def __init__(self, pool_bytes: int = 1 << 20, copy_s: float = 1.0, timeout_s: float = 60.0) -> None:
        self.device, self.host, self.stats = FakeDevice(copy_s), Host(), LogStats()
        self.aborted = False
        self.copier = Copier(
            self.device,
            pool_bytes,
            self.host,
            self.stats,
            timeout_s=timeout_s,
            clock=self.device.clock,
            in_doubt=lambda: self.aborted,
        )


def test_nothing_is_copied_before_a_bubble_begins() -> None:
    s = Setup()
    s.copier.keep(RecordKind.MESSAGE, key(), torch.ones(4))
    s.device.advance(10)
    s.copier.collect()
    assert not s.host.got
    assert not s.device.buffers
    s.copier.bubble_begins()
    s.device.advance(1)
    s.copier.bubble_ends()
    assert s.host.keys == [key()]
    assert torch.equal(s.host.got[0][2], torch.ones(4))


def test_a_copy_waits_for_the_computation_before_it() -> None:
    """The event on the compute stream: the host is far ahead of the device."""
    s = Setup()
    tensor = torch.zeros(4)
    s.device.compute.give(5.0, do=lambda: tensor.data.fill_(7.0))  # what the device still computes
    s.copier.keep(RecordKind.MESSAGE, key(), tensor)
    s.copier.bubble_begins()
    s.device.advance(4)
    assert not s.device.side.free_at
    s.device.advance(2)
    s.copier.collect()
    assert torch.equal(s.host.got[0][2], torch.full((4,), 7.0))


def test_copies_in_and_outside_of_bubbles_are_counted_separately() -> None:
    s = Setup(copy_s=2.0)
    s.copier.keep(RecordKind.MESSAGE, key(0, 0), torch.ones(4))
    s.copier.keep(RecordKind.MESSAGE, key(0, 1), torch.ones(4))
    s.copier.bubble_begins()
    s.device.advance(3)  # the second copy is in its middle when the message arrives
    s.copier.bubble_ends()
    s.device.compute.give(10.0)
    s.device.advance(10)
    s.copier.collect()
    stats = s.stats.end_iteration()
    assert (stats.bubble_s, stats.copied_in_bubbles_s, stats.copied_outside_s) == (3.0, 3.0, 1.0)


def test_a_bubble_that_copies_nothing_is_counted() -> None:
    s = Setup()
    s.copier.bubble_begins()
    s.copier.bubble_begins()  # one wait for two messages is one bubble
    s.device.advance(2)
    s.copier.bubble_ends()
    s.copier.bubble_ends()
    s.copier.collect()
    assert s.stats.end_iteration().bubble_s == 2.0


def test_nothing_stays_longer_than_an_iteration() -> None:
    s = Setup()
    s.copier.keep(RecordKind.MESSAGE, key(), torch.ones(4))
    s.copier.end_iteration()
    s.device.advance(1)
    s.copier.collect()
    assert s.host.keys == [key()]
    stats = s.stats.end_iteration()
    assert (stats.copied_in_bubbles_s, stats.copied_outside_s, stats.bubble_s) == (0.0, 1.0, 0.0)


def test_the_devices_tensor_is_released_when_it_is_copied() -> None:
    s = Setup()
    tensor = torch.ones(4)
    watched = weakref.ref(tensor.untyped_storage())
    s.copier.keep(RecordKind.MESSAGE, key(), tensor)
    del tensor
    s.copier.bubble_begins()
    gc.collect()
    assert watched() is not None
    s.device.advance(1)
    s.copier.collect()  # at the latest with the next message; the bubble may last
    gc.collect()
    assert watched() is None


def test_receipts_and_messages_keep_their_order() -> None:
    s = Setup()
    for microbatch in range(3):
        s.copier.keep(
            RecordKind.RECEIPT, key(0, microbatch, source_stage=3), torch.full((2,), 1.0 + microbatch)
        )
        s.copier.keep(RecordKind.MESSAGE, key(0, microbatch), torch.full((2,), 10.0 + microbatch))
        s.copier.bubble_begins()
        s.device.advance(0.5)
        s.copier.bubble_ends()
    s.copier.end_iteration()
    s.device.advance(10)
    s.copier.drain(1)
    assert [kind for kind, _, _ in s.host.got] == [RecordKind.RECEIPT, RecordKind.MESSAGE] * 3
    assert [name.microbatch for name in s.host.keys] == [0, 0, 1, 1, 2, 2]
    assert [float(host[0]) for _, _, host in s.host.got] == [1, 10, 2, 11, 3, 12]


def test_the_pool_is_bounded_and_the_rest_waits_for_the_next_bubble() -> None:
    s = Setup(pool_bytes=32)  # two messages
    for microbatch in range(3):
        s.copier.keep(RecordKind.MESSAGE, key(0, microbatch), torch.full((4,), float(microbatch)))
    s.copier.bubble_begins()
    s.device.advance(5)
    s.copier.bubble_ends()
    assert [name.microbatch for name in s.host.keys] == [0, 1]
    s.copier.bubble_begins()
    s.device.advance(5)
    s.copier.bubble_ends()
    assert len(s.host.got) == 2  # nothing was written in between
    s.host.write_all()
    s.copier.bubble_begins()
    s.device.advance(5)
    s.copier.bubble_ends()
    assert [name.microbatch for name in s.host.keys] == [0, 1, 2]
    assert s.device.buffers == [16, 16]  # used again
    assert s.stats.end_iteration().pool_high_water_bytes == 32


def test_at_the_end_of_an_iteration_a_full_pool_holds_training_back() -> None:
    s = Setup(pool_bytes=16)
    for microbatch in range(2):
        s.copier.keep(RecordKind.MESSAGE, key(0, microbatch), torch.full((4,), float(microbatch)))
    s.copier.bubble_begins()
    s.device.advance(1)
    s.copier.bubble_ends()
    (written,) = s.host.unwritten
    began, entered = threading.Event(), threading.Event()

    def clock() -> float:  # read first when the wait begins
        now = s.device.now
        began.set()
        return now

    def train() -> None:
        s.copier.end_iteration()
        entered.set()

    s.copier._clock = clock
    training = threading.Thread(target=train)
    training.start()
    assert began.wait(60)
    assert not entered.is_set()
    s.device.advance(3)
    written()
    training.join(60)
    assert entered.is_set()
    s.device.advance(1)
    s.copier.collect()
    assert len(s.host.got) == 2
    assert s.stats.end_iteration().held_back_s == 3.0


def test_the_wait_for_a_full_pool_has_a_deadline() -> None:
    s = Setup(pool_bytes=16, timeout_s=0.0)
    for microbatch in range(2):
        s.copier.keep(RecordKind.MESSAGE, key(0, microbatch), torch.ones(4))
    s.copier.bubble_begins()
    s.device.advance(1)
    with pytest.raises(LogTimeoutError, match="16 bytes of page-locked memory"):
        s.copier.end_iteration()


def test_a_message_larger_than_the_pool_is_copied_alone() -> None:
    s = Setup(pool_bytes=8)
    for microbatch in range(2):
        s.copier.keep(RecordKind.MESSAGE, key(0, microbatch), torch.full((100,), float(microbatch)))
        s.copier.bubble_begins()
        s.device.advance(1)
        s.copier.bubble_ends()
        s.host.write_all()
    assert [float(host[0]) for _, _, host in s.host.got] == [0.0, 1.0]


def test_a_buffer_is_not_overwritten_before_it_is_copied() -> None:
    """Receive buffers are used again in the next iteration; the device, not the host, waits for the copy."""
    s = Setup()
    buffer = torch.full((4,), 1.0)
    s.copier.keep(RecordKind.RECEIPT, key(0), buffer)
    s.copier.end_iteration()  # the copy is on its way
    s.copier.before_overwriting(buffer)
    s.device.compute.give(do=lambda: buffer.data.fill_(2.0))  # the next receive
    s.device.advance(5)
    s.copier.collect()
    assert torch.equal(s.host.got[0][2], torch.full((4,), 1.0))
    assert float(buffer[0]) == 2.0


def test_a_buffer_that_is_used_again_at_once_is_copied_first() -> None:
    s = Setup()
    buffer = torch.full((4,), 1.0)
    s.copier.keep(RecordKind.RECEIPT, key(0), buffer)
    s.copier.before_overwriting(buffer)
    s.device.compute.give(do=lambda: buffer.data.fill_(2.0))
    s.device.advance(5)
    s.copier.collect()
    assert torch.equal(s.host.got[0][2], torch.full((4,), 1.0))


def test_a_buffer_may_change_once_the_device_waits_for_its_copy() -> None:
    """As in a replay, which fills receive buffers from the host."""
    s = Setup()
    buffer = torch.full((4,), 1.0)
    s.copier.keep(RecordKind.RECEIPT, key(0), buffer)
    s.copier.end_iteration()
    s.copier.before_overwriting(buffer)
    buffer.add_(0)  # counted as a change; the bytes stay, since this device's memory is the host's
    s.device.advance(5)
    s.copier.collect()
    assert s.host.keys == [key(0)]


def test_a_change_before_that_is_still_an_error() -> None:
    s = Setup()
    buffer = torch.full((4,), 1.0)
    s.copier.keep(RecordKind.RECEIPT, key(0), buffer)
    s.copier.end_iteration()
    buffer.add_(1)
    with pytest.raises(UsageError, match="changed in place"):
        s.copier.before_overwriting(buffer)


def test_an_interrupted_wait_is_no_bubble() -> None:
    s = Setup()
    s.copier.bubble_begins()
    s.copier.interrupted()
    s.device.advance(60)  # a recovery
    s.copier.bubble_ends()
    s.copier.bubble_begins()
    s.device.advance(1)
    s.copier.bubble_ends()
    s.copier.collect()
    assert s.stats.end_iteration().bubble_s == 1.0


def test_the_writer_is_woken_before_the_copier_waits_for_room() -> None:
    """The writer sleeps until a bubble or until half of the memory is used. A large message may need more."""
    s = Setup(pool_bytes=1024)
    woken = []

    def wake() -> None:
        woken.append(len(s.host.unwritten))
        s.host.write_all()

    s.copier._on_full = wake
    s.copier.keep(RecordKind.MESSAGE, key(0, 0), torch.ones(100))
    s.copier.bubble_begins()
    s.device.advance(1)
    s.copier.bubble_ends()
    s.copier.keep(RecordKind.MESSAGE, key(0, 1), torch.ones(200))
    s.copier.end_iteration()
    assert woken == [1]


@pytest.mark.parametrize("when", ["before the copy", "during the copy"])
def test_a_tensor_that_is_changed_is_an_error(when: str) -> None:
    s = Setup()
    tensor = torch.ones(4)
    s.copier.keep(RecordKind.MESSAGE, key(3), tensor)
    if when == "before the copy":
        tensor.add_(1)
        with pytest.raises(UsageError, match=r"iteration 3.*changed in place"):
            s.copier.bubble_begins()
        return
    s.copier.bubble_begins()
    tensor.add_(1)
    s.device.advance(1)
    with pytest.raises(UsageError, match=r"iteration 3.*changed in place"):
        s.copier.bubble_ends()


@contextlib.contextmanager
def passing_time(device: FakeDevice) -> Iterator[None]:
    """Time passes while the training thread waits."""
    over = threading.Event()

    def pass_on() -> None:
        while not over.wait(0.001):
            device.advance(0.25)

    thread = threading.Thread(target=pass_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


def test_drain_waits_for_pending_messages_and_for_copies() -> None:
    s = Setup()
    s.copier.keep(RecordKind.MESSAGE, key(0, 0), torch.ones(4))
    s.copier.bubble_begins()
    s.copier.keep(RecordKind.MESSAGE, key(0, 1), torch.ones(4))
    with passing_time(s.device):
        s.copier.drain(1000)
    assert [name.microbatch for name in s.host.keys] == [0, 1]


def test_drain_has_a_deadline() -> None:
    s = Setup()
    s.copier.keep(RecordKind.MESSAGE, key(), torch.ones(4))
    s.device.compute.give(1e9)  # a device that hangs
    with passing_time(s.device), pytest.raises(LogTimeoutError, match="did not end in time"):
        s.copier.drain(1.0)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    s = Setup()
    tensor = torch.randint(0, 2, shape).to(dtype)
    s.copier.keep(RecordKind.MESSAGE, key(), tensor)
    s.copier.end_iteration()
    s.device.advance(1)
    s.copier.collect()
    (_, _, host) = s.host.got[0]
    assert (host.dtype, host.shape) == (tensor.dtype, tensor.shape)
    assert (
        torch.equal(host.view(torch.uint8), tensor.view(torch.uint8))
        if shape
        else host.item() == tensor.item()
    )


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["keep", "begin", "end", "iteration", "time", "written"]), max_size=60))
def test_any_order_of_events_loses_nothing(events: list[str]) -> None:
    """All messages arrive once, in order, with the bytes that were sent."""
    s = Setup(pool_bytes=48, copy_s=0.5)
    kept = 0
    for event in [*events, "flush"]:
        if event == "keep":
            s.copier.keep(RecordKind.MESSAGE, key(0, kept), torch.full((4,), float(kept)))
            kept += 1
        elif event == "begin":
            s.copier.bubble_begins()
        elif event == "end":
            s.copier.bubble_ends()
        elif event == "time":
            s.device.advance(0.7)
        elif event == "written":
            s.host.write_all()
        else:
            while s.copier._pending:  # as a writer that keeps up: else the end of an iteration would wait
                s.copier._start(None)
                s.device.advance(10)
                s.copier.collect()
                s.host.write_all()
            if event == "iteration":
                s.copier.end_iteration()
        assert s.copier._pool.used_bytes <= 48
    s.device.advance(100)
    s.copier.drain(1)
    assert [name.microbatch for name in s.host.keys] == list(range(kept))
    assert all(float(host[0]) == index for index, (_, _, host) in enumerate(s.host.got))
    s.host.write_all()
    assert s.copier._pool.used_bytes == 0


def test_buffers_of_other_sizes_make_room() -> None:
    pool = BufferPool(100, lambda size: torch.empty(size, dtype=torch.uint8))
    small = [pool.take(30) for _ in range(3)]
    assert all(small)
    assert pool.take(30) is None
    for buffer in small:
        assert buffer is not None
        buffer.release()
    large = pool.take(60)
    assert large is not None
    assert large.memory.nbytes == 60
    assert pool.used_bytes == 64
    assert sum(tensor.nbytes for shelf in pool._free.values() for tensor in shelf) <= 36


def test_a_release_ends_a_wait_for_room() -> None:
    pool = BufferPool(10, lambda size: torch.empty(size, dtype=torch.uint8))
    buffer = pool.take(10)
    assert buffer is not None
    assert not pool.wait_for_room(10, 0.0)
    threading.Thread(target=buffer.release).start()
    assert pool.wait_for_room(10, 60.0)


def test_a_complete_iteration_is_delivered_whatever_becomes_of_the_next_one() -> None:
    s = Setup()
    s.copier.keep(RecordKind.MESSAGE, key(0), torch.ones(4))
    s.copier.end_iteration()  # its copy has begun
    s.copier.keep(RecordKind.MESSAGE, key(1), torch.ones(4))
    s.copier.bubble_begins()
    s.aborted = True
    s.device.advance(10)
    s.copier.interrupted()
    s.copier.drain(1.0)
    assert s.host.keys == [key(0)]
    s.host.write_all()
    assert s.copier._pool.used_bytes == 0  # of what is not delivered, too


def test_a_buffer_that_is_used_again_completes_no_iteration() -> None:
    s = Setup()
    buffer = torch.ones(4)
    s.copier.keep(RecordKind.RECEIPT, key(1), buffer)
    s.copier.before_overwriting(buffer)
    s.aborted = True
    s.device.advance(10)
    s.copier.collect()
    assert s.host.keys == []


def test_a_copy_that_was_seen_to_be_over_before_an_abort_is_delivered() -> None:
    s = Setup()
    s.copier.keep(RecordKind.MESSAGE, key(1), torch.ones(4))
    s.copier.bubble_begins()
    s.device.advance(10)
    s.copier.bubble_ends()
    s.aborted = True
    s.copier.interrupted()
    assert s.host.keys == [key(1)]
