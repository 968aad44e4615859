"""Puts a worker's shards together from a checkpoint of another sharding, range by range (Tenplex §4).

``recovery/moves/reads.py`` plans what is read from which part. Parts of replicas are the same. What is not
sharded comes from the worker's own part, or, where there was no such worker, from the last one's.

Parts have what an optimizer keeps under the numbers of its parameters. In a pipeline that is cut otherwise
these are others, so the names of parameters stand in paths here: ``model/3.weight`` instead of ``17``.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swift_ft.checkpoint.layered_part import StateReader, file_by_layer, kinds_of
from swift_ft.checkpoint.layered_state import LayeredState, merged_values
from swift_ft.checkpoint.model_loading import does_not_fit
from swift_ft.checkpoint.saved_form import FORM, place_of
from swift_ft.checkpoint.stages import StagesHere, check_names, parts_for
from swift_ft.checkpoint.stale_gradients import Place, StaleGradients, as_saved, from_saved
from swift_ft.checkpoint.state_digest import STORED_AS
from swift_ft.checkpoint.state_payload import FetchRanges, StatePath, pack, tensor_at, unpack
from swift_ft.checkpoint.step.places import BY_NAME
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import CheckpointError, TopologyMismatchError
from swift_ft.recovery.layout.tensors import Ranges, relative
from swift_ft.recovery.moves.reads import plan_reads
from swift_ft.torch_adapters.dcp.writer import FileOf
from swift_ft.torch_core.model_state import model_state, plain_name
from swift_ft.torch_core.optimizers import parameters_of
from swift_ft.torch_core.shards import Description, describe, local


def file_of_value(path: tuple[str, ...]) -> int:
    """The file of a part of sharded state that a value goes to: 0 for plain values, which are read first."""
    return 0 if path[0] == "plain" else 1


def file_of_state(state: TrainingState) -> FileOf | None:
    """The file of a part that a value goes to: by layer, or apart from plain values. None: all go to one."""
    return file_by_layer(LayeredState(state)) or (file_of_value if is_sharded(state) else None)


class SlicedPart:
    """A part of the checkpoint: what it has of which tensor.

    Args:
        reader: reads it.
        fetch: fetches ranges of its tensors; None where whole tensors are read from its files.
    """

    def __init__(self, reader: StateReader, fetch: FetchRanges | None = None) -> None:
        self._reader = reader
        self._fetch = fetch
        content = {"plain": {"bytes": io.BytesIO()}}
        reader.fill(content)
        self.plain: Mapping[str, Any] = unpack(content["plain"]["bytes"].getvalue())
        stages = self.plain["stages"]
        self.stages = StagesHere(tuple(stages["own"]), stages["count"])
        keys = {name: _keys_of(saved) for name, saved in self.plain["optimizers"].items()}
        kinds = kinds_of(reader)
        self._stored = {_named(path, keys): path for path in kinds}
        self.kinds = {path: kinds[stored] for path, stored in self._stored.items()}

    @property
    def is_sliced(self) -> bool:
        """Whether it has parts of tensors."""
        return any(self.description(path) is not None for path in self.kinds)

    def description(self, path: StatePath) -> Description | None:
        """Of what a tensor is a part; None if it is whole."""
        found: Any = self.plain["shards"]
        for key in self._stored.get(path, path):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, dict) else None

    def ranges(self, path: StatePath) -> Ranges:
        """The ranges of a tensor that this part has, one for each dimension."""
        return _ranges_of(self.description(path), self.kinds[path].shape, path)

    def whole(self, path: StatePath) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        description = self.description(path)
        return self.kinds[path].shape if description is None else tuple(description["shape"])

    def read(self, pieces: Mapping[StatePath, Ranges]) -> dict[StatePath, torch.Tensor]:
        """Some tensors, of each the given ranges of the whole one."""
        if self._fetch is not None:
            asked = [
                (self._stored[path], self.kinds[path], _inside(piece, self.ranges(path)))
                for path, piece in pieces.items()
            ]
            return dict(zip(pieces, self._fetch(asked), strict=True))
        found: dict[str, Any] = {}
        for path in pieces:
            kind, stored, inner = self.kinds[path], self._stored[path], found
            for key in stored[:-1]:
                inner = inner.setdefault(key, {})
            inner[stored[-1]] = torch.empty(kind.shape, dtype=kind.dtype)
        if found:
            self._reader.fill(found)
        return {
            path: tensor_at(found, self._stored[path])[relative(piece, self.ranges(path))]
            for path, piece in pieces.items()
        }


def _inside(piece: Ranges, of: Ranges) -> Ranges:
    """Ranges of a whole tensor, counted in a part of it."""
    return tuple((start - first, end - first) for (start, end), (first, _) in zip(piece, of, strict=True))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor of this worker: its type, and which ranges of the whole one it is."""

    dtype: torch.dtype
    ranges: Ranges

    def empty(self) -> torch.Tensor:
        """Room for it."""
        return torch.empty([end - start for start, end in self.ranges], dtype=self.dtype)


