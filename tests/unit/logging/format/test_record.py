from __future__ import annotations

import pytest
import torch

from swift_ft.errors import DivergenceError, LogCorruptError, LogMissingError
from swift_ft.logging import Direction, checksum_of, copy_into
from swift_ft.logging.format.record import Record, RecordKind, dtype_name, verify
from swift_ft.torch_core.tensors import plain_on_host, tensor_bytes
from tests.support.log import key, message, receipt

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
]
SHAPES = [(), (0,), (1,), (3, 0, 2), (4, 5)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    if dtype is torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor_bytes(tensor.clone()))


def test_a_key_reads_like_a_sentence() -> None:
    assert str(key(47, 3, source_stage=1, destination_stage=2)) == (
        "iteration 47, microbatch 3, forward, stage 1 -> 2, slot 0"
    )


def test_keys_sort_by_iteration_first() -> None:
    assert sorted([key(2, 0), key(1, 9), key(1, 2)]) == [key(1, 2), key(1, 9), key(2, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_is_read_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    original = random_tensor(dtype, shape)
    buffer = torch.zeros(shape, dtype=dtype)
    copy_into(message(key(), original), buffer)
    assert bits(buffer) == bits(original)
    assert message(key(), original).dtype == dtype_name(dtype)


BASE = torch.arange(24.0).reshape(4, 6)
KINDS = {
    "plain": BASE,
    "a part": BASE[1:3],
    "columns": BASE[:, ::2],
    "transposed": BASE.T,
    "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "expanded": torch.ones(3, 1).expand(3, 4),
    "a parameter": torch.nn.Parameter(BASE.clone()),
    "negated lazily": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "of a class of its own": BASE.as_subclass(type("Own", (torch.Tensor,), {})),
}


@pytest.mark.parametrize("tensor", [pytest.param(tensor, id=kind) for kind, tensor in KINDS.items()])
def test_all_kinds_of_tensors_have_the_bytes_that_torch_gives(tensor: torch.Tensor) -> None:
    given = plain_on_host(tensor).reshape(-1).view(torch.uint8).tolist()
    view = tensor_bytes(tensor)
    assert view.tolist() == given
    assert (view.format, view.ndim, view.itemsize) == ("B", 1, 1)


def test_the_bytes_of_plain_tensors_take_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message that a stage receives is hashed before it computes."""

    def never(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError(tensor)

    monkeypatch.setattr("swift_ft.torch_core.tensors.plain_on_host", never)
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bool):
        tensor = torch.ones(3, 2, dtype=dtype)
        assert tensor_bytes(tensor).nbytes == tensor.nbytes
    assert tensor_bytes(torch.ones(2, requires_grad=True)).nbytes == 8


def test_contiguous_memory_is_not_copied() -> None:
    tensor = torch.zeros(4)
    view = tensor_bytes(tensor)
    tensor.fill_(1.0)
    assert bytes(view) == bits(torch.ones(4))


def test_non_contiguous_source_is_row_major() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    assert bytes(tensor_bytes(tensor)) == bits(tensor.contiguous())


def test_non_contiguous_destination_is_filled() -> None:
    original = torch.arange(12.0).reshape(4, 3)
    whole = torch.zeros(3, 4)
    copy_into(message(key(), original), whole.T)
    assert torch.equal(whole.T, original)


def test_lazy_conjugate_is_resolved() -> None:
    tensor = torch.tensor([1 + 2j]).conj()
    assert bytes(tensor_bytes(tensor)) == bits(torch.tensor([1 - 2j]))


def test_a_leaf_that_requires_grad_can_be_filled_and_read() -> None:
    buffer = torch.zeros(2, requires_grad=True)
    copy_into(message(key(), torch.tensor([1.0, 2.0], requires_grad=True)), buffer)
    assert buffer.tolist() == [1.0, 2.0]
    assert buffer.is_leaf


def test_checksum_of_tensor_and_of_its_bytes_agree() -> None:
    tensor = torch.arange(5.0)
    assert checksum_of(tensor) == checksum_of(tensor_bytes(tensor)) == checksum_of(bits(tensor))
    assert checksum_of(tensor) != checksum_of(tensor + 1)


@pytest.mark.parametrize("buffer", [torch.zeros(3), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 1)])
def test_another_shape_or_dtype_names_the_key(buffer: torch.Tensor) -> None:
    name = key(4, 1, direction=Direction.BACKWARD)
    with pytest.raises(DivergenceError, match="iteration 4, microbatch 1, backward") as caught:
        copy_into(message(name, torch.zeros(2)), buffer)
    assert caught.value.fields["key"] == name


def test_a_short_payload_is_not_copied() -> None:
    record = Record(RecordKind.MESSAGE, key(), "float32", (2,), 0, memoryview(bytes(4)))
    with pytest.raises(LogCorruptError, match="4 bytes in the log, 8 expected"):
        copy_into(record, torch.zeros(2))


def test_a_receipt_cannot_fill_a_tensor() -> None:
    with pytest.raises(LogMissingError, match="only a receipt"):
        copy_into(receipt(key(), 1), torch.zeros(2))


def test_verify_accepts_what_matches_and_names_what_does_not() -> None:
    tensor = torch.arange(4.0)
    record = message(key(9), tensor)
    verify(record)
    verify(receipt(key(), 1))
    tensor[2] = 7.0
    with pytest.raises(LogCorruptError, match=r"iteration 9.* in some/path") as caught:
        verify(record, path="some/path")
    assert caught.value.fields == {"key": key(9), "path": "some/path"}
