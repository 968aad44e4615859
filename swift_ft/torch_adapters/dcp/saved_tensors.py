"""Reads a tensor that ``torch.save`` wrote straight into the memory where it belongs.

``torch.load`` takes 0.2 ms for the smallest tensor and copies each one twice. The part of a worker has
thousands, and a recovery waits for all of them.

Private parts used (tested on torch 2.11 to 2.14):

- ``torch._C.PyTorchFileReader``: where a record of the archive lies. The records are ``data.pkl``, which
  describes the tensor, ``byteorder``, and ``data/0``, its bytes.
- What ``data.pkl`` names: ``torch._utils._rebuild_tensor_v2`` with a storage, an offset, sizes and strides.
- ``torch.storage._dtype_to_storage_type_map``: the names of storages.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from typing import IO, Any

import torch
from torch import Tensor

_DTYPES = {storage: dtype for dtype, storage in torch.storage._dtype_to_storage_type_map().items()}


def read_into(target: Tensor, file: IO[bytes]) -> bool:
    """Fill a tensor with the one that ``torch.save`` wrote to a file.

    Args:
        target: on the CPU; any shape and dtype.
        file: all of it is that one tensor; at any position.

    Returns:
        False, with the target as it was, if the two are not of one shape, dtype and contiguous layout, or
        the file is written in another way: then ``torch.load`` has to read it.

    Raises:
        OSError: the file cannot be read.
        EOFError: it ends before the tensor does.
    """
    if target.device.type != "cpu" or not target.is_contiguous() or not target.numel():
        return False
    file.seek(0)  # torch takes its position for the archive's beginning
    try:
        archive: Any = torch._C.PyTorchFileReader(file)  # torch declares some of its methods
        described = _Unpickler(io.BytesIO(archive.get_record("data.pkl"))).load()
        order = archive.get_record("byteorder")
        at = archive.get_record_offset("data/0")
    except (RuntimeError, pickle.UnpicklingError):  # not an archive, not a plain tensor, an older torch
        return False
    if not _is_like(described, target) or order != sys.byteorder.encode():
        return False
    file.seek(at)
    _read_all(file, target.view(-1).view(torch.uint8).numpy().data)
    return True


def _is_like(described: object, target: Tensor) -> bool:
    match described:
        case (("storage", dtype, "0", _, elements), 0, size, stride, _, _):  # a seventh: conjugate bits
            shape = (tuple(target.shape), target.stride(), target.numel())
            return dtype == target.dtype and (size, stride, elements) == shape
    return False


def _arguments(*arguments: Any) -> tuple[Any, ...]:
    return arguments


def _read_all(file: IO[bytes], memory: memoryview) -> None:
    while memory:
        count = file.readinto(memory)  # type: ignore[attr-defined]  # all files of bytes have it
        if not count:
            raise EOFError(f"the file ends {len(memory)} bytes before its tensor does")
        memory = memory[count:]


class _Unpickler(pickle.Unpickler):
    """Makes no tensor, and nothing else that the file names: only torch's description of one."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _arguments
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name} belongs to no plain tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid
