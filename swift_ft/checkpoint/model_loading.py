"""Compares a model with what was saved of one, and gives it that. For optimizers: `optimizer_groups.py`.

Private part used (tested on torch 2.11 to 2.14):

- ``Module._buffers``: a buffer gets another size, and its memory cannot become larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from swift_ft.checkpoint.state_payload import TensorKind
from swift_ft.errors import TopologyMismatchError
from swift_ft.torch_core.model_state import (
    Unmade,
    buffers_by_key,
    is_extra,
    load_model_state,
    loads_itself,
    made_later,
    model_state,
)
from swift_ft.torch_core.shards import Description, describe, note_changed, rebuilt


def check_shapes(
    name: str,
    module: nn.Module,
    own: Mapping[str, torch.Tensor],
    stored: Mapping[str, tuple[int, ...]],
    unmade: Unmade,
    *,
    in_run: bool,
) -> None:
    """Compare this worker's tensors of a model with the shapes of those that were saved.

    Args:
        name: of the part of the state.
        module: the model.
        own: its tensors (this worker's shards), by key.
        stored: shapes, by key.
        unmade: its buffers that were None as the session was made.
        in_run: what is loaded is of this run, and not of one that is resumed.

    Raises:
        TopologyMismatchError: they differ, in more than buffers that may; names a tensor and both shapes.
    """
    ours = {key: tuple(tensor.shape) for key, tensor in own.items()}
    if ours == stored:
        return
    later, buffers = made_later(module, unmade), buffers_by_key(module)
    for key in sorted({*ours, *stored}):
        here, there = ours.get(key), stored.get(key)
        if here == there or key in later:
            continue
        if here is None or there is None or key not in buffers:
            raise does_not_fit(f"{name}.{key}", key, there, here)
        owner, buffer = buffers[key]
        # Of a run that is resumed, what would be taken without swift_ft, and what has begun with nothing.
        grows = in_run or loads_itself(owner) or 0 in (math.prod(here), math.prod(there))
        if describe(buffer) is not None or not grows:
            raise does_not_fit(f"{name}.{key}", key, there, here)


def to_fill(
    module: nn.Module,
    own: Mapping[str, torch.Tensor],
    stored: Mapping[str, TensorKind],
    unmade: Unmade,
    *,
    aside: bool,
) -> dict[str, torch.Tensor]:
    """Tensors for what was saved of a model: its own, and new ones for buffers that are others there.

    Args:
        module: the model.
        own: its tensors (this worker's shards), by key.
        stored: the kinds of those that will arrive, by key.
        unmade: its buffers that were None as the session was made.
        aside: new tensors for all, so that nothing changes before :func:`load_model`.
    """
    filled = dict(own)
    others = stored.keys() ^ own.keys()
    for key in others & made_later(module, unmade).keys() if others else ():
        if (made := stored.get(key)) is not None:
            filled[key] = torch.empty(made.shape, dtype=made.dtype)
        else:
            del filled[key]
    for key, tensor in own.items():
        comes = stored.get(key)
        if comes is not None and comes.shape != tensor.shape:  # a buffer, as checked
            filled[key] = torch.empty(comes.shape, dtype=tensor.dtype, device=tensor.device)
        elif aside and key in filled:
            filled[key] = torch.empty_like(tensor)
    return filled


def load_model(
    name: str,
    module: nn.Module,
    values: Mapping[str, Any],
    parts: Mapping[str, Description],
    unmade: Unmade = MappingProxyType({}),
) -> None:
    """Give a model its saved values.

    Args:
        name: of the part of the state.
        module: the model.
        values: by key; of sharded tensors this worker's shards.
        parts: by key, of what a sharded tensor's shard was a part.
        unmade: its buffers that were None as the session was made.

    Raises:
        TopologyMismatchError: they are of another sharding, or lack what the model keeps beside its tensors.
    """
    own: dict[str, Any] = model_state(module)
    if _make(module, own, values, unmade):
        own = model_state(module)
    for key in sorted(own.keys() ^ values.keys()):
        if is_extra(key, own.get(key)):
            place = "there and not here" if key in values else "here and not there"
            raise TopologyMismatchError(
                f"The state was saved by another model: {name}.{key} (get_extra_state) is {place}. "
                "Start with the same model, or choose another store.",
                key=key,
            )
    for key, tensor in own.items():
        here = None if is_extra(key, tensor) else describe(tensor)
        if here != (there := parts.get(key)):
            raise TopologyMismatchError(
                f"The state was saved with another sharding: {name}.{key} is {_part(there)} there and "
                f"{_part(here)} here. Start with the same mesh, or choose another store.",
                key=key,
            )
    if _resize(module, own, {key: value for key, value in values.items() if key not in parts}):
        own = model_state(module)
    whole = {key: rebuilt(values[key], part, own[key]) for key, part in parts.items()}
    load_model_state(module, {**values, **whole}, own)
    for key in parts:
        note_changed(own[key])


def _make(module: nn.Module, own: Mapping[str, Any], values: Mapping[str, Any], unmade: Unmade) -> bool:
    """Have the buffers that a forward pass makes where what is loaded has them; whether any was another."""
    others = own.keys() ^ values.keys()
    later = made_later(module, unmade) if others else {}
    for key in sorted(others & later.keys()):
        part, name = later[key]
        beside = next((one for held in (part, module) for one in (*held.parameters(), *held.buffers())), None)
        device = beside.device if beside is not None else None
        setattr(part, name, torch.empty_like(values[key], device=device) if key in values else None)
    return not others.isdisjoint(later)


def _resize(module: nn.Module, own: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Give buffers of a model the sizes that they have in what is loaded; whether any had another.

    The code of torch's observers of quantization does so, too; ``load_state_dict()`` does not.
    """
    others = [
        key
        for key, value in values.items()
        if isinstance(value, torch.Tensor) and not is_extra(key, own[key]) and own[key].shape != value.shape
    ]
    buffers = buffers_by_key(module) if others else {}
    with torch.no_grad():
        for key in others:
            if key not in buffers:
                continue
            owner, buffer = buffers[key]
            if _is_alone(buffer):
                buffer.resize_(values[key].shape)
            else:
                owner._buffers[key.rpartition(".")[2]] = buffer.new_empty(values[key].shape)
    return bool(others)


def _is_alone(buffer: torch.Tensor) -> bool:
    """Whether it has memory of its own that may become larger: none of another tensor, and no array's."""
    storage = buffer.untyped_storage()
    return storage.resizable() and storage.nbytes() == buffer.nbytes


def does_not_fit(
    name: str, key: str, there: tuple[int, ...] | None, here: tuple[int, ...] | None
) -> TopologyMismatchError:
    """The error of a checkpoint that has another tensor than this model: another model, or another size.

    Args:
        name: of the tensor, in words.
        there: its whole shape in the checkpoint; None if there is none.
        here: its whole shape in this process, likewise.
    """
    return TopologyMismatchError(
        f"The checkpoint does not fit this model: {name} has {_shape(there)} there and {_shape(here)} here. "
        "Start with the model that was saved, or choose another store. A buffer that grows as it trains is "
        "taken if it begins without elements; else it needs one size, or a place in get_extra_state().",
        key=key,
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"the shape {shape}"


def _part(description: Description | None) -> str:
    if description is None:
        return "not sharded"
    return f"the part at {description['offset']} of the shape {description['shape']}"
