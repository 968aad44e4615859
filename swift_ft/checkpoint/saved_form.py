"""The form of a state that is saved: nested dictionaries, as DCP stores them.

"models"      part  name                        a live tensor, or this worker's shard of it
"optimizers"  part  "state"  parameter  field   likewise; parameters by their numbers
"plain"       "bytes"                           a file with all the rest, packed
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from swift_ft.checkpoint.state_payload import tensors_in
from swift_ft.errors import UnsupportedError
from swift_ft.torch_core.model_state import is_extra, plain_name
from swift_ft.torch_core.optimizers import parameters_of
from swift_ft.torch_core.shards import describe, local

FORM = ("order", "strides")
"""The keys of :func:`fields_in`."""


def place_of(part: str, name: str) -> tuple[str, str]:
    """A parameter's part of the state, and its name there, which wrappers around layers do not change."""
    return part, plain_name(name)


def by_plain_names(digests: Mapping[str, int]) -> dict[str, int]:
    """Digests of tensors by names that wrappers around layers do not change: a resume may have others."""
    return {plain_name(name): digest for name, digest in digests.items()}


def bytes_of(saved: Mapping[str, Any]) -> int:
    """Size of the tensors in what :meth:`TrainingState.to_save` returned."""
    return sum(tensor.nbytes for _, tensor in tensors_in(saved))


