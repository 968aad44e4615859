"""A worker's part of a checkpoint by layer: written so, and put together from those of other workers.

Each layer is in a file of its own. A checkpoint of another layout has the layers of this worker in several
parts. From each of them only these layers' files are read.
What belongs to no layer (a scheduler, a scaler, a variable of the script) comes from the worker's own part.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from swift_ft.checkpoint.layered_state import LayeredState, merged_values
from swift_ft.checkpoint.optimizer_groups import InGroup, Options, options_of
from swift_ft.checkpoint.saved_form import FORM, by_plain_names, place_of
from swift_ft.checkpoint.stale_gradients import Place, as_saved, from_saved
from swift_ft.checkpoint.state_digest import STORED_AS, StateDigests
from swift_ft.checkpoint.state_payload import StatePath, TensorKind, interned, pack, unpack
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import CheckpointError, TopologyMismatchError
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.torch_adapters.dcp.writer import FileOf
from swift_ft.torch_core.model_state import plain_name

_K = TypeVar("_K")
_T = TypeVar("_T")


class StateReader(Protocol):
    """Reads one worker's part. :class:`swift_ft.torch_adapters.dcp.reader.PartReader` is one."""

    def kinds(self) -> Mapping[StatePath, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and shape of each of its tensors, by path."""

    def fill(self, state: dict[str, Any]) -> None:
        """Load the part into the tensors of a state, and its plain bytes into a ``BytesIO`` there."""


@dataclass(frozen=True, slots=True)
class _OfParameter:
    """An optimizer's state for one parameter, and the parameter group that it is in.

    Attributes:
        form: what :func:`~swift_ft.checkpoint.saved_form.fields_in` says of the fields.
    """

    group: InGroup
    values: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    form: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One part's content of some layers.

    Attributes:
        plain: all plain values of the part.
        models: tensors of models, by part of the state and by name.
        optimizers: by optimizer, and by the parameter's part and name: ``model/7.weight``.
        extra: what modules keep beside tensors, by part of the state and by name.
        carried: variables of the script, by path and name.
        gradients: the forms of stale gradients.
    """

    plain: Mapping[str, Any]
    models: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    optimizers: dict[str, dict[str, _OfParameter]] = field(default_factory=dict)
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    carried: dict[str, dict[str, Any]] = field(default_factory=dict)
    gradients: dict[Place, int] = field(default_factory=dict)


def file_by_layer(layered: LayeredState) -> FileOf | None:
    """The file of a part that a value goes to: one for each layer. None without layers: there is one file."""
    if not layered.count:
        return None
    names = layered.names_in_optimizers()

    def file_of(path: tuple[str, ...]) -> int:
        known_as = None
        if path[0] == "models":
            known_as = path[1], path[2]
        elif path[0] == "optimizers":
            known_as = names[path[1]][int(path[3])]
        layer = layered.layer_of(*known_as) if known_as is not None else None
        return 0 if layer is None else 1 + layer

    return file_of


def kinds_of(reader: StateReader) -> dict[StatePath, TensorKind]:
    """The tensors of a part, by their path."""
    return {interned(path): TensorKind(dtype, shape) for path, (dtype, shape) in reader.kinds().items()}


def sources_of(
    wanted: Sequence[int], placed: Mapping[int, Sequence[int]], rank: int
) -> dict[int, tuple[int, ...]]:
    """The layers to read from each part, by its rank. The first part also has what belongs to no layer.

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
    readers: Mapping[int, StateReader],
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

    Returns:
        Names of tensors that are not what was saved, as far as digests came with them.
    """
    pieces = [
        _read(readers[rank], {*layers}, layered, own=number == 0)
        for number, (rank, layers) in enumerate(sources.items())
    ]
    kept = {name: _merged([piece.optimizers[name] for piece in pieces]) for name in state.optimizers}
    own = pieces[0].plain
    groups: dict[str, dict[str, int]] = {}
    options: dict[str, list[Options]] = {}
    for name in state.optimizers:
        came = {known_as: one.group for known_as, one in kept[name].items()}
        of_own = options_of(own["optimizers"][name]["param_groups"])
        groups[name], options[name] = layered.groups_here(name, came, of_own)
    layered.arrange(layout, groups)
    models = {name: _merged([piece.models.get(name, {}) for piece in pieces]) for name in state.modules}
    state.check_models(models)
    optimizers, plain = {}, {}
    for name in state.optimizers:
        optimizers[name], plain[name] = _as_saved(name, kept[name], options[name], state)
    rest = {
        "small": own["small"],
        "optimizers": plain,
        "extra": {name: _merged([piece.extra.get(name, {}) for piece in pieces]) for name in state.modules},
        "carried": merged_values(piece.carried for piece in pieces),
        STORED_AS: _digests_of_here([piece.plain[STORED_AS] for piece in pieces], state),
        "shards": own["shards"],
        "run": own.get("run", ""),
    }
    if all("gradients" in piece.plain for piece in pieces):  # older parts say nothing of them
        rest["gradients"] = as_saved(_merged([piece.gradients for piece in pieces]))
    return state.take_over(
        {"models": models, "optimizers": optimizers, "plain": {"bytes": io.BytesIO(pack(rest))}}
    )


def _merged(found: Sequence[Mapping[_K, _T]]) -> dict[_K, _T]:
    return {name: value for one in found for name, value in one.items()}


def _read(reader: StateReader, layers: set[int], layered: LayeredState, *, own: bool) -> _Piece:
    """Read from one part some layers and, if it is the worker's own, what belongs to no layer."""
    content = {"plain": {"bytes": io.BytesIO()}}
    reader.fill(content)
    piece = _Piece(unpack(content["plain"]["bytes"].getvalue()))

    def wanted(part: str, name: str) -> bool:
        layer = layered.layer_of(part, name)
        return own if layer is None else layer in layers

    for part, values in piece.plain["extra"].items():
        piece.extra[part] = {name: value for name, value in values.items() if wanted(part, name)}
    wanted_layers: set[int | None] = {*layers, *((None,) if own else ())}
    gradients = from_saved(piece.plain.get("gradients", {}))
    piece.gradients.update({place: form for place, form in gradients.items() if wanted(*place)})
    piece.carried.update(layered.values_in(piece.plain["carried"], wanted_layers))
    saved = piece.plain["optimizers"]
    names = {name: _names(one) for name, one in saved.items()}
    states: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in saved}
    for path, kind in kinds_of(reader).items():
        empty = torch.empty(kind.shape, dtype=kind.dtype)
        if path[0] == "models" and wanted(path[1], path[2]):
            piece.models.setdefault(path[1], {})[path[2]] = empty
        elif path[0] == "optimizers":
            _, name, _, index, of = path
            if (known_as := names[name].get(int(index))) is not None and wanted(*known_as):
                states[name].setdefault(index, {})[of] = empty
    reader.fill({"models": piece.models, "optimizers": {name: {"state": s} for name, s in states.items()}})
    for name, one in saved.items():
        group_of = {i: number for number, group in enumerate(one["param_groups"]) for i in group["params"]}
        options = options_of(one["param_groups"])
        values = {int(i): v for i, v in one["state"].items()}
        piece.optimizers[name] = {
            "/".join(known_as): _OfParameter(
                InGroup(group_of[i], options),
                values.get(i, {}),
                states[name].get(str(i), {}),
                {key: one[key][str(i)] for key in FORM if str(i) in one.get(key, {})},
            )
            for i, known_as in names[name].items()
            if wanted(*known_as)
        }
    return piece


