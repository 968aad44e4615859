"""Messages are packed where the store is slower than a core packs, and that is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swift_ft.logging import CodecPolicy, Compress, LogOptions, LogReader, LogWriter, read_segment
from swift_ft.logging.format.codec import Codec
from swift_ft.storage.store import Store
from tests.support.log import LOG, RUN, identity, key


def test_nothing_is_packed_before_the_store_was_measured() -> None:
    codec_policy = CodecPolicy(Compress.AUTO)
    assert codec_policy.codec("float32") is Codec.NONE
    assert codec_policy.store_bytes_per_s is None


def test_the_first_message_after_a_shipment_shows_how_fast_packing_is() -> None:
    codec_policy = CodecPolicy(Compress.AUTO)
    codec_policy.record_upload(1_000_000, 1.0)
    assert codec_policy.codec("float32") is Codec.ZSTD_PLANES
    codec_policy.record_packing(500_000, 1.0)  # slower than the store
    assert codec_policy.codec("float32") is Codec.NONE


def test_a_store_that_becomes_slow_is_noticed_but_one_slow_upload_is_not() -> None:
    codec_policy = CodecPolicy(Compress.AUTO)
    for _ in range(5):
        codec_policy.record_upload(100, 0.1)
    codec_policy.record_packing(500, 1.0)
    assert not codec_policy.packing
    codec_policy.record_upload(100, 60.0)
    assert not codec_policy.packing
    for _ in range(8):
        codec_policy.record_upload(100, 1.0)
    assert codec_policy.packing
    assert codec_policy.store_bytes_per_s == 100


@pytest.mark.parametrize(("compress", "packing"), [(Compress.ALWAYS, True), (Compress.NEVER, False)])
def test_the_choice_can_be_fixed(compress: Compress, packing: bool) -> None:
    codec_policy = CodecPolicy(compress)
    codec_policy.record_upload(1, 1.0)
    codec_policy.record_packing(1000, 1.0)
    assert codec_policy.packing is packing


def test_a_log_changes_its_codec_while_it_is_written(local: Store, tmp_path: Path) -> None:
    """Every record names its codec, so a reader needs no setting."""
    codec_policy = CodecPolicy(Compress.AUTO)
    tensor = torch.linspace(1, 2, 50_000)
    writer = LogWriter(local, LOG, identity(), LogOptions(local=tmp_path / "tier"), codec_policy=codec_policy)
    writer.append_message(key(0), tensor)
    writer.flush(60)  # the first shipment
    assert codec_policy.store_bytes_per_s is not None
    for _ in range(8):
        codec_policy.record_upload(1, 1.0)  # from here on the store seems to be slow
    for iteration in (1, 2):
        writer.append_message(key(iteration), tensor)
    writer.close(60)
    records = [r for name in local.list(LOG) for r in read_segment(local, f"{LOG}/{name}", RUN)]
    assert [record.codec for record in records] == ["", "zstd-planes", "zstd-planes"]
    reader = LogReader(local, [LOG], run_id=RUN)
    reader.refresh()
    for iteration in range(3):
        reader.read_into(key(iteration), buffer := torch.empty_like(tensor))
        assert torch.equal(buffer, tensor)
