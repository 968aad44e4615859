"""Messages are packed where the store is slower than a core packs, and that is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from logging_helpers import LOG, RUN, identity, key

from swift_ft.logging import (
    Codec,
    CodecChoice,
    Compress,
    LogOptions,
    LogReader,
    LogWriter,
    Store,
    copy_into,
    read_segment,
)


def test_nothing_is_packed_before_the_store_was_measured() -> None:
    choice = CodecChoice(Compress.AUTO)
    assert choice.codec("float32") is Codec.NONE
    assert choice.store_bytes_per_s is None


def test_the_first_message_after_a_shipment_shows_how_fast_packing_is() -> None:
    choice = CodecChoice(Compress.AUTO)
    choice.shipped(1_000_000, 1.0)
    assert choice.codec("float32") is Codec.ZSTD_PLANES
    choice.packed(500_000, 1.0)  # slower than the store
    assert choice.codec("float32") is Codec.NONE


def test_a_store_that_becomes_slow_is_noticed_and_one_hiccup_is_not() -> None:
    choice = CodecChoice(Compress.AUTO)
    for _ in range(5):
        choice.shipped(100, 0.1)
    choice.packed(500, 1.0)
    assert not choice.packing
    choice.shipped(100, 60.0)
    assert not choice.packing
    for _ in range(8):
        choice.shipped(100, 1.0)
    assert choice.packing
    assert choice.store_bytes_per_s == 100


@pytest.mark.parametrize(("compress", "packing"), [(Compress.ALWAYS, True), (Compress.NEVER, False)])
def test_it_can_be_told(compress: Compress, packing: bool) -> None:
    choice = CodecChoice(compress)
    choice.shipped(1, 1.0)
    choice.packed(1000, 1.0)
    assert choice.packing is packing


def test_a_log_changes_its_codec_on_the_way(local: Store, tmp_path: Path) -> None:
    """Every record says how it is packed: a reader minds nothing."""
    choice = CodecChoice(Compress.AUTO)
    tensor = torch.linspace(1, 2, 50_000)
    writer = LogWriter(local, LOG, identity(), LogOptions(local=tmp_path / "tier"), choice=choice)
    writer.append_message(key(0), tensor)
    writer.flush(60)  # the first shipment
    assert choice.store_bytes_per_s is not None
    for _ in range(8):
        choice.shipped(1, 1.0)  # from here on the store seems to be slow
    for iteration in (1, 2):
        writer.append_message(key(iteration), tensor)
    writer.close(60)
    records = [r for name in local.list(LOG) for r in read_segment(local, f"{LOG}/{name}", RUN)]
    assert [record.codec for record in records] == ["", "zstd-planes", "zstd-planes"]
    reader = LogReader(local, [LOG], run_id=RUN)
    reader.refresh()
    for iteration in range(3):
        copy_into(reader.message(key(iteration)), buffer := torch.empty_like(tensor))
        assert torch.equal(buffer, tensor)
