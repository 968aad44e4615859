from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from swift_ft.errors import DivergenceError, ForeignLogError, LogCorruptError, LogMissingError, LogTornError
from swift_ft.logging import Direction, LogReader, checksum_of
from swift_ft.logging.format.segment import parse_segment
from swift_ft.logging.reading import segment_provider
from swift_ft.storage.store import Store
from swift_ft.torch_core.tensors import tensor_bytes
from tests.support.log import LOG, RUN, identity, key, load, message, receipt, write_segment

OTHER = "log/rank00001"


def opened(store: Store, *directories: str, **options: Any) -> LogReader:
    return load(LogReader(store, directories or [LOG], run_id=RUN, **options))


def value(iteration: int, fill: float = 1.0) -> torch.Tensor:
    return torch.full((4,), fill + iteration)


def file_of(store: Store, path: str) -> Path:
    return Path(store.child_url(path).removeprefix("file://"))


def overwrite(store: Store, path: str, data: bytes) -> None:
    with store.open_write(path) as file:
        file.write(data)


def flip_payload(store: Store, path: str, tensor: torch.Tensor) -> None:
    data = store.open_read(path).read()
    payload = bytes(tensor_bytes(tensor))
    assert data.count(payload) == 1
    overwrite(store, path, data.replace(payload, bytes([payload[0] ^ 1]) + payload[1:]))


def test_a_message_fills_a_receive_buffer(store: Store) -> None:
    write_segment(store, [message(key(3), value(3))])
    buffer = torch.zeros(4)
    opened(store).read_into(key(3), buffer)
    assert torch.equal(buffer, value(3))


def test_a_missing_message_names_key_and_directories(store: Store) -> None:
    write_segment(store, [receipt(key(3), 1)])
    log = opened(store, LOG, OTHER)
    assert not log.has(key(3))
    with pytest.raises(LogMissingError, match=r"iteration 3.*log/rank00000, log/rank00001") as caught:
        log.read(key(3))
    assert caught.value.fields["key"] == key(3)


def test_receipts_are_found(store: Store) -> None:
    write_segment(store, [receipt(key(3), 99), message(key(4), value(4))])
    log = opened(store)
    assert log.receipt(key(3)) == 99
    assert log.receipt(key(4)) is None


def test_the_receipt_of_an_iteration_that_its_receiver_has_completed(store: Store) -> None:
    """In the first generation and the last one it was interrupted in it, as far as the log is there."""
    for generation, segments in enumerate(([3], [3, 4], [3])):
        for sequence, iteration in enumerate(segments):
            record = receipt(key(iteration, direction=Direction.SCRIPT), generation)
            write_segment(store, [record], identity(generation), sequence)
    log = opened(store, from_iteration=2)
    assert log.receipt(key(3, direction=Direction.SCRIPT)) == 2
    assert log.receipt_of_completed(key(3, direction=Direction.SCRIPT)) == 1
    assert log.receipt_of_completed(key(4, direction=Direction.SCRIPT)) is None


def test_an_older_copy_of_what_the_script_sent_is_read_if_it_is_asked_for(store: Store) -> None:
    name, values = key(0, direction=Direction.SCRIPT), [value(0, fill) for fill in (1.0, 2.0)]
    for generation, tensor in enumerate(values):
        write_segment(store, [message(name, tensor)], identity(generation))
    log, got = opened(store), torch.zeros(4)
    assert log.checksums(name) == {*map(checksum_of, values)}
    for asked, expected in ((checksum_of(values[0]), values[0]), (12, values[1]), (None, values[1])):
        assert log.read_into(name, got, asked) == checksum_of(expected)
        assert torch.equal(got, expected)


def test_nothing_is_there_before_refresh_and_new_segments_after(store: Store) -> None:
    write_segment(store, [message(key(0), value(0))])
    log = LogReader(store, [LOG], run_id=RUN)
    assert not log.has(key(0))
    log.refresh()
    write_segment(store, [message(key(1), value(1))], sequence=1)
    assert (log.has(key(0)), log.has(key(1))) == (True, False)
    log.refresh()
    assert (log.has(key(0)), log.has(key(1))) == (True, True)


