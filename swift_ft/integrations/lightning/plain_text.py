"""Plain values as text that every worker can read: numbers keep all their bits, tensors their dtype."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

_TENSOR, _TUPLE, _PAIRS, _MEMBER = "swift_ft.tensor", "swift_ft.tuple", "swift_ft.dict", "swift_ft.member"
_LENGTHS, _ITEMS, _VALUE = "swift_ft.lengths", "swift_ft.items", "swift_ft.value"
_ATOMS = (bool, int, float, str, type(None))
_MOST = 1 << 14
"""Elements of a tensor. Larger ones are data, or belong into a module."""
_FEW = 64
"""Of what is too large, so many keys of a dictionary are told, such as those of an epoch's predictions and
targets, lists in a list, such as one for each task, elements of a tensor and letters of a text."""
_DEEPEST = 3
"""Containers in containers of which that is told."""
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


def plain_variables(owner: object, too_large: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The variables of an object that are plain, by name.

    Args:
        owner: the object.
        too_large: forms in the place of some of them, by name: see :func:`measured`.
    """
    forms = too_large or {}
    found = {
        name: forms[name]
        if name in forms
        else {_MEMBER: value.name}
        if isinstance(value, Enum)
        else plain(value)
        for name, value in vars(owner).items()
    }
    return {name: value for name, value in found.items() if value is not MISSING}


def measured(value: Any) -> tuple[dict[str, Any], int]:
    """In the place of a plain value, what tells it from a later one: how long lists are that it consists of.

    Returns:
        That, and the number of all values in it.
    """
    form, count = _measured(value, _DEEPEST)
    return {_LENGTHS: form}, count


def is_measure(form: Any) -> bool:
    """Whether a form is of :func:`measured`."""
    return isinstance(form, dict) and _LENGTHS in form


def _measured(value: Any, depth: int) -> tuple[Any, int]:
    """None for what cannot be compared later."""
    if isinstance(value, dict):
        inner = [_measured(item, depth - 1) for item in value.values()]
        known = depth and len(value) <= _FEW and all(type(key) in _ATOMS for key in value)
        forms = [[key, form] for key, (form, _) in zip(value, inner, strict=True)]
        return forms if known else None, sum(count for _, count in inner)
    if isinstance(value, list | tuple):
        if len(value) > _FEW and not isinstance(value[-1], list | tuple | dict):
            return len(value), len(value)  # to look at each would take long
        inner = [_measured(item, depth - 1) for item in value]
        known = depth and len(value) <= _FEW
        form = {_ITEMS: [form for form, _ in inner]} if known else len(value)
        return form, sum(count for _, count in inner)
    count = len(value) if isinstance(value, str) else value.numel() if isinstance(value, torch.Tensor) else 1
    kept = plain(value) if count <= _FEW else MISSING
    return None if kept is MISSING else {_VALUE: kept}, count


def _as_before(value: Any, form: Any) -> Any:
    """A value as it was when it was measured, with all lists in it cut; MISSING if that is not known."""
    if isinstance(form, list):
        return _dict_as_before(value, form)
    if isinstance(form, int) or (isinstance(form, dict) and _ITEMS in form):
        length = form if isinstance(form, int) else len(form[_ITEMS])
        if not isinstance(value, list | tuple) or len(value) < length:
            return MISSING
        if isinstance(form, int):
            found = [*value[:length]]
        else:
            pairs = zip(value, form[_ITEMS], strict=False)
            found = [_as_before(item, inner) for item, inner in pairs]
        if any(item is MISSING for item in found):
            return MISSING
        if isinstance(value, tuple):
            return tuple(found)
        value[:] = found
        return value
    return restored(form[_VALUE]) if isinstance(form, dict) else MISSING


def _dict_as_before(value: Any, forms: list[list[Any]]) -> Any:
    if not isinstance(value, dict):
        return MISSING
    parts = dict(forms)
    for key in value.keys() - parts.keys():
        del value[key]
    found = {key: _as_before(value.get(key), form) for key, form in parts.items()}
    value.update((key, item) for key, item in found.items() if item is not MISSING)
    return MISSING if any(item is MISSING for item in found.values()) else value


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
        if is_measure(form):
            before = _as_before(now, form[_LENGTHS])
            if before is MISSING:
                missing.append(name)
            else:
                own[name] = before
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
