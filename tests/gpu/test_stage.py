"""A real pipeline stage on a GPU, under a real schedule, logs its messages and is replayed (§5.1).

One GPU cannot hold two workers that send CUDA tensors to each other: NCCL needs a GPU for each, and gloo
sends from host memory alone. So the middle one of three stages runs here, on torch's "fake" backend, which
transfers nothing; a link of ours fills its receive buffers when messages would arrive. The hook, the
schedule, the streams, the log and the replay are the real ones.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_ft.logging import (
    Direction,
    LogBudget,
    LogOptions,
    LogReader,
    LogStats,
    LogWriter,
    MessageKey,
    MessageLog,
    SegmentIdentity,
    checksum_of,
)
from swift_ft.logging.format.record import dtype_name
from swift_ft.runtime.pipeline.log_interceptor import LogInterceptor
from swift_ft.storage.store import Store
from swift_ft.torch_adapters.pipelining.hook import PipelineHook
from swift_ft.torch_adapters.pipelining.interceptor import Message
from tests.support.gpu import DEVICE, Link

BEFORE, HERE, AFTER = range(3)  # stages, and the ranks that hold them
MICROBATCHES, ITERATIONS = 4, 3
SHAPE = (64, 512)
MESSAGE_BYTES = 64 * 512 * 4
META = {"shape": list(SHAPE), "stride": [SHAPE[1], 1], "dtype": "float32", "requires_grad": True}
GRADIENT = {**META, "requires_grad": False}
METADATA = {
    HERE: {"inputs": [META], "outputs": [META], "input_grads": [GRADIENT], "output_grads": [GRADIENT]}
}


@pytest.fixture
def _three_workers() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=HERE, world_size=3)
    yield
    dist.destroy_process_group()


pytestmark = [
    pytest.mark.usefixtures("_three_workers"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # in the thread of the first backward
]


def incoming() -> dict[MessageKey, torch.Tensor]:
    """What both neighbours send, on the host."""
    generator = torch.Generator().manual_seed(1)
    routes = [(Direction.FORWARD, BEFORE), (Direction.BACKWARD, AFTER)]
    return {
        MessageKey(iteration, microbatch, direction, source, HERE, 0): torch.randn(SHAPE, generator=generator)
        for iteration in range(ITERATIONS)
        for microbatch in range(MICROBATCHES)
        for direction, source in routes
    }


class Live(LogInterceptor):
    """Live, with neighbours that are not there: their messages are put into the buffers after a while."""

    def __init__(self, log: MessageLog, delay_ms: float) -> None:
        super().__init__(HERE, 1, range(3), 0, log)
        self._delay_ms = delay_ms
        self._given = {name: tensor.to(DEVICE) for name, tensor in incoming().items()}
        self._link = Link()
        self._arrivals: dict[MessageKey, torch.cuda.Event] = {}

    def on_recv(self, message: Message) -> bool:
        live = super().on_recv(message)
        buffer = message.tensor.data  # autograd does not see a receive
        self._arrivals[message.key] = self._link.receive(
            self._delay_ms, lambda: buffer.copy_(self._given[message.key])
        )
        return live

    def on_received(self, message: Message) -> None:
        self._link.wait(self._arrivals.pop(message.key))
        super().on_received(message)


class Recorded(Live):
    """Copies every message at once, and waits for that: what the log must hold."""

    def __init__(self) -> None:
        super().__init__(MessageLog(LogOptions(), LogStats()), 0)
        self.messages: dict[MessageKey, torch.Tensor] = {}
        self.got: dict[MessageKey, int] = {}

    def on_send(self, message: Message) -> bool:
        self.messages[message.key] = message.tensor.detach().cpu()
        return True

    def on_received(self, message: Message) -> None:
        super().on_received(message)
        self.got[message.key] = checksum_of(message.tensor)

    def _crosses(self, message: Message) -> bool:
        return False


def stage_module() -> nn.Module:
    """Dropout, so that a replay must draw what the original drew, on the GPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Dropout(0.2), nn.Linear(1024, 512))
    return layers.to(DEVICE)