def test_dropped_segments_are_forgotten(store: Store) -> None:
    path = write_segment(store, [message(key(0), value(0))])
    write_segment(store, [message(key(1), value(1))], sequence=1)
    log = opened(store)
    store.delete(path)
    log.refresh()
    assert (log.has(key(0)), log.has(key(1))) == (False, True)
    assert log.keys(0) == []


def test_a_segment_is_parsed_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write_segment(store, [message(key(0, i), value(i)) for i in range(3)])
    calls: list[str] = []
    original = parse_segment

    def counting(source: object, path: str, run_id: str) -> tuple[object, object]:
        calls.append(path)
        return original(source, path, run_id)

    monkeypatch.setattr(segment_provider, "parse_segment", counting)
    log = opened(store)
    log.refresh()
    for i in range(3):
        log.read(key(0, i))
    assert len(calls) == 1


def test_messages_come_in_the_order_in_which_they_were_logged(store: Store) -> None:
    order = [2, 0, 3, 1]
    write_segment(store, [message(key(0, i), value(i)) for i in order[:2]])
    write_segment(store, [message(key(0, i), value(i)) for i in order[2:]], sequence=1)
    write_segment(store, [message(key(1, i), value(i)) for i in order], sequence=2)
    assert [name.microbatch for name in opened(store).keys(0)] == order


def test_receipts_are_no_messages(store: Store) -> None:
    backward = key(0, 1, direction=Direction.BACKWARD, source_stage=1, destination_stage=0)
    write_segment(store, [message(key(0, 0), value(0)), message(backward, value(1)), receipt(key(0, 5), 1)])
    log = opened(store)
    assert log.keys(0) == [key(0, 0), backward]
    assert log.keys(1) == []


def test_the_newest_generation_wins(store: Store) -> None:
    """The older copy's payload is damaged: only the newer one may be handed out."""
    old = write_segment(store, [message(key(0, i), value(i)) for i in (0, 1)], identity(1))
    write_segment(store, [message(key(0, i), value(i)) for i in (1, 0)], identity(2))
    flip_payload(store, old, value(0))
    log = opened(store)
    assert torch.equal(log.read(key(0, 0)), value(0))


@pytest.mark.parametrize("generations", [(1, 1), (1, 2)])
def test_copies_that_differ_are_a_divergence(store: Store, generations: tuple[int, int]) -> None:
    one = write_segment(
        store, [message(key(0), value(0)), message(key(1), value(1))], identity(generations[0])
    )
    two = write_segment(store, [message(key(0), value(5))], identity(generations[1]), 7, OTHER)
    log = opened(store, LOG, OTHER)
    log.read(key(1))
    with pytest.raises(DivergenceError, match=r"iteration 0") as caught:
        log.read(key(0))
    assert one in str(caught.value)
    assert two in str(caught.value)


def test_receipts_that_differ_are_a_divergence(store: Store) -> None:
    write_segment(store, [receipt(key(0), 1), receipt(key(0), 2)])
    with pytest.raises(DivergenceError):
        opened(store).receipt(key(0))


def test_the_error_of_a_damaged_payload_names_key_and_path(store: Store) -> None:
    path = write_segment(store, [message(key(i), value(i)) for i in (0, 1)])
    flip_payload(store, path, value(1))
    log = opened(store)
    log.read(key(0))
    for _ in range(2):
        with pytest.raises(LogCorruptError, match="checksum") as caught:
            log.read(key(1))
        assert caught.value.fields == {"path": path, "key": key(1)}


