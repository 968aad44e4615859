"""Messages of a GPU reach the host in bubbles (§5.1, §6 of the paper), on the GPU's own streams."""

from __future__ import annotations

import pytest
import torch

from swift_ft.errors import UsageError
from swift_ft.logging.format.record import RecordKind
from swift_ft.logging.writing.uploader import LogTimeoutError
from swift_ft.torch_core.tensors import tensor_bytes
from tests.support.gpu import DEVICE, MIB, Link, Setup, compute_for, key

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool),
]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and tensor_bytes(a) == tensor_bytes(b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (33, 257)])
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    s = Setup()
    tensor = torch.randint(0, 2, shape, device=DEVICE).to(dtype)
    s.copier.keep(RecordKind.MESSAGE, key(), tensor)
    s.copier.bubble_begins()
    s.copier.bubble_ends()
    s.settle()
    assert s.host.keys == [key()]
    assert same_bytes(s.host.tensors[0], tensor.cpu())


def test_messages_that_are_not_contiguous() -> None:
    s = Setup()
    whole = torch.randn(64, 48, device=DEVICE)
    messages = [whole.t(), whole[::2, 1:], whole[:1].expand(5, -1), whole.view(8, 8, 48).permute(2, 0, 1)]
    for microbatch, tensor in enumerate(messages):
        s.copier.keep(RecordKind.MESSAGE, key(microbatch), tensor)
    s.copier.end_iteration()
    s.settle()
    assert s.host.keys == [key(microbatch) for microbatch in range(len(messages))]
    for host, tensor in zip(s.host.tensors, messages, strict=True):
        assert host.is_contiguous()
        assert same_bytes(host, tensor.cpu().contiguous())


def test_buffers_are_page_locked() -> None:
    """Otherwise a copy blocks the host, and nothing runs beside it."""
    s = Setup()
    s.copier.keep(RecordKind.MESSAGE, key(), torch.ones(1000, device=DEVICE))
    s.copier.end_iteration()
    s.settle()
    assert len(s.host.got) == 1
    assert s.host.all_page_locked


def test_the_host_does_not_wait_for_the_device() -> None:
    s = Setup()
    s.warm_up(MIB)
    compute_for(300)
    compute_done = torch.cuda.Event()
    s.copier.keep(RecordKind.MESSAGE, key(), torch.ones(MIB, dtype=torch.uint8, device=DEVICE))
    compute_done.record()
    s.copier.bubble_begins()
    s.copier.bubble_ends()
    s.copier.end_iteration()
    assert not compute_done.query()
    assert not s.host.got  # the copy follows the computation
    s.settle()
    assert s.host.keys == [key()]


def test_a_message_in_the_midst_of_long_computations() -> None:
    """It has the value that it was sent with, and its memory is not used again before it is copied."""
    s = Setup()
    weights = [torch.randn(1024, 1024, device=DEVICE) / 32 for _ in range(8)]
    first = torch.randn(1024, 1024, device=DEVICE)

    def layers(value: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            value = torch.relu(value @ weight) - 0.5 * value
        return value

    expected = []
    value = first
    for _ in range(6):
        value = layers(value)
        expected.append(value.cpu())

    s.warm_up(*[first.nbytes] * 6)
    compute_for(50)  # the host runs ahead
    value = first
    for microbatch in range(6):
        value = layers(value)
        s.copier.keep(RecordKind.MESSAGE, key(microbatch), value)
        if microbatch % 2:
            s.copier.bubble_begins()
            s.copier.bubble_ends()
    del value
    for _ in range(12):  # they would get memory that was released too early
        torch.full_like(first, float("nan"))
    s.copier.end_iteration()
    s.settle()
    assert s.host.keys == [key(microbatch) for microbatch in range(6)]
    for host, tensor in zip(s.host.tensors, expected, strict=True):
        assert same_bytes(host, tensor)


def test_the_pool_is_bounded_and_its_buffers_are_used_again() -> None:
    s = Setup(pool_bytes=2 * MIB)
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    for microbatch in range(5):
        s.copier.keep(
            RecordKind.MESSAGE,
            key(microbatch),
            torch.full((MIB,), microbatch, dtype=torch.uint8, device=DEVICE),
        )
    for written in (2, 4, 5):
        s.copier.bubble_begins()
        s.copier.bubble_ends()
        s.settle()
        assert len(s.host.got) == written
        s.host.write_all()
    assert [int(host[0]) for host in s.host.tensors] == [0, 1, 2, 3, 4]
    assert s.stats.end_iteration().pool_high_water_bytes == 2 * MIB
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] - before <= 2 * MIB