def train(traffic: LogInterceptor, schedule: str) -> dict[str, torch.Tensor]:
    """All iterations of the middle stage; its weights afterwards."""
    module = stage_module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    stage = PipelineStage(module, HERE, 3, DEVICE)
    stages = [stage] if schedule.startswith("Interleaved") else stage
    pipeline: Any = get_schedule_class(schedule)(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    hook = PipelineHook(pipeline, traffic, lambda _: None)
    hook.shapes.adopt(METADATA)
    for iteration in range(ITERATIONS):
        traffic.iteration = iteration
        hook.begin()
        pipeline.step(return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        traffic.log.end_iteration()
    traffic.log.drain(60)
    torch.cuda.synchronize(DEVICE)
    return {name: tensor.cpu() for name, tensor in module.state_dict().items()}


@dataclass
class Logs:
    """The logs of the three workers in one store."""

    store: Store
    budget_bytes: int = 64 << 20
    stats: LogStats = field(default_factory=LogStats)

    def writer(self, rank: int, generation: int = 0, stats: LogStats | None = None) -> LogWriter:
        identity = SegmentIdentity("run", rank, generation)
        return LogWriter(self.store, f"log-{rank}", identity, self._options(), stats=stats)

    def opened(self, generation: int) -> MessageLog:
        """A message log of the stage here, with a writer."""
        self.stats = LogStats()
        log = MessageLog(self._options(), self.stats)
        log.writer = self.writer(HERE, generation, self.stats)
        return log

    def read(self, *ranks: int, since: int = 0) -> LogReader:
        reader = LogReader(
            self.store, [f"log-{rank}" for rank in ranks], run_id="run", since_generation=since
        )
        reader.refresh()
        return reader

    def write_neighbours(self, reference: Recorded) -> None:
        """What they sent, and receipts of what they got."""
        for rank in (BEFORE, AFTER):
            writer = self.writer(rank)
            for name, tensor in incoming().items():
                if name.source_stage == rank:
                    writer.append_message(name, tensor)
            for name, tensor in reference.messages.items():
                if name.destination_stage == rank:
                    receipt = checksum_of(tensor), dtype_name(tensor.dtype), tuple(tensor.shape)
                    writer.append_receipt(name, *receipt)
            writer.close(60)

    def _options(self) -> LogOptions:
        return LogOptions(LogBudget(self.budget_bytes))


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(Store(f"file://{tmp_path}/store"))


def assert_log_holds(reader: LogReader, reference: Recorded) -> None:
    """Messages and receipts are those of a run that copied each at once."""
    assert len(reference.messages) == len(reference.got) == ITERATIONS * MICROBATCHES * 2
    for name, tensor in reference.messages.items():
        read = reader.read(name)
        assert (read.dtype, read.shape) == (torch.float32, SHAPE)
        assert checksum_of(read) == checksum_of(tensor), name
    for name, checksum in reference.got.items():
        assert reader.receipt(name) == checksum, name


def assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    different = [name for name in expected if not torch.equal(weights[name], expected[name])]
    assert not different


def close(log: MessageLog) -> None:
    log.end_iteration()  # accounts for what is known now
    assert log.writer is not None
    log.writer.close(60)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
@pytest.mark.parametrize("delay_ms", [0.0, 5.0])
@pytest.mark.parametrize("messages_in_pool", [2, 1000])
def test_messages_are_logged_as_they_were(
    schedule: str, delay_ms: float, messages_in_pool: int, logs: Logs
) -> None:
    reference = Recorded()
    expected = train(reference, schedule)

    logs.budget_bytes = messages_in_pool * MESSAGE_BYTES
    log = logs.opened(0)
    assert_same(train(Live(log, delay_ms), schedule), expected)
    close(log)
    stats = logs.stats.total
    assert_log_holds(logs.read(HERE), reference)
    assert stats.messages == len(reference.messages)
    assert stats.bytes == len(reference.messages) * MESSAGE_BYTES
    assert stats.pool_high_water_bytes <= logs.budget_bytes
    assert stats.bubble_s >= ITERATIONS * MICROBATCHES * delay_ms / 1000 / 2
    assert stats.copied_outside_s > 0.0  # at the end of each iteration
    if delay_ms:  # `test_copies.py` checks the shares: here the host's own pauses count, too
        assert stats.copied_in_bubbles_s > 0.0


def test_device_memory_is_released(logs: Logs) -> None:
    """Nothing of an iteration is left on the GPU in a log that is drained."""
    kept, allocated = [], []
    for generation in range(2):  # the first one pays for cuBLAS's workspace
        log = logs.opened(generation)
        train(Live(log, 1.0), "1F1B")
        close(log)
        kept.append(log)
        gc.collect()  # schedule, stage and hook refer to each other
        allocated.append(torch.cuda.memory_allocated(DEVICE))
    assert allocated[0] == allocated[1]


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
def test_a_replay_gives_the_same_weights_and_the_same_log(schedule: str, logs: Logs) -> None:
    """Receives go into buffers whose receipts are still being copied; sends are checked against the log."""
    reference = Recorded()
    expected = train(reference, schedule)
    logs.write_neighbours(reference)

    log = logs.opened(1)
    replay = LogInterceptor(HERE, 1, range(3), 0, log, source=logs.read(BEFORE, AFTER))
    assert_same(train(replay, schedule), expected)
    close(log)
    assert_log_holds(logs.read(HERE, since=1), reference)