def test_a_torn_segment_does_not_disappear(store: Store) -> None:
    write_segment(store, [message(key(0), value(0))])
    path = write_segment(store, [message(key(i), value(i)) for i in (1, 2)], sequence=1)
    data = store.open_read(path).read()
    overwrite(store, path, data[: len(data) // 2])
    log = LogReader(store, [LOG], run_id=RUN)
    for _ in range(2):
        with pytest.raises(LogTornError) as caught:
            load(log)
        assert caught.value.fields["path"] == path


def test_damage_in_segments_that_do_not_matter_is_ignored(store: Store) -> None:
    for generation, iteration in ((0, 9), (1, 4)):
        path = write_segment(store, [message(key(iteration), value(0))], identity(generation))
        overwrite(store, path, b"damaged")
    write_segment(store, [message(key(4), value(4)), message(key(5), value(5))], identity(1), 1)
    assert opened(store, since_generation=1, from_iteration=5).has(key(5))
    with pytest.raises(LogTornError):
        opened(store, since_generation=1, from_iteration=4)
    with pytest.raises(LogTornError):
        opened(store, since_generation=0, from_iteration=5)


def test_another_run_is_refused(store: Store) -> None:
    write_segment(store, [message(key(0), value(0))], identity(run_id="run-2"))
    with pytest.raises(ForeignLogError):
        opened(store)


def test_other_files_are_ignored_but_a_renamed_segment_is_an_error(local: Store, tmp_path: Path) -> None:
    path = write_segment(local, [message(key(0), value(0))])
    folder = tmp_path / "store" / LOG
    (folder / "notes.txt").write_text("hello")
    (folder / "g00000-s000009.0123456789ab.tmp").write_text("unfinished")
    assert opened(local).has(key(0))
    (folder / path.rpartition("/")[2]).rename(folder / "mine.arrow")
    with pytest.raises(LogCorruptError, match=r"mine\.arrow"):
        opened(local)


def test_a_segment_dropped_while_it_is_listed_is_simply_missing(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_segment(local, [message(key(0), value(0))])
    names = local.list(LOG)
    local.delete(path)
    monkeypatch.setattr(local, "list", lambda directory: names)
    assert not opened(local).has(key(0))


def test_messages_of_an_open_segment_outlive_their_file(local: Store) -> None:
    path = write_segment(local, [message(key(0), value(0))])
    log = opened(local)
    local.delete(path)
    assert torch.equal(log.read(key(0)), value(0))


def test_a_file_that_is_cut_short_while_it_is_open_is_an_error(local: Store) -> None:
    """Touching a page of a map that is no longer there would end the process."""
    path = write_segment(local, [message(key(0), torch.ones(100_000)), message(key(1), torch.ones(100_000))])
    log = opened(local)
    os.truncate(file_of(local, path), 500_000)
    assert torch.equal(log.read(key(0)), torch.ones(100_000))
    with pytest.raises(LogCorruptError, match=r"cannot be read.*500000 bytes") as caught:
        log.read(key(1))
    assert caught.value.fields == {"path": path, "key": key(1)}


def test_what_was_read_takes_no_memory(local: Store) -> None:
    """Pages of a mapped file count as memory of a process: a replay would take more, the longer it is."""
    tensor = torch.ones(4 << 20, dtype=torch.uint8)
    for sequence in range(8):
        write_segment(local, [message(key(sequence), tensor)], sequence=sequence)
    log, buffer = opened(local), torch.empty_like(tensor)
    before = mapped_file_bytes()
    for iteration in range(8):
        log.read_into(key(iteration), buffer)
    assert mapped_file_bytes() - before < 4 << 20


def mapped_file_bytes() -> int:
    """Memory of this process that belongs to files."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssFile:"))
    return int(line.split()[1]) << 10


def test_past_iterations_are_evicted_and_can_be_read_again(store: Store) -> None:
    """Otherwise a long replay would keep the whole log on this machine, and open."""
    for sequence in range(4):
        write_segment(store, [message(key(sequence), torch.full((4,), float(sequence)))], sequence=sequence)
    log = opened(store)
    for iteration in range(4):
        assert torch.equal(log.read(key(iteration)), torch.full((4,), float(iteration)))
        assert min(log._segments).endswith(f"i{iteration:08d}-{iteration:08d}.arrow")
    assert torch.equal(log.read(key(0)), torch.zeros(4))
    assert log.keys(2) == [key(2)]
