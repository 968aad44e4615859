"""Plain values as text that every worker can read: numbers keep all their bits, tensors their dtype."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import torch

_TENSOR, _TUPLE, _PAIRS, _MEMBER = "swift_ft.tensor", "swift_ft.tuple", "swift_ft.dict", "swift_ft.member"
_LENGTHS = "swift_ft.lengths"
_ATOMS = (bool, int, float, str, type(None))
_MOST = 1 << 14
"""Elements of a tensor. Larger ones are data, or belong into a module."""
_FEW = 64
"""Keys of a dictionary, such as the lists of an epoch's predictions and targets."""
MISSING: Any = object()
"""In the place of a value that is not plain."""


def plain(value: Any) -> Any:
    """A value as JSON can hold it; MISSING if some of it is not plain."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if type(value) in (list, tuple):
        items = [plain(item) for item in value]
        if any(item is MISSING for item in items):
            return MISSING
        return items if type(value) is list else {_TUPLE: items}
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        pairs = [[plain(key), plain(item)] for key, item in value.items()]
        return MISSING if any(part is MISSING for pair in pairs for part in pair) else {_PAIRS: pairs}
    return MISSING


def plain_variables(owner: object, too_large: Collection[str] = ()) -> dict[str, Any]:
    """The variables of an object that are plain, by name; of those that are too large, the lengths."""
    found = {
        name: lengths(value)
        if name in too_large
        else {_MEMBER: value.name}
        if isinstance(value, Enum)
        else plain(value)
        for name, value in vars(owner).items()
    }
    return {name: value for name, value in found.items() if value is not MISSING}


def lengths(value: Any) -> dict[str, Any]:
    """In the place of a plain value: how long lists are that it consists of."""
    return {_LENGTHS: _lengths(value)}


def _lengths(value: Any) -> Any:
    if isinstance(value, dict):
        few = len(value) <= _FEW and all(type(key) in _ATOMS for key in value)
        return [[key, _lengths(item)] for key, item in value.items()] if few else None
    return len(value) if isinstance(value, list) else None


def _cut(value: Any, wanted: Any) -> bool:
    """Cut a value to its lengths of before. False if some of it is not there."""
    if isinstance(wanted, int):
        if not isinstance(value, list) or len(value) < wanted:
            return False
        del value[wanted:]
    if isinstance(wanted, list):
        if not isinstance(value, dict):
            return False
        parts = dict(wanted)
        for key in value.keys() - parts.keys():
            del value[key]
        found = [_cut(value.get(key), part) for key, part in parts.items()]
        return all(found)
    return True


def restored(form: Any) -> Any:
    """The value that was given to :func:`plain`."""
    if isinstance(form, list):
        return [restored(item) for item in form]
    if isinstance(form, dict):
        if _TENSOR in form:
            return _from_tensor(*form[_TENSOR])
        if _TUPLE in form:
            return tuple(restored(item) for item in form[_TUPLE])
        return {restored(key): restored(item) for key, item in form[_PAIRS]}
    return form


def put_back(owner: object, variables: Mapping[str, Any]) -> list[str]:
    """Give an object the plain variables that it had. Names those that were too large, and are lost."""
    own, missing = vars(owner), []
    for name, form in variables.items():
        # One that is not plain any more has become something that no other worker could know.
        now = own.get(name)
        if isinstance(form, dict) and _MEMBER in form:
            if isinstance(now, Enum):
                own[name] = type(now)[form[_MEMBER]]
            continue
        if isinstance(form, dict) and _LENGTHS in form:
            missing += [] if _cut(now, form[_LENGTHS]) else [name]
            continue
        value = restored(form)
        if isinstance(now, dict) and isinstance(value, dict):
            now.clear()
            now.update(value)
        elif isinstance(now, list) and isinstance(value, list):
            now[:] = value
        else:
            own[name] = value
    return missing


def to_text(form: Any) -> str:
    """A result of :func:`plain` as a line."""
    return json.dumps(form, separators=(",", ":"))


def from_text(text: str) -> Any:
    """The inverse."""
    return json.loads(text)


def _tensor(value: torch.Tensor) -> Any:
    if (
        value.numel() > _MOST
        or value.grad_fn is not None
        or value.layout != torch.strided
        or type(value) is not torch.Tensor
    ):
        return MISSING
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return {
        _TENSOR: [
            str(value.dtype).removeprefix("torch."),
            [*value.shape],
            bytes(data.tolist()).hex(),
            str(value.device),
        ]
    }


def _from_tensor(dtype: str, shape: list[int], data: str, device: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    raw = bytearray.fromhex(data)
    flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
    return flat.clone().reshape(shape).to(device if device.partition(":")[0] == "cpu" else _here(device))


def _here(device: str) -> torch.device:
    """The worker that wrote it may have had another accelerator of its machine."""
    return torch.device(device.partition(":")[0])
