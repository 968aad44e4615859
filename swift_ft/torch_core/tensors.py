"""Facts about a tensor that only private names of torch tell.

Private parts used (tested on torch 2.11 to 2.14):

- ``Tensor._version``: counts changes in place. torch has no public way to learn whether a tensor was changed.
- ``DTensor._local_tensor``: FSDP adds gradients up in it, which its ``DTensor`` does not count.
- ``Tensor._indices()``, ``Tensor._values()``: the parts of a sparse tensor as they are. The public methods
  want a coalesced tensor, and coalescing copies.
- ``UntypedStorage._cdata``: which storage a tensor views. Its public address is 0 for all empty storages.
- ``torch.multiprocessing.reductions.StorageWeakRef``: keeps no memory of a storage but its number, which no
  other storage gets meanwhile.

`undo/` stands on this.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element."""

_COUNT = attrgetter("_version")
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that have no other tensor inside."""
_OF_NUMPY = frozenset(
    {
        *(torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
    }
)
"""Element types whose bytes NumPy gives at once, which torch takes several operations for."""

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def version_of(tensor: torch.Tensor) -> int:
    """Grows with each change in place. Always 0 for inference tensors, which do not count their changes."""
    if tensor.is_inference():
        return 0
    if type(tensor) in PLAIN:  # to look for what it has not takes longer
        return tensor._version
    part: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor._version + (part._version if part is not None else 0)


def versions_of(values: Sequence[Any]) -> list[int]:
    """As :func:`version_of`, of many tensors at once; 0 in the place of anything else.

    Of a ``DTensor`` it is the count of the whole, which an operation on it moves.
    """
    try:
        return [*map(_COUNT, values)]
    except (AttributeError, RuntimeError):  # one is no tensor, or an inference tensor
        return [version_of(value) if isinstance(value, torch.Tensor) else 0 for value in values]


def all_versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """As :func:`version_of`, of many tensors at once."""
    try:
        counts = [*map(_COUNT, tensors)]
    except RuntimeError:  # one is an inference tensor
        return [*map(version_of, tensors)]
    if PLAIN.issuperset(map(type, tensors)):
        return counts
    parts = parts_of(tensors)
    return [
        count if part is tensor else count + part._version
        for count, tensor, part in zip(counts, tensors, parts, strict=True)
    ]


def parts_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of some tensors that this worker has: of a ``DTensor`` its shard, of others all."""
    return [
        tensor if type(tensor) in PLAIN else getattr(tensor, "_local_tensor", tensor) for tensor in tensors
    ]


def sparse_indices(tensor: torch.Tensor) -> torch.Tensor:
    """The indices of a sparse COO tensor, int64 of shape (sparse dims, nnz), duplicates included."""
    return tensor._indices()


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse COO tensor, one row for each column of :func:`sparse_indices`."""
    return tensor._values()


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a tensor consists of: itself, or the indices and values of a sparse one.

    None of a layout that neither is dense nor has such parts.
    """
    tensor = tensor.detach()
    if tensor.layout == torch.strided:
        return [tensor]
    if tensor.is_sparse:
        return [sparse_indices(tensor), sparse_values(tensor)]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def parts_bytes(tensor: torch.Tensor) -> int:
    """Bytes of all dense tensors that a tensor consists of."""
    return sum(part.nbytes for part in dense_parts(tensor))


def same_parts(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one device are equal bit for bit, also in how sparse ones keep their values.

    No sparse one is made dense: it may be of any shape.
    """
    form = one.layout, one.shape, one.is_sparse and one.is_coalesced()
    if form != (other.layout, other.shape, other.is_sparse and other.is_coalesced()):
        return False
    return all(same_bits(a, b) for a, b in zip(dense_parts(one), dense_parts(other), strict=True))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists, tuples and dictionaries, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)


def copied(value: Any) -> Any:
    """A deep copy of a ``state_dict()``; of a tensor with a graph, which torch does not copy, its values."""
    made = {id(one): one.detach().clone() for one in tensors_in(value) if one.grad_fn is not None}
    return copy.deepcopy(value, made)


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of some tensors, each once, however many tensors view it. Of a sparse one, its values'."""
    return list({storage._cdata: storage for storage in map(_storage_of, tensors)}.values())


def storage_id(tensor: torch.Tensor) -> int:
    """Names the storage that a tensor views, for as long as that lives: in a sparse tensor, its values do."""
    return int(_storage_of(tensor)._cdata)


def storage_names(tensors: Iterable[torch.Tensor]) -> dict[int, object]:
    """The :func:`storage_id` of some tensors. No younger storage gets one as long as its value here is held.

    That keeps no tensor alive, and no memory of its elements.
    """
    return {storage._cdata: StorageWeakRef(storage) for storage in map(_storage_of, tensors)}


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the storage that a tensor views, and its bytes. Of a sparse tensor, as of its values."""
    storage = _storage_of(tensor)
    return storage.data_ptr(), storage.nbytes()


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    if tensor.is_sparse:
        tensor = sparse_values(tensor.detach())
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.detach().values()
    return tensor.untyped_storage()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a dense tensor's elements, as integers of shape (elements,).

    A view where the tensor is contiguous, a copy otherwise. A complex number counts as two elements.
    """
    flat = tensor.detach().reshape(-1).resolve_neg()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    elif flat.is_quantized:
        flat = flat.int_repr()
    return flat.view(_INTEGERS[flat.element_size()])


def plain_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous memory of the host without lazy conjugation or negation: the tensor's own if it is that."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a dense tensor in row-major order.

    A contiguous CPU tensor is not copied: the view shares (and keeps alive) its storage. Any other tensor is
    copied into that form first, from another device synchronously.
    """
    plain = tensor.dtype in _OF_NUMPY and type(tensor) in PLAIN and tensor.is_cpu
    if plain and tensor.layout == torch.strided:
        with contextlib.suppress(RuntimeError):  # it is negated lazily
            array = tensor.detach().numpy()
            if array.flags.c_contiguous:
                return array.reshape(-1).view(np.uint8).data
    return plain_on_host(tensor).reshape(-1).view(torch.uint8).numpy().data


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors of one device are equal bit for bit: NaN equals itself, 0.0 is not -0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = bits_of(one), bits_of(other)
    if all(map(_may_be_wide, bits)):  # a comparison takes as long for a byte as for eight
        bits = bits[0].view(torch.int64), bits[1].view(torch.int64)
    return torch.equal(*bits)


def same_values(one: Any, other: Any, *, incomparable: bool = False) -> bool:
    """Whether two values are of one type and alike: also in lists, tuples and mappings.

    Tensors are compared bit for bit, by their values where they are sparse, and NaN equals itself.

    Args:
        one: a tensor, a plain value, or a container of these.
        other: another one. Its tensors may be on another device.
        incomparable: the answer for values that cannot be compared.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.layout == other.layout and same_bits(_dense(one), _dense(other).to(one.device))
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(
            same_values(one[key], other[key], incomparable=incomparable) for key in one
        )
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(same_values(a, b, incomparable=incomparable) for a, b in pairs)
    if isinstance(one, float):
        return repr(one) == repr(other)
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return incomparable


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.detach().to_dense()


def write_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a dense tensor the values that it had before.

    Nothing is written where it has them, since its memory may be a file that is mapped for reading. torch
    refuses to write to an expanded tensor, in which one place in the memory is several elements, and to an
    inference tensor outside of its mode.
    """
    if tensor.is_meta or same_bits(tensor, values):
        return
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        here = tensor.detach()
        for dim in expanded_dims(here):
            here, values = here.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        here.copy_(values)


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """A view in which each element has a place of its own in the memory, of another shape if need be."""
    for dim in expanded_dims(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def expanded_dims(tensor: torch.Tensor) -> list[int]:
    """The dimensions in which one place in the memory is several elements."""
    sizes = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [dim for dim, (size, step) in sizes if step == 0 and size > 1]


def _may_be_wide(bits: torch.Tensor) -> bool:
    """Whether eight bytes can be one element of these."""
    aligned = bits.nbytes % 8 == 0 and bits.storage_offset() * bits.element_size() % 8 == 0
    return aligned and bits.is_contiguous()  # an expanded one is not
