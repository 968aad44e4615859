"""A log that an earlier version wrote is read as it was written, and today's code writes the same bytes.

``data/log`` was written by the code of commit a872519, before its modules moved: one segment with plain
payloads, one with packed ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swift_ft.logging import Direction, LogReader, MessageKey, SegmentIdentity
from swift_ft.logging.format.segment import open_segment
from swift_ft.storage.store import Store
from tests.support.log import write_segment
from tests.unit.logging.format.test_record import bits

DATA = Path(__file__).parents[1] / "data"
RUN = "a run of version 0.1.0"
LOG = "log/rank-00001"
PLAIN, PACKED = (
    f"{LOG}/g00002-s000000-i00000007-00000008.arrow",
    f"{LOG}/g00002-s000001-i00000009-00000009.arrow",
)


def sent(iteration: int, microbatch: int, slot: int = 0) -> MessageKey:
    return MessageKey(iteration, microbatch, Direction.FORWARD, 1, 2, slot)


MESSAGES = {
    sent(7, 0): torch.linspace(-1, 1, 60).reshape(4, 15),
    sent(7, 1, slot=1): torch.arange(50).to(torch.bfloat16),
    sent(8, 0): torch.tensor(7),
    sent(8, 1): torch.tensor([[True, False]]),
    sent(9, 0): torch.linspace(0, 1, 800).reshape(20, 40),
    sent(9, 1): torch.zeros(0, 3, dtype=torch.float16),
}


def test_a_stored_log_is_read() -> None:
    reader = LogReader(Store(DATA), [LOG], run_id=RUN)
    reader.refresh()
    for key, tensor in MESSAGES.items():
        buffer = torch.zeros_like(tensor)
        reader.read_into(key, buffer)
        assert bits(buffer) == bits(tensor)
        received = MessageKey(key.iteration, key.microbatch, Direction.FORWARD, 0, 1, key.slot)
        assert reader.receipt(received) == 1000 * key.iteration + key.microbatch
    assert [key for iteration in (7, 8, 9) for key in reader.keys(iteration)] == list(MESSAGES)


def test_the_stored_log_has_plain_and_packed_payloads() -> None:
    _, records = open_segment(Store(DATA), PACKED, RUN)
    assert {record.codec for record in records if record.payload} == {"zstd-planes"}
    _, records = open_segment(Store(DATA), PLAIN, RUN)
    assert {record.codec for record in records} == {""}


@pytest.mark.parametrize(("path", "sequence"), [(PLAIN, 0), (PACKED, 1)])
def test_the_same_records_are_written_as_the_same_bytes(path: str, sequence: int, local: Store) -> None:
    identity, records = open_segment(Store(DATA), path, RUN)
    assert identity == SegmentIdentity(RUN, 1, 2)
    assert write_segment(local, records, identity, sequence, LOG) == path
    assert bytes(local.open_read(path).read()) == (DATA / path).read_bytes()
