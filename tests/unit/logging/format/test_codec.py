"""Packed payloads come back bit by bit, and a change about their size is not believed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swift_ft.errors import LogCorruptError
from swift_ft.logging import Compress, LogOptions, LogReader, LogWriter
from swift_ft.logging.format.codec import Codec, codec_for, pack, unpack
from swift_ft.logging.format.record import verify
from swift_ft.storage.store import Store
from tests.support.log import LOG, RUN, identity, key, message
from tests.unit.logging.format.test_record import DTYPES, bits, random_tensor


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.ZSTD_PLANES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_round_trip(dtype: torch.dtype, codec: Codec) -> None:
    whole = message(key(), random_tensor(dtype, (30, 7)).repeat(20, 1))
    packed = pack(whole, codec)
    assert packed.codec == codec
    assert packed.payload is not None
    assert whole.payload is not None
    assert packed.payload.nbytes < whole.payload.nbytes
    back = unpack(packed)
    verify(back)
    assert bytes(back.payload or b"") == bytes(whole.payload)


def test_what_does_not_get_smaller_stays_as_it_is() -> None:
    noise = message(key(), torch.randint(0, 256, (4096,), dtype=torch.uint8))
    assert pack(noise, Codec.ZSTD) is noise
    empty = message(key(), torch.empty(0))
    assert pack(empty, Codec.ZSTD) is empty


def test_a_dtype_has_the_codec_that_was_measured_best() -> None:
    assert codec_for("float32") == codec_for("bfloat16") == Codec.ZSTD_PLANES
    assert codec_for("int64") == codec_for("uint8") == Codec.ZSTD


def test_a_packed_log_is_replayed(store: Store) -> None:
    tensor = torch.linspace(1, 2, 50_000).to(torch.bfloat16)
    writer = LogWriter(store, LOG, identity(), LogOptions(compress=Compress.ALWAYS))
    writer.append_message(key(), tensor)
    writer.close(60)
    assert writer.metrics().bytes < tensor.nbytes
    reader = LogReader(store, [LOG], run_id=RUN)
    reader.refresh()
    assert bits(reader.read(key())) == bits(tensor)


@pytest.mark.parametrize(
    "change",
    [{"shape": (1 << 45,)}, {"shape": (10,)}, {"shape": (0,)}, {"dtype": "load"}, {"codec": "pickle"}],
    ids=str,
)
def test_a_wrong_description_of_a_packed_payload_is_an_error(change: dict[str, object]) -> None:
    packed = pack(message(key(3), torch.zeros(1000)), Codec.ZSTD)
    with pytest.raises(LogCorruptError, match="iteration 3") as caught:
        verify(unpack(replace(packed, **change), path="a/segment"))  # type: ignore[arg-type]
    assert caught.value.fields["key"] == key(3)
