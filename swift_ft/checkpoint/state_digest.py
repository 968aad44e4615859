"""Digests of the training state: one number for each tensor of parameters and optimizer state.

    bits as 64-bit words x ─▶ x ^ (x >> 33) ─▶ rows of 4096, each times odd weights ─▶ sum over rows, mod 2^64

The same bits give the same number on every device, and on a device only the numbers travel to the host. A
change of one element always changes the number, because weights are odd. Changes of several elements cancel
out in about one of 2^32 cases at worst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
import xxhash
from torch.distributed.tensor import DTensor

from swift_ft.units import some

StateDigests = Mapping[str, int]
"""By the name of a tensor of the state."""

STORED_AS = "digests 2"
"""Under which a checkpoint has digests."""

_ROW = 4096
_SMALL_BYTES = 8 * _ROW
_BLOCK_BYTES = {"cpu": 2**19}
"""Bytes that are computed at a time: as many as fit a core's cache, and elsewhere enough for a kernel."""
_DEFAULT_BLOCK_BYTES = 2**26
_STRIDE = 0x1E3779B97F4A7C16
_MASK = 2**64 - 1
_SHIFT = 33
_SHIFTED = 2 ** (64 - _SHIFT) - 1


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The digest of each tensor: of its bits, its dtype and its shape.

    Dense tensors only; others are left out. Of a DTensor the local part counts. Waits for each device once.

    Args:
        tensors: by name.
    """
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    dense = {name: t.detach() for name, t in local.items() if t.layout == torch.strided}
    sums: dict[str, int] = {}
    for device in {t.device for t in dense.values()}:
        here = {name: t for name, t in dense.items() if t.device == device}
        small = {name: t for name, t in here.items() if t.nbytes < _SMALL_BYTES}
        sums.update(_sums_of_small(small))
        if large := {name: weighted_sum(t) for name, t in here.items() if name not in small}:
            sums.update(zip(large, torch.stack([*large.values()]).tolist(), strict=True))
    return {name: _mix((sums[name] & _MASK) ^ _kind_of(t)) for name, t in dense.items()}


def warm_up() -> None:
    """Compute what the first digests on the host need, and have torch load its kernels: 7 ms otherwise.

    Tensors are so small that torch starts no threads.
    """
    tensor_digests({"small": torch.zeros(3), "large": torch.zeros(2 * _ROW)})


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Names of what has other digests in the two, or is in one of them alone."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def listed(names: Sequence[str]) -> str:
    """A few names, and the number of the others."""
    return some(names, 3, of="tensors")


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The weighted sum over the words of a contiguous tensor: an int64 of no dimension, on its device.

    Args:
        tensor: any dtype.
    """
    flat = _bytes_of(tensor)
    whole = flat.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    if whole:
        words = flat[:whole]
        if words.data_ptr() % 8 or words.storage_offset() % 8:
            words = words.clone()
        total = _sum_of_words(words.view(torch.int64))
    if whole < flat.numel():
        total = total * 3 + _scrambled(_padded(flat[whole:].unsqueeze(0)))[0]
    return total


def _sums_of_small(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The weighted sums of tensors of less than a row each, which share a device.

    Those of equal size are summed together: calls of torch would cost more than the sums.
    """
    sizes: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        sizes.setdefault(tensor.nbytes, []).append(name)
    found: dict[str, int] = {}
    for size, names in sizes.items():
        flat = torch.stack([_bytes_of(tensors[name]) for name in names])
        words = size // 8
        block = flat[:, : words * 8].reshape(-1).view(torch.int64).view(len(names), words)
        totals = _row_sums(_scrambled(block), _weights(flat.device)[:words])
        if size % 8:
            totals = totals * 3 + _scrambled(_padded(flat[:, words * 8 :]))
        found.update(zip(names, totals.tolist(), strict=True))
    return found


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)  # an expanded tensor is not contiguous


def _padded(rests: torch.Tensor) -> torch.Tensor:
    """The bytes of each row, less than eight, as one word."""
    words = torch.zeros(len(rests), 8, dtype=torch.uint8, device=rests.device)
    words[:, : rests.shape[1]] = rests
    return words.view(torch.int64)[:, 0]


def _row_sums(block: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # An integer matrix product exists on the host only, where it needs no memory for the products.
    return torch.mv(block, weights) if block.device.type == "cpu" else block.mul_(weights).sum(1)


def _sum_of_words(words: torch.Tensor) -> torch.Tensor:
    weights = _weights(words.device)
    rows = words.numel() // _ROW
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    step = max(1, _BLOCK_BYTES.get(words.device.type, _DEFAULT_BLOCK_BYTES) // (8 * _ROW))
    for begin in range(0, rows, step):
        end = min(rows, begin + step)
        block = _scrambled(words[begin * _ROW : end * _ROW].view(-1, _ROW))
        total += (_row_sums(block, weights) * _row_weights(begin, end, words.device)).sum()
    if rest := words.numel() - rows * _ROW:
        tail = (_scrambled(words[-rest:]) * weights[:rest]).sum()
        total += tail * _row_weights(rows, rows + 1, words.device)[0]
    return total


def _scrambled(words: torch.Tensor) -> torch.Tensor:
    """High bits also count in the low half: an odd weight keeps the highest bit as it is."""
    # Not by 32: if both numbers of 32 bits in a word changed their signs, only its highest bit would change.
    # And torch shifts copies of the sign in, which would make ~x of x there.
    return (words >> _SHIFT).bitwise_and_(_SHIFTED).bitwise_xor_(words)


def _row_weights(begin: int, end: int, device: torch.device) -> torch.Tensor:
    return torch.arange(begin, end, device=device) * _STRIDE + 1


@cache
def _weights(device: torch.device) -> torch.Tensor:
    values = [_mix(index) | 1 for index in range(_ROW)]
    return torch.tensor([v - 2**64 if v >= 2**63 else v for v in values], device=device)


def _mix(value: int) -> int:
    """splitmix64: each bit of the argument changes half of the bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _kind_of(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
