"""A job's journal is kept alike in the embedded store and in etcd."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.lib.etcd import EtcdCluster
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.block_log import BlockGoneError, BlockLog, block_log_in
from swift_ft.coordination.store_client import connect
from tests.support.store_processes import store_process

_LONG_S = 60.0
_WRITERS = 4
_BLOCKS = 12


class OfLog:
    """What each does. A class that derives from it has a fixture ``open_log``: clients of an empty log."""

    @pytest.fixture
    def log(self, open_log: Callable[[], BlockLog]) -> BlockLog:
        """An empty log."""
        return open_log()

    # ---------------------------------------------------------------------------------------------- blocks

    def test_a_new_log_is_empty(self, log: BlockLog) -> None:
        assert log.first() == 0
        assert log.read(0, 0.0) is None
        assert log.read(0, 0.2) is None
        assert log.snapshot() is None

    def test_blocks_are_read_in_the_order_of_their_numbers(
        self, log: BlockLog, open_log: Callable[[], BlockLog]
    ) -> None:
        for number in range(5):
            log.append(f"text {number}", f"name.{number}")
        for reader in (log, open_log()):
            assert [_text(reader.read(number, 0.0)) for number in range(5)] == [f"text {n}" for n in range(5)]
            assert reader.read(5, 0.0) is None
        assert _text(open_log().read(3, _LONG_S)) == "text 3"  # from anywhere

    def test_an_earlier_block_is_read_again(self, log: BlockLog) -> None:
        for number in range(4):
            log.append(f"text {number}", f"name.{number}")
        assert _text(log.read(3, 0.0)) == "text 3"
        assert _text(log.read(1, 0.0)) == "text 1"
        assert _text(log.read(2, _LONG_S)) == "text 2"

    def test_all_read_the_same_order(self, open_log: Callable[[], BlockLog]) -> None:
        """Of many who write at once. Nothing is lost."""
        readers = [open_log() for _ in range(3)]

        def write(writer: int) -> None:
            log = open_log()
            for number in range(_BLOCKS):
                log.append(f"{writer}:{number}", f"{writer}.{number}")

        def read(reader: BlockLog) -> list[str]:
            return [_text(reader.read(number, _LONG_S)) for number in range(_WRITERS * _BLOCKS)]

        with ThreadPoolExecutor(_WRITERS + len(readers)) as pool:
            reading = [pool.submit(read, reader) for reader in readers]
            list(pool.map(write, range(_WRITERS)))
            orders = [future.result(_LONG_S) for future in reading]
        assert orders[0] == orders[1] == orders[2]
        for writer in range(_WRITERS):
            own = [text for text in orders[0] if text.startswith(f"{writer}:")]
            assert own == [f"{writer}:{number}" for number in range(_BLOCKS)]

    def test_a_repeated_append_loses_and_reorders_nothing(self, log: BlockLog) -> None:
        """It may be there twice: readers know what they have read."""
        for name in ("a", "a", "b", "a", "c"):
            log.append(f"text {name}", name)
        found, number = [], 0
        while (block := log.read(number, 0.0)) is not None:
            found.append(_text(block))
            number += 1
        first_seen = list(dict.fromkeys(found))
        assert first_seen == ["text a", "text b", "text c"]

    def test_a_large_block_is_kept_whole(self, log: BlockLog) -> None:
        text = "0123456789abcdef" * (512 << 6)  # 512 KiB
        log.append(text, "large")
        assert _text(log.read(0, _LONG_S)) == text

    # ----------------------------------------------------------------------------------------------- waiting

    def test_reading_waits_for_a_block(self, log: BlockLog, open_log: Callable[[], BlockLog]) -> None:
        writer = open_log()
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(writer.append, "text", "name")
            assert _text(log.read(0, _LONG_S)) == "text"
            writing.result(_LONG_S)

    def test_a_wait_ends_at_its_deadline(self, log: BlockLog) -> None:
        began = time.monotonic()
        assert log.read(0, 0.3) is None
        assert time.monotonic() - began >= 0.29  # torch's store counts whole milliseconds, rounded down
        log.append("text", "name")
        assert _text(log.read(0, _LONG_S)) == "text"

    def test_one_waits_while_another_writes(self, log: BlockLog) -> None:
        """Through the same client."""
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(log.read, 1, _LONG_S)
            log.append("one", "1")
            log.append("two", "2")
            assert _text(waiting.result(_LONG_S)) == "two"

    # --------------------------------------------------------------------------------- what is deleted

    def test_a_deleted_block_is_gone(self, log: BlockLog, open_log: Callable[[], BlockLog]) -> None:
        for number in range(6):
            log.append(f"text {number}", f"name.{number}")
        log.put_snapshot("snapshot 4", 4)
        log.delete_before(4)
        log.delete_before(4)
        log.delete_before(2)  # it stays what it is
        for reader in (log, open_log()):
            assert reader.first() == 4
            assert [_text(reader.read(number, 0.0)) for number in (4, 5)] == ["text 4", "text 5"]
        for number in range(4):
            with pytest.raises(BlockGoneError):
                open_log().read(number, 0.0)
        log.append("text 6", "name.6")
        assert _text(open_log().read(6, _LONG_S)) == "text 6"

    def test_who_is_late_learns_that_a_block_is_gone(
        self, log: BlockLog, open_log: Callable[[], BlockLog]
    ) -> None:
        """It was frozen, say, while others went on. Then it reads on from the snapshot."""
        late = open_log()
        log.append("text 0", "name.0")
        assert _text(late.read(0, _LONG_S)) == "text 0"
        for number in range(1, 9):
            log.append(f"text {number}", f"name.{number}")
        log.put_snapshot("snapshot", 7)
        log.delete_before(7)
        outcome = self._read_or_gone(late, 1)
        assert outcome in ("text 1", "gone")  # it may have come before it was deleted
        assert _text(late.read(7, _LONG_S)) == "text 7"

    def test_all_may_be_deleted(self, log: BlockLog, open_log: Callable[[], BlockLog]) -> None:
        for number in range(3):
            log.append(f"text {number}", f"name.{number}")
        log.delete_before(3)
        assert open_log().first() == 3
        assert open_log().read(3, 0.0) is None
        log.append("text 3", "name.3")
        assert _text(open_log().read(3, _LONG_S)) == "text 3"

    # --------------------------------------------------------------------------------------------- snapshots

    def test_the_newest_snapshot_counts(self, log: BlockLog, open_log: Callable[[], BlockLog]) -> None:
        log.put_snapshot("of 3", 3)
        assert _text(open_log().snapshot()) == "of 3"
        log.put_snapshot("of 7", 7)
        open_log().put_snapshot("of 5", 5)  # late
        assert _text(log.snapshot()) == "of 7"
        assert _text(open_log().snapshot()) == "of 7"

    def test_a_large_snapshot_is_kept_whole(self, log: BlockLog) -> None:
        text = "0123456789abcdef" * (3 << 16)  # 3 MiB
        log.put_snapshot(text, 1)
        assert _text(log.snapshot()) == text
        log.put_snapshot("small", 2)
        assert _text(log.snapshot()) == "small"

    def _read_or_gone(self, log: BlockLog, number: int) -> str:
        """A reader may ask only from time to time whether a block is gone."""
        deadline = time.monotonic() + _LONG_S
        while time.monotonic() < deadline:
            try:
                if (block := log.read(number, 0.2)) is not None:
                    return _text(block)
            except BlockGoneError:
                return "gone"
        return "still waiting"


def _text(block: str | bytes | None) -> str:
    assert block is not None
    return block if isinstance(block, str) else block.decode()


class TestEmbedded(OfLog):
    @pytest.fixture
    def open_log(self) -> Iterator[Callable[[], BlockLog]]:
        with store_process() as service:
            yield lambda: block_log_in(connect(service.address, "run"))


class TestEtcd(OfLog):
    @pytest.fixture
    def open_log(self, etcd: EtcdCluster) -> Callable[[], BlockLog]:
        run = f"run-{uuid.uuid4().hex}"
        return lambda: block_log_in(connect(StoreAddress.etcd(etcd.endpoints), run))
