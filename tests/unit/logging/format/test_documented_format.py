"""docs/log-format.md, followed by a reader that knows nothing but that text and plain pyarrow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash

from swift_ft.logging import Direction
from swift_ft.logging.format.codec import Codec, pack
from swift_ft.logging.format.segment import FORMAT_VERSION
from swift_ft.storage.store import Store
from tests.support.log import LOG, identity, key, message, receipt, write_segment
from tests.unit.logging.format.test_record import bits

DOCUMENT = Path(__file__).parents[4] / "docs" / "log-format.md"
TENSORS = [
    torch.linspace(-1, 1, 600).reshape(20, 30),
    torch.arange(500).to(torch.bfloat16),
    torch.tensor(7, dtype=torch.int64),
]


@pytest.fixture
def file(local: Store) -> Path:
    records = [
        message(key(7, 0), TENSORS[0]),
        pack(message(key(7, 1, slot=2), TENSORS[1]), Codec.ZSTD_PLANES),
        receipt(key(8, 0, direction=Direction.BACKWARD), 12345),
        message(key(9, 0), TENSORS[2]),
    ]
    path = write_segment(local, records, identity(generation=2), sequence=3)
    assert path == f"{LOG}/g00002-s000003-i00000007-00000009.arrow"
    return Path(local.child_url(path).removeprefix("file://"))


def unpacked(row: dict[str, object], itemsize: int) -> bytes:
    payload = row["payload"]
    assert isinstance(payload, bytes)
    shape = row["shape"]
    assert isinstance(shape, list)
    if row["codec"] == "":
        return payload
    size = int(np.prod(shape)) * itemsize
    raw: bytes = pa.Codec("zstd").decompress(payload, size).to_pybytes()
    if row["codec"] == "zstd":
        return raw
    assert row["codec"] == "zstd-planes"
    return np.frombuffer(raw, np.uint8).reshape(itemsize, -1).T.tobytes()


def test_plain_pyarrow_reads_what_was_logged(file: Path) -> None:
    with pa.memory_map(str(file)) as source:
        table = pa.ipc.open_stream(source).read_all()
    rows = table.to_pylist()
    assert [row["kind"] for row in rows] == ["message", "message", "receipt", "message", "footer"]
    for row, tensor in zip((rows[0], rows[1], rows[3]), TENSORS, strict=True):
        raw = unpacked(row, tensor.itemsize)
        assert raw == bits(tensor)
        assert row["checksum"] == xxhash.xxh3_64_intdigest(raw)
        assert row["shape"] == list(tensor.shape)
        assert f"torch.{row['dtype']}" == str(tensor.dtype)
    assert (rows[2]["payload"], rows[2]["checksum"]) == (None, 12345)


def test_the_seal_is_what_the_document_says(file: Path) -> None:
    with pa.memory_map(str(file)) as source:
        table = pa.ipc.open_stream(source).read_all()
    lines = [f"{k.decode()}={v.decode()}" for k, v in sorted(table.schema.metadata.items())]
    *rows, footer = table.to_pylist()
    for row in rows:
        names = ["kind", "iteration", "microbatch", "direction", "source_stage", "destination_stage", "slot"]
        shape = ",".join(str(n) for n in row["shape"])
        columns = [*(row[name] for name in names), row["dtype"], shape, row["checksum"], row["codec"]]
        lines.append(" ".join(str(column) for column in columns))
    text = "".join(line + "\n" for line in lines)
    assert footer["checksum"] == xxhash.xxh3_64_intdigest(text.encode())
    assert footer["shape"] == [len(rows)]
    assert footer["payload"] is None


def test_the_framing_is_what_the_document_says(file: Path) -> None:
    whole = file.read_bytes()
    at = batches = 0
    while whole[at : at + 8] != b"\xff\xff\xff\xff\0\0\0\0":
        assert whole[at : at + 4] == b"\xff\xff\xff\xff"
        size = int.from_bytes(whole[at + 4 : at + 8], "little")
        assert size % 8 == 0
        read = pa.ipc.read_message(whole[at:])
        assert read.type == ("schema" if at == 0 else "record batch")
        at += 8 + size + (read.body.size if read.body is not None else 0)
        batches += 1
    assert at + 8 == len(whole)
    assert batches == 1 + 4 + 1


def test_the_document_is_about_this_version_and_these_columns(file: Path) -> None:
    text = DOCUMENT.read_text()
    assert f"\nVersion {FORMAT_VERSION}. " in text
    with pa.memory_map(str(file)) as source:
        schema = pa.ipc.open_stream(source).schema
    for index, field in enumerate(schema):
        kind = {"string": "utf8", "list<item: int64>": "list&lt;int64&gt;"}.get(
            str(field.type), str(field.type)
        )
        assert f"\n| {index} | `{field.name}` | {kind} |" in text
    assert {name.decode() for name in schema.metadata} == {
        f"swift_ft.{name}" for name in ("format_version", "run_id", "rank", "generation", "sequence")
    }
