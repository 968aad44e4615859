"""The part of a training state that goes by layer: taken from one worker, given to another one.

A layer's state are its parameters and buffers, and what optimizers keep of its parameters, all by name. The
optimizers stay the same objects: their groups and their state are edited in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.state_payload import StatePath, StatePayload, TensorKind
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import TopologyMismatchError, UnsupportedError
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.torch_adapters.layer_stack import LayerStack
from swift_ft.torch_core.model_state import is_extra

ParameterGroups = Mapping[str, Mapping[str, int]]
"""By optimizer and by parameter: the number of the parameter group that it is in."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """A LayerStack in the state, and what names of its layers begin with."""

    part: str
    prefix: str
    stack: LayerStack

    def layer_of(self, name: str) -> int | None:
        """The layer that has a tensor of this name in the part; None if it is in no layer of the stack."""
        rest = name.removeprefix(self.prefix) if name.startswith(self.prefix) else ""
        number = rest.partition(".")[0]
        return int(number) if number.isdigit() else None


class LayeredState:
    """The stacks of layers in a training state: the pipeline's, and copies of it such as averages.

    Attributes:
        count: layers of the whole model; 0 if there is no stack.

    Raises:
        UnsupportedError: for stacks of different models.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._stacks = [*_stacks_in(state)]
        counts = {one.stack.count for one in self._stacks}
        if len(counts) > 1:
            raise UnsupportedError(
                f"Session(state) has LayerStacks of {sorted(counts)} layers: one is enough."
            )
        self.count = counts.pop() if counts else 0

    @property
    def pipelines(self) -> int:
        """The number of pipelines that have each layer; 1 if there is no stack."""
        return self._stacks[0].stack.pipelines if self._stacks else 1

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers that are here."""
        return self._stacks[0].stack.layers if self._stacks else ()

    def layers_in(self, layout: StageLayers) -> tuple[int, ...]:
        """The numbers of the layers that a layout puts on this worker."""
        return self._stacks[0].stack.layers_in(layout)

    def layer_of(self, part: str, name: str) -> int | None:
        """The layer that a tensor of a model belongs to; None if it belongs to none."""
        found = (one.layer_of(name) for one in self._stacks if one.part == part)
        return next((layer for layer in found if layer is not None), None)

    def names_in_optimizers(self) -> dict[str, list[tuple[str, str] | None]]:
        """By optimizer, the part and the name of each parameter, by its index in what is saved."""
        return {
            name: [known_as for _, _, known_as in self._grouped(optimizer)]
            for name, optimizer in self._state.optimizers.items()
        }

    # ------------------------------------------------------------------------------------------- moves

    def take(self, layers: Collection[int]) -> StatePayload:
        """All that this worker has of some layers. The tensors are the live ones."""
        tensors: dict[StatePath, torch.Tensor] = {}
        extra: dict[str, dict[str, Any]] = {}
        for one in self._stacks:
            for number in sorted(layers):
                for key, value in one.stack.layer(number).state_dict(keep_vars=True).items():
                    name = f"{one.prefix}{number}.{key}"
                    if is_extra(key, value):
                        extra.setdefault(one.part, {})[name] = value
                    else:
                        tensors["models", one.part, name] = value
        plain: dict[str, dict[str, Any]] = {}
        for name, optimizer in self._state.optimizers.items():
            plain[name] = {}
            for group, parameter, known_as in self._grouped(optimizer):
                if known_as is None or self.layer_of(*known_as) not in layers:
                    continue
                values = {}
                for field, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        tensors["optimizers", name, *known_as, field] = value
                    else:
                        values[field] = value
                plain[name]["/".join(known_as)] = {"group": group, "values": values}
        return StatePayload(tensors, self._state.pack({"optimizers": plain, "extra": extra}))

    def prepare(self, layout: StageLayers, arrived: Iterable[StatePayload]) -> None:
        """Build the layers that :meth:`give` will need, and see whether what has arrived fits into them.

        Raises:
            TopologyMismatchError: it does not.
            Exception: what the script's ``build_layer`` raised.
        """
        built = {one.part: (one, one.stack.prepare(layout)) for one in self._stacks}
        for payload in arrived:
            for path, kind in payload.kinds.items():
                if path[0] == "models":
                    one, layers = built[path[1]]
                    number, _, key = path[2].removeprefix(one.prefix).partition(".")
                    _check(layers[int(number)].state_dict(keep_vars=True).get(key), path[2], kind)

    def forget_prepared(self) -> None:
        """Drop the layers that :meth:`prepare` has built: the layout is not taken after all."""
        for one in self._stacks:
            one.stack.forget_prepared()

    def give(self, layout: StageLayers, arrived: Iterable[StatePayload]) -> None:
        """Have the layers of a layout, with the state that has arrived for those that were not here.

        Args:
            layout: the new one.
            arrived: what :meth:`take` returned, where the layers were.
        """
        arrived = list(arrived)
        plain = [self._state.unpack(payload.plain) for payload in arrived]
        groups = {name: self._groups_now(name) for name in self._state.optimizers}
        for of_payload in plain:
            for name, of_optimizer in of_payload["optimizers"].items():
                groups[name] |= {known_as: fields["group"] for known_as, fields in of_optimizer.items()}
        self.arrange(layout, groups)
        for payload, values in zip(arrived, plain, strict=True):
            self._fill(payload, values)

    def arrange(self, layout: StageLayers, groups: ParameterGroups) -> None:
        """Have the layers of a layout: new ones have the values with which the script makes them.

        Args:
            layout: the new one.
            groups: in which parameter group each parameter of an optimizer is, new ones included. Others
                are in no optimizer.
        """
        for one in self._stacks:
            one.stack.arrange(layout)
        for name, optimizer in self._state.optimizers.items():
            self._regroup(optimizer, groups[name])

    def _regroup(self, optimizer: Optimizer, groups: Mapping[str, int]) -> None:
        """First what is in no layer, as it was; then the layers' parameters, in the order of the layers."""
        known = self._names()
        others = [
            [p for p in group["params"] if p in known and self.layer_of(*known[p]) is None]
            for group in optimizer.param_groups
        ]
        for one in self._stacks:
            for number in one.stack.layers:
                for key, parameter in one.stack.layer(number).named_parameters():
                    name = f"{one.prefix}{number}.{key}"
                    if (group := groups.get(f"{one.part}/{name}")) is not None:
                        others[group].append(parameter)
        for own, parameters in zip(optimizer.param_groups, others, strict=True):
            own["params"][:] = parameters
        here = {parameter for parameters in others for parameter in parameters}
        for gone in [p for p in optimizer.state if p not in here]:
            del optimizer.state[gone]

    def _fill(self, payload: StatePayload, plain: Mapping[str, Mapping[str, Any]]) -> None:
        for part, values in plain["extra"].items():
            for key, value in values.items():
                self._state.modules[part].get_submodule(key.rpartition(".")[0]).set_extra_state(value)
        tensors = {path: tensor for path, tensor in payload.tensors.items() if path[0] == "models"}
        for (_, part, name), tensor in tensors.items():
            _assign(self._state.modules[part], name, tensor)
        by_name = {"/".join(known_as): p for p, known_as in self._names().items()}
        for name, optimizer in self._state.optimizers.items():
            for known_as, fields in plain["optimizers"].get(name, {}).items():
                parameter = by_name[known_as]
                place = tuple(known_as.split("/"))
                state = dict(fields["values"])
                for path, tensor in payload.tensors.items():
                    if path[:4] == ("optimizers", name, *place):
                        state[path[4]] = _beside(tensor, parameter, optimizer.param_groups[fields["group"]])
                if state:
                    optimizer.state[parameter] = state

    # ------------------------------------------------------------------------------------------- names

    def _names(self) -> dict[torch.Tensor, tuple[str, str]]:
        """By parameter: the part that has it, and its name there."""
        return self._state.parameter_names()

    def _grouped(self, optimizer: Optimizer) -> Iterator[tuple[int, nn.Parameter, tuple[str, str] | None]]:
        """The group, and the name, of each parameter."""
        names = self._names()
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                yield number, parameter, names.get(parameter)

    def _groups_now(self, optimizer: str) -> dict[str, int]:
        grouped = self._grouped(self._state.optimizers[optimizer])
        return {"/".join(name): group for group, _, name in grouped if name is not None}


def _stacks_in(state: TrainingState) -> Iterator[_Stack]:
    for part, module in state.modules.items():
        for name, inner in module.named_modules():
            if isinstance(inner, LayerStack):
                plain = name.replace("_orig_mod.", "").removeprefix("_orig_mod")
                yield _Stack(part, f"{plain}." if plain else "", inner)


def _check(here: torch.Tensor | None, name: str, arrived: TensorKind) -> None:
    if here is None or tuple(here.shape) != arrived.shape:
        raise TopologyMismatchError(
            f"build_layer() makes here no {name} of the shape {arrived.shape}: it must make the same layer "
            "on all workers.",
            key=name,
        )


def _assign(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a parameter or a buffer a value, whose memory it takes over."""
    owner, _, last = name.rpartition(".")
    old = getattr(module.get_submodule(owner), last)
    old.data = value.to(old.device)


def _beside(value: torch.Tensor, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """An optimizer's tensor where it belongs: with its parameter, or, a step counter, on the host."""
    on_device = value.dim() or group.get("capturable") or group.get("fused")
    return value.to(parameter.device) if on_device else value.cpu()
