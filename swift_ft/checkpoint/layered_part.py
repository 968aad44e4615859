"""Puts a worker's part of a checkpoint together from those of other workers, layer by layer.

A checkpoint of another layout has the layers of this worker in several parts. From each of them only these
layers are read. What belongs to no layer (a scheduler, a scaler) comes from the worker's own part.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from swift_ft.checkpoint.layered_state import LayeredState
from swift_ft.checkpoint.state_payload import StatePath, TensorKind, pack, unpack
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import CheckpointError
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.torch_adapters.dcp import PartReader

__all__ = ["kinds_of", "load_layers", "sources_of"]


def kinds_of(reader: PartReader) -> dict[StatePath, TensorKind]:
    """The tensors of a part, by their path."""
    stored = reader.read_metadata()
    paths = stored.planner_data or {}
    return {
        paths.get(flat, tuple(flat.split("."))): TensorKind(meta.properties.dtype, tuple(meta.size))
        for flat, meta in stored.state_dict_metadata.items()
        if isinstance(meta, TensorStorageMetadata)
    }


def sources_of(
    wanted: Sequence[int], placed: Mapping[int, Sequence[int]], rank: int
) -> dict[int, tuple[int, ...]]:
    """Which layers are read from whose part. The first is the part for what belongs to no layer.

    Args:
        wanted: layers of this worker.
        placed: the layers of each part, by rank.
        rank: this worker. A run with fewer workers had no part of it: then the last worker's.

    Raises:
        CheckpointError: if no part has one of the layers.
    """
    own = rank if rank in placed else max(placed)
    found: dict[int, list[int]] = {own: []}
    for layer in wanted:
        holder = next((other for other in (own, *placed) if layer in placed[other]), None)
        if holder is None:
            raise CheckpointError(f"No part of the checkpoint has layer {layer}: start with the same model.")
        found.setdefault(holder, []).append(layer)
    return {holder: tuple(layers) for holder, layers in found.items()}


def load_layers(
    readers: Mapping[int, PartReader],
    sources: Mapping[int, Sequence[int]],
    layout: StageLayers,
    layered: LayeredState,
    state: TrainingState,
) -> list[str]:
    """Make the state what the parts have of a layout's layers.

    Args:
        readers: of the parts, by rank.
        sources: as :func:`sources_of` returned them.
        layout: the number of layers of each stage.
        layered: the stacks of layers in the state.
        state: of the session.

    Returns:
        Names of tensors that are not what was saved, as far as digests came with them.
    """
    pieces = [
        _read(readers[rank], set(layers), layered, own=number == 0)
        for number, (rank, layers) in enumerate(sources.items())
    ]
    own = pieces[0]["plain"]
    groups = {
        name: {
            known_as: group for piece in pieces for known_as, group in piece["groups"].get(name, {}).items()
        }
        for name in state.optimizers
    }
    layered.arrange(layout, groups)
    optimizers, plain = {}, {}
    for name, optimizer in state.optimizers.items():
        tensors, values, lists = _optimizer(name, optimizer, pieces, state)
        kept = [{**group, "params": own} for group, own in zip(_groups(own, name), lists, strict=True)]
        optimizers[name] = {"state": tensors}
        plain[name] = {"state": values, "param_groups": kept}
    models: dict[str, dict[str, Any]] = {name: {} for name in state.modules}
    for piece in pieces:
        for name, tensors in piece["models"].items():
            models[name] |= tensors
    digests: dict[str, int] = {}
    for piece in reversed(pieces):
        digests |= piece["plain"]["digests"]
    state.check_models(models)
    # What the optimizers keep is not there yet: their digests are chosen by the parameters' names.
    parameters = {*state.named_tensors()}
    of_here = {n: d for n, d in digests.items() if n in parameters or n.partition(" of ")[2] in parameters}
    rest = {"small": own["small"], "optimizers": plain, "digests": of_here, "shards": own["shards"]}
    return state.take_over(
        {"models": models, "optimizers": optimizers, "plain": {"bytes": io.BytesIO(pack(rest))}}
    )


def _groups(plain: Mapping[str, Any], optimizer: str) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = plain["optimizers"][optimizer]["param_groups"]
    return groups


def _read(reader: PartReader, layers: set[int], layered: LayeredState, *, own: bool) -> dict[str, Any]:
    """What one part has of some layers and, if it is the worker's own, of what belongs to no layer."""
    content = {"plain": {"bytes": io.BytesIO()}}
    reader.fill(content)
    plain = unpack(content["plain"]["bytes"].getvalue())

    def wanted(part: str, name: str) -> bool:
        layer = layered.layer_of(part, name)
        return own if layer is None else layer in layers

    names = {name: _names(saved) for name, saved in plain["optimizers"].items()}
    models: dict[str, dict[str, torch.Tensor]] = {}
    states: dict[str, dict[str, dict[str, Any]]] = {}
    for path, kind in kinds_of(reader).items():
        empty = torch.empty(kind.shape, dtype=kind.dtype)
        if path[0] == "models" and wanted(path[1], path[2]):
            models.setdefault(path[1], {})[path[2]] = empty
        elif path[0] == "optimizers":
            _, name, _, index, field = path
            known_as = names[name].get(int(index))
            if known_as is not None and wanted(*known_as):
                states.setdefault(name, {}).setdefault(index, {})[field] = empty
    reader.fill({"models": models, "optimizers": {name: {"state": s} for name, s in states.items()}})
    found: dict[str, Any] = {"plain": plain, "models": models, "groups": {}, "tensors": {}, "values": {}}
    for name, saved in plain["optimizers"].items():
        group_of = {i: number for number, group in enumerate(saved["param_groups"]) for i in group["params"]}
        chosen = {i: "/".join(known_as) for i, known_as in names[name].items() if wanted(*known_as)}
        found["groups"][name] = {known_as: group_of[i] for i, known_as in chosen.items()}
        found["tensors"][name] = {chosen[int(i)]: fields for i, fields in states.get(name, {}).items()}
        found["values"][name] = {chosen[int(i)]: v for i, v in saved["state"].items() if int(i) in chosen}
    return found


def _names(saved: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
    """By the saved index of a parameter: its part and its name there."""
    if "names" not in saved:
        raise CheckpointError(
            "An earlier version wrote this checkpoint, without the names of parameters: resume with as many "
            "machines as it was made with."
        )
    return {index: tuple(name) for index, name in enumerate(saved["names"]) if name is not None}


def _optimizer(
    name: str, optimizer: torch.optim.Optimizer, pieces: Sequence[Mapping[str, Any]], state: TrainingState
) -> tuple[dict[str, Any], dict[str, Any], list[list[int]]]:
    """An optimizer's tensors and plain values, by the parameter's index, and the indices of its groups."""
    names = {parameter: "/".join(known_as) for parameter, known_as in state.parameter_names().items()}
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    lists: list[list[int]] = []
    index = 0
    for group in optimizer.param_groups:
        lists.append([])
        for parameter in group["params"]:
            known_as = names.get(parameter, "")
            for piece in pieces:
                if found := piece["tensors"][name].get(known_as):
                    tensors[str(index)] = found
                if known_as in piece["values"][name]:
                    values[str(index)] = piece["values"][name][known_as]
            lists[-1].append(index)
            index += 1
    return tensors, values, lists
