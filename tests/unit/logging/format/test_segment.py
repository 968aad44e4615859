from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from swift_ft.errors import ForeignLogError, LogCorruptError, LogTornError, UsageError
from swift_ft.logging import Direction, copy_into, parse_segment_name, read_segment
from swift_ft.logging.format.record import Record, verify
from swift_ft.logging.format.segment import SegmentName, SegmentWriter, format_segment_name
from swift_ft.storage.store import Store
from tests.support.log import LOG, RUN, identity, key, message, receipt, write_segment
from tests.unit.logging.format.test_record import DTYPES, SHAPES, bits, random_tensor


def sample() -> list[Record]:
    return [
        message(key(7, 0), torch.arange(6.0).reshape(2, 3)),
        receipt(key(7, 0, direction=Direction.BACKWARD), 2**64 - 1),
        message(key(8, 0, slot=1), torch.tensor([], dtype=torch.bfloat16)),
        message(key(9, 5), torch.arange(5, dtype=torch.int16)),
    ]


def content(records: list[Record]) -> list[tuple[object, ...]]:
    return [(r.kind, r.key, r.dtype, r.shape, r.checksum, r.payload and bytes(r.payload)) for r in records]


def rewrite(store: Store, path: str, data: bytes) -> None:
    with store.open_write(path) as file:
        file.write(data)


def test_the_name_holds_generation_sequence_and_iterations() -> None:
    name = SegmentName(1, 42, 7, 9)
    assert format_segment_name(name) == "g00001-s000042-i00000007-00000009.arrow"
    assert parse_segment_name(f"{LOG}/{format_segment_name(name)}") == name
    assert parse_segment_name("g00001-s000042.0123456789ab.tmp") is None


def test_names_beyond_their_padding_still_parse() -> None:
    name = SegmentName(123_456, 12_345_678, 10**9, 10**10)
    assert parse_segment_name(format_segment_name(name)) == name


def test_round_trip(store: Store) -> None:
    path = write_segment(store, sample(), identity(generation=3), sequence=2)
    assert path == f"{LOG}/g00003-s000002-i00000007-00000009.arrow"
    records = read_segment(store, path, RUN)
    assert content(records) == content(sample())
    for record in records:
        verify(record)