def tensors_of(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Of a model's state, its parameters and buffers."""
    return {key: value for key, value in values.items() if not is_extra(key, value)}


def extra_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model's state, all else: what ``get_extra_state`` returned."""
    return {key: value for key, value in values.items() if is_extra(key, value)}


def localized(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The same with this worker's shard in the place of each sharded tensor."""
    return {
        key: localized(value)
        if isinstance(value, Mapping)
        else (local(value) if isinstance(value, torch.Tensor) else value)
        for key, value in nested.items()
    }


def descriptions_in(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The placements that :func:`localized` leaves out, at the same keys; empty without sharded tensors."""
    found = {
        key: descriptions_in(value)
        if isinstance(value, Mapping)
        else (describe(value) if isinstance(value, torch.Tensor) else None)
        for key, value in nested.items()
    }
    return {key: value for key, value in found.items() if value}


def split_tensors(
    state: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, Any]]]:
    """An optimizer's state by parameter: its tensors, and its plain values."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    rest: dict[str, dict[str, Any]] = {}
    for parameter, fields in state.items():
        rest[str(parameter)] = {k: v for k, v in fields.items() if not isinstance(v, torch.Tensor)}
        if found := {k: v for k, v in fields.items() if isinstance(v, torch.Tensor)}:
            tensors[str(parameter)] = found
    return tensors, rest


def fields_in(
    state: Mapping[int, Mapping[str, Any]], parameters: Sequence[torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """The order and strides that are lost in :func:`split_tensors`; nothing of most optimizers.

    Args:
        state: of an optimizer, by the numbers of its parameters.
        parameters: by number.

    Returns:
        ``order``: by parameter, the names of its fields, where plain values follow tensors.
        ``strides``: by parameter and field, those of :func:`own_strides`.
    """
    order, strides = {}, {}
    for parameter, fields in state.items():
        names = [*fields]
        if names != sorted(names, key=lambda name: isinstance(fields[name], torch.Tensor)):
            order[str(parameter)] = names
        if found := own_strides(fields, parameters[parameter]):
            strides[str(parameter)] = found
    return {"order": order, "strides": strides} if order or strides else {}


def own_strides(fields: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, list[int]]:
    """The strides of an optimizer's tensors, by field, but for those that :func:`laid_out` gives unasked.

    Those of most tensors are their parameter's, and so they are where the parameter has others: a fused step
    reads both by their places in memory.
    """
    found, beside = {}, _strides_beside(parameter)
    for name, value in fields.items():
        if not isinstance(value, torch.Tensor) or (here := local(value)).layout != torch.strided:
            continue
        alike = beside is not None and here.shape == local(parameter).shape
        if here.stride() != beside if alike else not here.is_contiguous():
            found[name] = [*here.stride()]
    return found


def laid_out(
    tensor: torch.Tensor, parameter: torch.Tensor, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """A tensor that an optimizer keeps for a parameter, in the memory format that it had at its source.

    Args:
        tensor: its values, of this worker.
        parameter: a tensor of its shape gets its strides, as ``torch.zeros_like()`` gives them.
        strides: its own ones, of :func:`own_strides`. Those of another shape are not taken.
    """
    if strides is None or not _are_dense(tensor.shape, strides):
        strides = _strides_beside(parameter) if tensor.shape == local(parameter).shape else None
    return with_strides(tensor, strides)


def _strides_beside(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a new tensor like a parameter; None if it has none."""
    here = local(parameter)
    if here.layout != torch.strided:
        return None
    if here.is_contiguous() or _are_dense(here.shape, here.stride()):
        return here.stride()
    # A parameter that is a part of a tensor has others than a new one: torch leaves no room in that.
    return torch.empty_like(torch.empty_strided(here.shape, here.stride(), device="meta")).stride()


def with_strides(tensor: torch.Tensor, strides: Sequence[int] | None) -> torch.Tensor:
    """A tensor with other strides; the same one where these are of another shape, or none."""
    if strides is None or tensor.layout != torch.strided or tensor.stride() == tuple(strides):
        return tensor
    if not _are_dense(tensor.shape, strides):
        return tensor
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor.detach())


def _are_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each element of a tensor has a place of its own, and none is between two of them."""
    places = 1
    for stride, length in sorted(zip(strides, shape, strict=False)):
        if length != 1 and stride != places:
            return False
        places *= length
    return len(shape) == len(strides)


def check_keys(name: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """See that all state in an optimizer's ``state_dict()`` is of its parameters, its tensors by names.

    Raises:
        UnsupportedError: names the optimizer and the key of other state, or of a parameter.
    """
    numbers = dict.fromkeys(number for group in saved["param_groups"] for number in group["params"])
    places = range(len(parameters_of(optimizer)))
    if (name_of := next((one for one in numbers if one not in places), None)) is not None:
        raise UnsupportedError(
            f"Session(state): state_dict() of {name} ({type(optimizer).__name__}) knows a parameter as "
            f"{name_of!r}, and not by its place among all: it could not be loaded again. Number them from 0 "
            "in the order of the groups, as torch.optim does."
        )
    if (other := next((key for key in saved["state"] if key not in numbers), None)) is not None:
        raise UnsupportedError(
            f"Session(state): {name} ({type(optimizer).__name__}) keeps state under {other!r}, which is none "
            "of its parameters: it could not be loaded again. Keep it in the state of a parameter, or in a "
            "group of parameters (optimizer.param_groups)."
        )
    tensors = ((number, *item) for number, fields in saved["state"].items() for item in fields.items())
    for number, key, value in tensors:
        # DCP makes text of each key. A load would leave it beside the optimizer's own, which begins anew.
        if isinstance(value, torch.Tensor) and not isinstance(key, str):
            raise UnsupportedError(
                f"Session(state): {name} ({type(optimizer).__name__}) keeps a tensor for parameter {number} "
                f"under {key!r}, and names in a checkpoint are text: the optimizer would not find it after a "
                f"load. Keep it under {str(key)!r}."
            )


def shown_value(path: Sequence[Any]) -> str:
    """The name of a plain value in an error: its part of the state, and the keys in there."""
    keys = [*path]
    for prefix in (("small", "parts"), ("optimizers",), ("extra",)):
        if tuple(keys[: len(prefix)]) == prefix and len(keys) > len(prefix):
            part, *rest = keys[len(prefix) :]
            if prefix == ("extra",) and rest:
                part = f"{part}.{rest.pop(0)}"
            return f"Session(state): {part}" + "".join(f"[{key!r}]" for key in rest)
    return "Session(state): " + "".join(f"[{key!r}]" for key in keys)


def as_file(data: bytes) -> io.BytesIO:
    """As which DCP stores bytes; its position is at the end, as it always was in checkpoints."""
    file = io.BytesIO()
    file.write(data)
    return file