def test_a_full_pool_holds_training_back_at_the_end_of_an_iteration() -> None:
    s = Setup(pool_bytes=MIB, timeout_s=0.2)
    for microbatch in range(2):
        s.copier.keep(RecordKind.MESSAGE, key(microbatch), torch.zeros(MIB, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(LogTimeoutError, match="page-locked"):
        s.copier.end_iteration()
    s.host.write_all()
    s.copier.end_iteration()
    s.settle()
    assert s.host.keys == [key(0), key(1)]


def test_the_devices_tensor_is_released_when_it_is_copied() -> None:
    """Not only when the bubble ends."""
    s = Setup()
    s.warm_up(64 * MIB)
    before = torch.cuda.memory_allocated(DEVICE)
    s.copier.keep(RecordKind.MESSAGE, key(), torch.ones(64 * MIB, dtype=torch.uint8, device=DEVICE))
    s.copier.bubble_begins()
    assert torch.cuda.memory_allocated(DEVICE) == before + 64 * MIB
    s.settle()
    assert s.host.keys == [key()]
    assert torch.cuda.memory_allocated(DEVICE) == before


@pytest.mark.parametrize("state", ["pending", "copying"])
def test_a_buffer_that_is_received_into_again(state: str) -> None:
    """The device waits until its old content is copied; the host does not."""
    s = Setup()
    s.warm_up(256 * MIB)
    buffer = torch.full((256 * MIB,), 1, dtype=torch.uint8, device=DEVICE)
    compute_for(50)
    s.copier.keep(RecordKind.RECEIPT, key(), buffer)
    if state == "copying":
        s.copier.end_iteration()
    s.copier.before_overwriting(buffer)
    # As a receive does: behind autograd's back. It takes a fraction of what the copy takes.
    Link.wait(Link().receive(0, lambda: buffer.data.fill_(2)))
    s.settle()
    assert bool((s.host.tensors[0] == 1).all())
    assert bool((buffer == 2).all())


@pytest.mark.parametrize("when", ["before the copy", "during the copy"])
def test_a_tensor_that_is_changed_is_an_error(when: str) -> None:
    s = Setup()
    tensor = torch.ones(MIB, device=DEVICE)
    s.copier.keep(RecordKind.MESSAGE, key(iteration=3), tensor)
    if when == "before the copy":
        tensor.add_(1)
        with pytest.raises(UsageError, match=r"iteration 3.*changed in place"):
            s.copier.bubble_begins()
        return
    compute_for(50)
    s.copier.bubble_begins()
    tensor.add_(1)
    torch.cuda.synchronize(DEVICE)
    with pytest.raises(UsageError, match=r"iteration 3.*changed in place"):
        s.copier.bubble_ends()


def test_draining_waits_for_the_device_and_has_a_deadline() -> None:
    s = Setup()
    s.warm_up(MIB, MIB)
    s.copier.keep(RecordKind.MESSAGE, key(0), torch.zeros(MIB, dtype=torch.uint8, device=DEVICE))
    compute_for(1000)
    s.copier.bubble_begins()
    s.copier.keep(RecordKind.MESSAGE, key(1), torch.zeros(MIB, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(LogTimeoutError, match="did not end in time"):
        s.copier.drain(0.1)
    s.copier.drain(60)
    assert s.host.keys == [key(0), key(1)]


# ------------------------------------------------------------------------------------------- the account


def test_copies_in_a_bubble() -> None:
    s = Setup()
    s.warm_up(64 * MIB)
    compute_for(50)  # the host is ahead: bubbles are the device's, not the host's
    s.copier.keep(RecordKind.MESSAGE, key(), torch.ones(64 * MIB, dtype=torch.uint8, device=DEVICE))
    arrival = Link().receive(200)
    s.copier.bubble_begins()
    Link.wait(arrival)
    s.copier.bubble_ends()
    compute_for(20)
    s.settle()
    stats = s.stats.end_iteration()
    assert 0.1 < stats.bubble_s < 0.4  # the clock of a GPU changes under load
    assert 0.0001 < stats.copied_in_bubbles_s < stats.bubble_s
    assert stats.copied_outside_s == 0.0
    assert stats.pool_high_water_bytes == 64 * MIB


def test_copies_at_the_end_of_an_iteration() -> None:
    s = Setup()
    s.warm_up(64 * MIB)
    compute_for(50)
    s.copier.keep(RecordKind.MESSAGE, key(), torch.ones(64 * MIB, dtype=torch.uint8, device=DEVICE))
    s.copier.end_iteration()
    compute_for(20)
    s.settle()
    stats = s.stats.end_iteration()
    assert (stats.bubble_s, stats.copied_in_bubbles_s) == (0.0, 0.0)
    assert stats.copied_outside_s > 0.0001


def test_a_copy_that_outlasts_its_bubble() -> None:
    s = Setup()
    s.warm_up(512 * MIB)
    compute_for(50)
    s.copier.keep(RecordKind.MESSAGE, key(), torch.ones(512 * MIB, dtype=torch.uint8, device=DEVICE))
    arrival = Link().receive(0.5)
    s.copier.bubble_begins()
    Link.wait(arrival)
    s.copier.bubble_ends()
    compute_for(100)
    s.settle()
    stats = s.stats.end_iteration()
    assert 0.0 < stats.copied_in_bubbles_s <= stats.bubble_s
    assert stats.copied_outside_s > stats.copied_in_bubbles_s


def test_a_bubble_that_copies_nothing() -> None:
    s = Setup()
    compute_for(50)
    arrival = Link().receive(100)
    s.copier.bubble_begins()
    Link.wait(arrival)
    s.copier.bubble_ends()
    s.settle()
    stats = s.stats.end_iteration()
    assert 0.05 < stats.bubble_s < 0.2
    assert (stats.copied_in_bubbles_s, stats.copied_outside_s) == (0.0, 0.0)