def _names(saved: Mapping[str, Any]) -> dict[int, tuple[str, str]]:
    """By the saved index of a parameter: its part and its name there."""
    return {index: place_of(*name) for index, name in enumerate(saved["names"]) if name is not None}


def _as_saved(
    name: str, kept: Mapping[str, _OfParameter], options: Sequence[Options], state: TrainingState
) -> tuple[dict[str, Any], dict[str, Any]]:
    """An optimizer's tensors and plain values, by the parameter's index, as this worker would save them.

    Raises:
        TopologyMismatchError: it has a parameter that was not saved.
    """
    names = {parameter: "/".join(known_as) for parameter, known_as in state.parameter_names().items()}
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    form: dict[str, dict[str, Any]] = {key: {} for key in FORM}
    groups, index = [], 0
    for group, of_group in zip(state.optimizers[name].param_groups, options, strict=True):
        indices = []
        for parameter in group["params"]:
            if (one := kept.get(names.get(parameter, ""))) is None:
                what = names.get(parameter, "a parameter that no module in Session(state) has")
                raise TopologyMismatchError(
                    f"{name} updates {what}, and did not when the checkpoint was made: give it the same "
                    "parameters, of modules in Session(state).",
                    key=what,
                )
            if one.tensors:
                tensors[str(index)] = dict(one.tensors)
            if one.tensors or one.values:  # else no step was made yet
                values[str(index)] = one.values
            for key, value in one.form.items():
                form[key][str(index)] = value
            indices.append(index)
            index += 1
        groups.append({**of_group, "params": indices})
    return {"state": tensors}, {"state": values, "param_groups": groups, **form}


def _digests_of_here(saved: Sequence[StateDigests], state: TrainingState) -> dict[str, int]:
    """The digests of what is on this worker. What belongs to no layer has those of its own part.

    What the optimizers keep is not there yet: their digests are chosen by the parameters' names.
    """
    here = {plain_name(name) for name in state.named_tensors()}
    found = _merged([*map(by_plain_names, reversed(saved))])
    return {name: d for name, d in found.items() if name in here or name.partition(" of ")[2] in here}