def is_sharded(state: TrainingState) -> bool:
    """Whether this worker has parts of tensors."""
    parameters = (p for module in state.modules.values() for p in module.parameters())
    return any(describe(parameter) is not None for parameter in parameters)


def fits(part: SlicedPart, state: TrainingState) -> bool:
    """Whether a part has the very shards of the state's parameters."""
    if part.stages != state.stages:
        return False
    for name, module in state.modules.items():
        for key, tensor in model_state(module).items():
            path: StatePath = ("models", name, key)
            if not isinstance(tensor, torch.Tensor) or path not in part.kinds:
                continue
            if part.description(path) != describe(tensor) or part.kinds[path].shape != local(tensor).shape:
                return False
    return True


def load_slices(parts: Mapping[int, SlicedPart], own: int, state: TrainingState) -> None:
    """Make the state what the parts have of it.

    Args:
        parts: by rank.
        own: the part for what is not sharded, unless it is of another stage.

    Raises:
        TopologyMismatchError: the checkpoint does not fit this model, its shards are not ranges, or two of
            its stages have other tensors of one name.
        CheckpointError: the parts do not cover a tensor.
    """
    parts = parts_for(state.stages, parts)
    if own not in parts:
        own = min(parts)
    saved = state.to_save()
    here = unpack(saved["plain"]["bytes"].getvalue())
    shards, keys = here["shards"], {name: _keys_of(one) for name, one in here["optimizers"].items()}
    wanted: dict[StatePath, _Wanted] = {}
    tensors: dict[StatePath, torch.Tensor] = {
        ("models", name, key): tensor
        for name, model in saved["models"].items()
        for key, tensor in model.items()
        if isinstance(tensor, torch.Tensor)
    }
    check_names(tensors, parts)
    for path, tensor in tensors.items():
        description = shards["models"].get(path[1], {}).get(path[2])
        wanted[path] = _wanted(path, tensor, description, parts, own)
    described: dict[str, Any] = {name: {"state": {}} for name in state.optimizers}
    for path, index, parameter in _optimizer_tensors(parts, state, keys):
        like = describe(parameter) if any(part.description(path) for part in parts.values()) else None
        wanted[path] = _wanted(path, None if like is None else parameter, like, parts, own)
        if like is not None:
            described[path[1]]["state"].setdefault(str(index), {})[path[4]] = like
    check_names(wanted.keys() - tensors.keys(), parts)
    loaded = _filled(wanted, parts, own)
    plain = parts[own].plain
    rest = {
        "small": plain["small"],
        "optimizers": {name: _plain_of(name, one, parts, own) for name, one in here["optimizers"].items()},
        "extra": plain["extra"],
        "carried": _carried(parts, own, tensors),
        STORED_AS: {},  # those of other ranges would not match
        "shards": {"models": shards["models"], "optimizers": described},
        "gradients": _gradients(parts, own),
        "run": plain.get("run", ""),
    }
    models = {name: loaded["models"].get(name, {}) for name in state.modules}
    optimizers = {
        name: {"state": _by_number(loaded["optimizers"].get(name, {}).get("state", {}), keys[name])}
        for name in state.optimizers
    }
    state.take_over({"models": models, "optimizers": optimizers, "plain": {"bytes": io.BytesIO(pack(rest))}})