def test_no_pandas_is_imported(tmp_path: Path) -> None:
    """Arrow imports it for many a call. That takes 0.2 s, in which a replacement's replay stands still."""
    script = f"""
import sys
class Refuses:
    def find_spec(self, name, *_):
        assert name.partition(".")[0] != "pandas", "pandas is imported"
sys.meta_path.insert(0, Refuses())
from pathlib import Path
from swift_ft.storage.store import Store
from tests.unit.logging.format.test_segment import *
test_round_trip(Store({str(tmp_path)!r}))
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[4])


def test_round_trip_of_all_dtypes_and_shapes(store: Store) -> None:
    tensors = [random_tensor(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    path = write_segment(store, [message(key(0, i), tensor) for i, tensor in enumerate(tensors)])
    for record, tensor in zip(read_segment(store, path, RUN), tensors, strict=True):
        buffer = torch.empty_like(tensor)
        copy_into(record, buffer)
        assert bits(buffer) == bits(tensor)


def test_plain_pyarrow_reads_a_segment(local: Store) -> None:
    path = write_segment(local, sample())
    with pa.memory_map(local.child_url(path).removeprefix("file://")) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table.column("kind").to_pylist() == ["message", "receipt", "message", "message", "footer"]
    assert table.column("iteration").to_pylist()[:4] == [7, 7, 8, 9]
    assert table.column("payload")[3].as_py() == bits(torch.arange(5, dtype=torch.int16))
    assert table.column("shape")[4].as_py() == [4]
    assert table.schema.metadata[b"swift_ft.run_id"] == RUN.encode()
    assert table.schema.metadata[b"swift_ft.format_version"] == b"2"


def test_large_payloads_are_mapped_not_copied(local: Store) -> None:
    path = write_segment(local, [message(key(0, i), torch.zeros(1 << 18)) for i in range(8)])
    before = pa.total_allocated_bytes()
    records = read_segment(local, path, RUN)
    assert sum(record.payload.nbytes for record in records if record.payload) == 8 << 20
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_counters(store: Store) -> None:
    writer = SegmentWriter(store, LOG, identity(), 0)
    assert (writer.min_iteration, writer.max_iteration, writer.records) == (None, None, 0)
    assert writer.bytes_written == writer._file.tell()
    for iteration in (5, 3, 8):
        writer.append(message(key(iteration), torch.zeros(10)))
        assert writer.bytes_written == writer._file.tell()
    assert (writer.min_iteration, writer.max_iteration, writer.records) == (3, 8, 3)
    path = writer.commit()
    assert writer.bytes_written == store.size(path)


def test_an_empty_segment_has_no_name(store: Store) -> None:
    writer = SegmentWriter(store, LOG, identity(), 0)
    with pytest.raises(UsageError):
        writer.commit()
    writer.abort()
    assert store.list(LOG) == []


def test_another_run_is_refused(store: Store) -> None:
    path = write_segment(store, sample(), identity(run_id="run-2"))
    with pytest.raises(ForeignLogError, match="'run-2'") as caught:
        read_segment(store, path, RUN)
    assert caught.value.fields["path"] == path


def test_a_segment_cut_anywhere_is_never_read_silently(local: Store) -> None:
    """Commit last: a prefix of a segment is no segment, whatever its length."""
    path = write_segment(local, sample())
    whole = local.open_read(path).read()
    for length in range(len(whole)):
        rewrite(local, path, whole[:length])
        with pytest.raises((LogTornError, LogCorruptError)) as caught:
            read_segment(local, path, RUN)
        assert caught.value.fields["path"] == path


def test_a_torn_segment_names_the_last_key_that_could_be_read(local: Store) -> None:
    path = write_segment(local, sample())
    whole = local.open_read(path).read()
    rewrite(local, path, whole[: len(whole) - 8])  # only the end-of-stream mark is missing
    with pytest.raises(LogTornError, match="iteration 9, microbatch 5") as caught:
        read_segment(local, path, RUN)
    assert caught.value.fields == {"path": path, "key": key(9, 5)}


def test_a_stream_that_was_closed_without_footer_is_torn(local: Store) -> None:
    path = write_segment(local, sample())
    with pa.memory_map(local.child_url(path).removeprefix("file://")) as file:
        table = pa.ipc.open_stream(file).read_all()
    with local.open_write(path) as pending, pa.ipc.new_stream(pending.sink, table.schema) as stream:
        for batch in table.slice(0, 4).to_batches():
            stream.write_batch(batch)
    with pytest.raises(LogTornError):
        read_segment(local, path, RUN)


def test_bytes_after_the_end_are_corruption(local: Store) -> None:
    path = write_segment(local, sample())
    whole = local.open_read(path).read()
    for tail in (b"\0", b"\xff\xff\xff\xff\0\0\0\0"):
        rewrite(local, path, whole + tail)
        with pytest.raises((LogTornError, LogCorruptError)):
            read_segment(local, path, RUN)


def test_every_flipped_bit_is_detected_or_harmless(local: Store) -> None:
    """All bits of a small segment: an error at opening, an error at verification, or identical records."""
    path = write_segment(local, sample())
    whole = local.open_read(path).read()
    expected = content(sample())
    at_opening = at_verification = harmless = 0
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << random.Random(position).randrange(8)
        rewrite(local, path, bytes(damaged))
        try:
            records = read_segment(local, path, RUN)
        except (LogTornError, LogCorruptError):
            at_opening += 1
            continue
        try:
            for record in records:
                verify(record)
        except LogCorruptError:
            at_verification += 1
            continue
        assert content(records) == expected, f"the flip at byte {position} went unnoticed"
        harmless += 1
    assert at_opening > 1000
    assert at_verification >= 24 + 10  # the payloads' bytes, and a few that say where they begin
    assert harmless > 0


def test_records_that_were_swapped_are_detected(local: Store) -> None:
    """Each record is intact, but order is part of what the footer seals."""
    path = write_segment(local, [message(key(0, i), torch.full((2,), float(i))) for i in range(2)])
    with pa.memory_map(local.child_url(path).removeprefix("file://")) as file:
        batches = list(pa.ipc.open_stream(file))
        schema = batches[0].schema
    with local.open_write(path) as pending, pa.ipc.new_stream(pending.sink, schema) as stream:
        for index in (1, 0, 2):
            stream.write_batch(batches[index])
    with pytest.raises(LogCorruptError, match="footer"):
        read_segment(local, path, RUN)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("iteration", 9),
        ("microbatch", 1),
        ("direction", "backward"),
        ("source_stage", 1),
        ("destination_stage", 2),
        ("slot", 0),
        ("dtype", "float16"),
        ("shape", [0, 1]),
        ("checksum", 1),
        ("codec", "zstd"),
    ],
)
def test_a_changed_field_is_detected(local: Store, column: str, value: object) -> None:
    """A valid, plausible key that is not the one that was written would hand a replay the wrong message."""
    path = write_segment(local, sample())
    with pa.memory_map(local.child_url(path).removeprefix("file://")) as file:
        batches = list(pa.ipc.open_stream(file))
    index = batches[2].schema.get_field_index(column)
    changed = pa.array([value], batches[2].schema.field(index).type)
    assert changed != batches[2].column(index)
    batches[2] = batches[2].set_column(index, batches[2].schema.field(index), changed)
    with local.open_write(path) as pending, pa.ipc.new_stream(pending.sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    with pytest.raises(LogCorruptError, match="footer does not match"):
        read_segment(local, path, RUN)


def test_a_renamed_segment_is_detected(local: Store, tmp_path: Path) -> None:
    """Readers skip segments by name, so a wrong name would hide messages."""
    path = write_segment(local, sample())
    folder = tmp_path / "store" / LOG
    (folder / path.rpartition("/")[2]).rename(folder / "g00000-s000000-i00000000-00000001.arrow")
    with pytest.raises(LogCorruptError, match="renamed"):
        read_segment(local, f"{LOG}/g00000-s000000-i00000000-00000001.arrow", RUN)


def test_another_format_version_is_named(local: Store) -> None:
    path = write_segment(local, sample())
    whole = local.open_read(path).read()
    at = whole.index(b"swift_ft.format_version")
    value = whole.rindex(b"2", 0, at)
    candidates = [i for i in range(max(0, value - 8), value + 1) if whole[i : i + 1] == b"2"]
    rewrite(local, path, b"".join([whole[: candidates[-1]], b"3", whole[candidates[-1] + 1 :]]))
    with pytest.raises(LogCorruptError, match="format version 3"):
        read_segment(local, path, RUN)
