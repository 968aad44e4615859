"""Digests of the state: each bit counts, wherever it is, and the same bits count alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from swift_ft.checkpoint.state_digest import differing, tensor_digests
from swift_ft.checkpoint.training_state import TrainingState


def digest(tensor: torch.Tensor) -> int:
    return tensor_digests({"it": tensor})["it"]


def flipped(tensor: torch.Tensor, byte: int, bit: int) -> torch.Tensor:
    copy = tensor.clone()
    copy.view(-1).view(torch.uint8)[byte] ^= 1 << bit
    return copy


@pytest.mark.parametrize("size", [1, 2, 7, 4096, 8192 + 3, 100_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_one_bit(size: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(size).to(dtype)
    expected = digest(tensor)
    assert digest(tensor.clone()) == expected
    for byte in {0, tensor.nbytes // 2, tensor.nbytes - 1}:
        for bit in range(8):
            assert digest(flipped(tensor, byte, bit)) != expected


def test_the_place_counts() -> None:
    tensor = torch.arange(20_000.0)
    swapped = tensor.clone()
    swapped[[3, 9_000]] = swapped[[9_000, 3]]
    rolled = tensor.view(-1, 100).roll(1, 0)
    assert len({digest(t) for t in (tensor, swapped, rolled.reshape(-1), tensor.view(100, 200))}) == 4


def test_signs_do_not_cancel_out() -> None:
    """The highest bit of a word, times an odd weight, is itself: two of them would add up to nothing."""
    tensor = torch.ones(9000)
    negated = tensor.clone()
    negated[[1, 3]] = -1
    assert digest(negated) != digest(tensor)
    assert digest(-tensor) != digest(tensor)


DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


@pytest.mark.parametrize("size", [1, 3, 1000, 4096, 8192 + 3, 100_001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_bits_flipped(size: int, dtype: torch.dtype) -> None:
    """A shift with the sign would make the same word of x and of ~x: of 0 and -1, of no bits and all."""
    values = [torch.zeros(size).to(dtype), torch.arange(size).to(dtype)]
    for value in values:
        inverse = (~value.view(torch.uint8)).view(dtype)
        assert digest(inverse) != digest(value)
        one = value.clone()
        one[size // 2] = inverse[size // 2]
        assert digest(one) != digest(value)


@pytest.mark.parametrize("size", [2, 8, 4096, 16_384, 100_000])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_signed], ids=str)
def test_all_signs_changed(size: int, dtype: torch.dtype) -> None:
    """Of each number in a word of several at once: what is left must not be its highest bit alone."""
    for value in (torch.ones(size), 1 + torch.arange(size) % 100):
        value = value.to(dtype)
        assert digest(-value) != digest(value)


@pytest.mark.parametrize("bit", range(32))
def test_the_same_bit_of_all_numbers(bit: int) -> None:
    for size in (4, 4096, 20_000):
        value = torch.arange(size, dtype=torch.int32)
        assert digest(value ^ (torch.tensor(1, dtype=torch.int32) << bit)) != digest(value)


def test_minus_one_is_not_zero() -> None:
    for size in (1, 4, 5000, 100_000):
        zeros = torch.zeros(size, dtype=torch.int64)
        assert digest(torch.full_like(zeros, -1)) != digest(zeros)


def test_shape_and_dtype_count() -> None:
    zeros = [torch.zeros(8), torch.zeros(9), torch.zeros(2, 4), torch.zeros(4, dtype=torch.float64)]
    zeros += [torch.zeros(8, dtype=torch.int32), torch.zeros(0), torch.zeros(())]
    assert len({digest(tensor) for tensor in zeros}) == len(zeros)


def test_values_count_and_not_where_they_lie() -> None:
    flat = torch.arange(100.0)
    assert digest(flat[1:51]) == digest(flat[1:51].clone())
    assert digest(flat.view(10, 10).T) == digest(flat.view(10, 10).T.contiguous())
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))


def test_it_does_not_depend_on_how_much_is_computed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other devices take larger blocks."""
    tensor = torch.randn(300_001)
    expected = digest(tensor)
    monkeypatch.setattr("swift_ft.checkpoint.state_digest._BLOCK_BYTES", {"cpu": 2**26})
    assert digest(tensor) == expected


def test_it_is_the_same_in_every_version() -> None:
    """It is a part of checkpoints."""
    assert (digest(POSITIVE), digest(NEGATIVE)) == (EXPECTED, EXPECTED_OF_NEGATIVE)


POSITIVE = torch.arange(10_000, dtype=torch.int32)
NEGATIVE = torch.arange(-20_000, 3, dtype=torch.int64)
EXPECTED = 12395049039976966531
EXPECTED_OF_NEGATIVE = 17273176674500576144


def test_names_are_those_that_a_user_knows() -> None:
    model = nn.Sequential(first := nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    state = TrainingState({"net": model, "adam": optimizer})
    before = tensor_digests(state.named_tensors())
    assert {"net.0.weight", "adam.exp_avg of net.1.bias"} <= before.keys()
    assert not any("running" in name for name in before)  # each replica may have its own
    optimizer.state[first.weight]["exp_avg"][1, 1] += 1
    after = tensor_digests(state.named_tensors())
    assert differing(before, after) == ["adam.exp_avg of net.0.weight"]


def test_what_is_taken_over_is_what_was_saved() -> None:
    saved, restored = (TrainingState({"net": nn.Linear(3, 3)}) for _ in range(2))
    payload = saved.to_save(tensor_digests(saved.named_tensors()))
    assert restored.take_over(payload) == []
    payload["models"]["net"]["weight"] = payload["models"]["net"]["weight"] + 1
    assert restored.take_over(payload) == ["net.weight"]
    assert restored.take_over(saved.to_save()) == []  # without digests


def test_a_model_that_is_wrapped_since_it_was_saved() -> None:
    """Its tensors are compared under the names that they had."""
    saved = TrainingState({"net": nn.Sequential(nn.Linear(3, 3))})
    for wrap in (compiled, lambda net: nn.Sequential(compiled(net[0])), checkpoint_wrapper):
        restored = TrainingState({"net": wrap(nn.Sequential(nn.Linear(3, 3)))})
        payload = saved.to_save(tensor_digests(saved.named_tensors()))
        assert restored.take_over(payload) == []
        payload["models"]["net"]["0.weight"] = payload["models"]["net"]["0.weight"] + 1
        assert restored.take_over(payload) == ["net.0.weight"]


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("size", [3, 600])
def test_an_expanded_tensor_has_the_digest_of_its_elements(size: int) -> None:
    for one in (torch.ones(1).expand(size, size), torch.arange(size).expand(size, size)):
        assert tensor_digests({"": one}) == tensor_digests({"": one.contiguous()})