def _carried(
    parts: Mapping[int, SlicedPart], own: int, here: Iterable[StatePath]
) -> dict[str, dict[str, Any]]:
    """The script's variables of the worker's own part, and those in modules that only other parts have.

    Args:
        here: the tensors of this worker's models. What is in other modules is left out.
    """
    modules, of_own = _prefixes(here), _prefixes(parts[own].kinds)
    found = []
    for rank in (*(rank for rank in parts if rank != own), own):
        of_part = _prefixes(parts[rank].kinds)
        values: dict[str, dict[str, Any]] = {}
        for path, named in parts[rank].plain["carried"].items():
            for name, value in named.items():
                place = plain_name(name if path in BY_NAME else path)
                home = next((one for one in _ends(place) if one in of_part), None)
                if (home is None or home in modules) if rank == own else (home in modules - of_own):
                    values.setdefault(path, {})[name] = value
        found.append(values)
    return merged_values(found)


def _gradients(parts: Mapping[int, SlicedPart], own: int) -> StaleGradients | None:
    """The stale gradients of all parts; None if they say nothing of them."""
    if any("gradients" not in part.plain for part in parts.values()):
        return None
    found: dict[Place, int] = {}
    for rank in (*(rank for rank in parts if rank != own), own):
        found |= from_saved(parts[rank].plain["gradients"])
    return as_saved(found)


def _prefixes(paths: Iterable[StatePath]) -> set[str]:
    """Of the names of models' tensors: what they begin with, up to a dot, and themselves."""
    names = {f"{path[1]}.{path[2]}" for path in paths if path[0] == "models"}
    return {end for name in names for end in _ends(name)}


def _ends(path: str) -> Iterator[str]:
    """A path, then without its last name, and so on."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _keys_of(saved: Mapping[str, Any]) -> list[str]:
    """The name of each parameter of an optimizer, or else its number."""
    return [str(i) if name is None else "/".join(place_of(*name)) for i, name in enumerate(saved["names"])]


def _named(path: StatePath, keys: Mapping[str, Sequence[str]]) -> StatePath:
    """A path in a part, with the key of a parameter instead of its number."""
    if path[0] != "optimizers":
        return path
    return (*path[:3], keys[path[1]][int(path[3])], *path[4:])


def _optimizer_tensors(
    parts: Mapping[int, SlicedPart], state: TrainingState, keys: Mapping[str, Sequence[str]]
) -> Iterator[tuple[StatePath, int, torch.Tensor]]:
    """All tensors that optimizers keep for parameters that are here: path, number and parameter."""
    # In the order in which they were saved, so that each parameter's fields have theirs.
    found = (path for part in parts.values() for path in part.kinds if path[0] == "optimizers")
    paths = [*dict.fromkeys(found)]
    numbers = {name: {key: number for number, key in enumerate(known)} for name, known in keys.items()}
    for path in paths:
        if (number := numbers[path[1]].get(path[3])) is not None:
            yield path, number, parameters_of(state.optimizers[path[1]])[number]


def _by_number(loaded: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The state that an optimizer keeps, by the numbers of its parameters here."""
    return {str(number): loaded[key] for number, key in enumerate(keys) if key in loaded}


