"""Mutants of segments: none crashes the reader, none hangs it, none is accepted with wrong bytes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swift_ft.errors import RecoveryError
from swift_ft.logging import Direction, LogReader, MessageKey
from swift_ft.logging.format.codec import Codec, pack
from swift_ft.storage.store import Store
from swift_ft.torch_core.tensors import tensor_bytes
from tests.support.log import LOG, RUN, identity, key, message, read_all, receipt, write_segment

MUTANTS, ALL_MUTANTS = 2_000, 10_000

TENSORS = {
    key(4, 0): torch.linspace(0, 1, 30).reshape(5, 6),
    key(4, 1): torch.arange(600, dtype=torch.bfloat16),
    key(5, 0): torch.empty(0, dtype=torch.int16),
}
PLAIN, PACKED, EMPTY = (message(name, tensor) for name, tensor in TENSORS.items())
RECEIPT = receipt(key(4, 0, direction=Direction.BACKWARD), 2**63 + 1)
ORIGINAL = [PLAIN, RECEIPT, pack(PACKED, Codec.ZSTD_PLANES), EMPTY]
STRANGER = [message(key(i, 1), torch.full((40,), float(i))) for i in (4, 5)]
NUMBERS = st.sampled_from([0, 1, 2, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**45, 2**63 - 1, 2**64 - 1])
PLACE = st.floats(0, 1, exclude_max=True)  # of the file's length: mutations shrink well in any order


@st.composite
def mutations(draw: st.DrawFn) -> tuple[str, float, float, int]:
    kinds = ["flip", "cut", "remove", "repeat", "move", "number", "splice", "zero", "insert"]
    return draw(st.sampled_from(kinds)), draw(PLACE), draw(PLACE), draw(NUMBERS)


def mutate(data: bytes, other: bytes, mutation: tuple[str, float, float, int]) -> bytes:
    kind, one, two, number = mutation
    first, second = sorted((int(one * len(data)), int(two * len(data))))
    middle = data[first:second]
    if kind == "flip" and data:
        return data[:first] + bytes([data[first] ^ 1 << number.bit_length() % 8]) + data[first + 1 :]
    if kind == "number":
        at = first // 4 * 4
        width = "<Q" if number >= 2**32 or second % 2 else "<I"
        return data[:at] + struct.pack(width, number) + data[at + struct.calcsize(width) :]
    return {
        "cut": data[:first],
        "remove": data[:first] + data[second:],
        "repeat": data[:second] + middle + data[second:],
        "move": data[second:] + middle + data[:first],
        "splice": data[:first] + other[first:second] + data[second:],
        "zero": data[:first] + bytes(len(middle)) + data[second:],
        "insert": data[:first] + struct.pack("<Q", number) + data[first:],
    }.get(kind, data)


def content(tensors: dict[MessageKey, torch.Tensor]) -> dict[MessageKey, tuple[object, ...]]:
    return {name: (t.dtype, t.shape, bytes(tensor_bytes(t))) for name, t in tensors.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def mutants(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


@mutants(MUTANTS)
@given(st.lists(mutations(), min_size=1, max_size=3))
def test_no_mutant_is_believed(folder: Path, changes: list[tuple[str, float, float, int]]) -> None:
    assert_not_believed(folder, changes)


@pytest.mark.thorough
@mutants(ALL_MUTANTS)
@given(st.lists(mutations(), min_size=1, max_size=3))
def test_none_of_many_mutants_is_believed(folder: Path, changes: list[tuple[str, float, float, int]]) -> None:
    assert_not_believed(folder, changes)


def assert_not_believed(folder: Path, changes: list[tuple[str, float, float, int]]) -> None:
    """A mutant is refused, or read as what it was made from."""
    store = Store(str(folder))
    path = folder / LOG / "g00000-s000000-i00000004-00000005.arrow"
    if not path.exists():
        write_segment(store, ORIGINAL)
        write_segment(store, STRANGER, identity(rank=1), directory="other")
        path.with_suffix(".original").write_bytes(path.read_bytes())
    whole = path.with_suffix(".original").read_bytes()
    other = (folder / "other" / path.name).read_bytes()
    mutant = whole
    for change in changes:
        mutant = mutate(mutant, other, change)
    path.unlink()  # the last mutant may still be mapped
    path.write_bytes(mutant)
    reader = LogReader(store, [LOG], run_id=RUN)
    refused: RecoveryError | None = None
    try:
        reader.refresh()
        found = content(read_all(reader, 4) | read_all(reader, 5))
    except RecoveryError as error:
        refused = error
    if refused is not None:
        assert refused.fields["path"] == f"{LOG}/{path.name}"
        return
    assert found == content(TENSORS)
    assert reader.receipt(RECEIPT.key) == 2**63 + 1