def _plain_of(
    name: str, here: Mapping[str, Any], parts: Mapping[int, SlicedPart], own: int
) -> Mapping[str, Any]:
    """The plain values of an optimizer: of its groups, and what it keeps for its parameters beside tensors.

    Raises:
        TopologyMismatchError: it has groups of other parameters, and other numbers of them.
    """
    saved: Mapping[str, Any] = parts[own].plain["optimizers"][name]
    known, keys = _keys_of(saved), _keys_of(here)
    if known == keys:
        return saved
    if len(saved["param_groups"]) != len(here["param_groups"]):
        raise TopologyMismatchError(
            f"{name} had {len(saved['param_groups'])} groups of parameters when it was saved, and has "
            f"{len(here['param_groups'])} here, of other parameters: make as many groups on each stage",
            key=name,
        )
    found: dict[str, dict[str, Any]] = {key: {} for key in ("state", *FORM)}
    for part in parts.values():
        theirs = part.plain["optimizers"][name]
        of_them = _keys_of(theirs)
        for kind, values in found.items():
            for index, value in theirs.get(kind, {}).items():
                values.setdefault(of_them[int(index)], value)
    groups = zip(saved["param_groups"], here["param_groups"], strict=True)
    return {
        **{kind: _by_number(values, keys) for kind, values in found.items()},
        "param_groups": [{**options, "params": group["params"]} for options, group in groups],
        "names": here["names"],
    }


def _wanted(
    path: StatePath,
    here: torch.Tensor | None,
    description: Description | None,
    parts: Mapping[int, SlicedPart],
    own: int,
) -> _Wanted:
    """The dtype and the ranges of a tensor that this worker needs; without a tensor here, the whole one."""
    holders = {rank: part for rank, part in parts.items() if path in part.kinds}
    shape: tuple[int, ...] | None = None
    if description is not None:
        shape = tuple(description["shape"])
    elif here is not None:
        shape = tuple(here.shape)
    if not holders:
        raise does_not_fit(_name(path), path[-1], None, shape)
    first = holders[own] if own in holders else next(iter(holders.values()))
    whole, dtype = first.whole(path), first.kinds[path].dtype
    if here is None:
        return _Wanted(dtype, tuple((0, size) for size in whole))
    if shape != whole:
        raise does_not_fit(_name(path), path[-1], whole, shape)
    return _Wanted(dtype, _ranges_of(description, tuple(local(here).shape), path))


def _name(path: StatePath) -> str:
    if path[0] == "models":
        return f"{path[1]}.{path[-1]}"
    return f"{path[1]}.{path[-1]} of parameter {path[3]}"


def _filled(wanted: Mapping[StatePath, _Wanted], parts: Mapping[int, SlicedPart], own: int) -> dict[str, Any]:
    """The wanted tensors, nested by their paths. Of each part, only what is needed is read."""
    held = {
        rank: {path: part.ranges(path) for path in wanted if path in part.kinds}
        for rank, part in parts.items()
    }
    plan = plan_reads({path: one.ranges for path, one in wanted.items()}, held, own)
    if plan.missing:
        raise CheckpointError(f"The parts of the checkpoint do not cover {'.'.join(plan.missing[0])}.")
    loaded: dict[str, Any] = {"models": {}, "optimizers": {}}
    for path, one in wanted.items():
        inner = loaded
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = one.empty()
    for rank, pieces in plan.pieces.items():
        for path, values in parts[rank].read(pieces).items():
            tensor_at(loaded, path)[relative(pieces[path], wanted[path].ranges)] = values
    return loaded


def _ranges_of(description: Description | None, shape: tuple[int, ...], path: StatePath) -> Ranges:
    if description is None:
        return tuple((0, size) for size in shape)
    if description.get("scattered"):
        raise TopologyMismatchError(
            f"The shards of {path[-1]} are no ranges, but rows here and there: resume with the same mesh.",
            key=path[-1],
        )
    return tuple((start, start + size) for start, size in zip(description["offset"], shape, strict=True))
