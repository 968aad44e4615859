"""The part of a training state that goes by layer: taken from one worker, given to another one.

A layer's state are its parameters and buffers, what optimizers keep of its parameters, and what the script
has changed in it: flags, modes, attributes, all by name. The optimizers stay the same objects: their groups
and their state are edited in place.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from swift_ft.checkpoint.layer_stacks import Stack, stacks_in
from swift_ft.checkpoint.model_loading import does_not_fit
from swift_ft.checkpoint.optimizer_groups import (
    InGroup,
    Options,
    groups_here,
    numbers_here,
    options_of,
    set_options,
)
from swift_ft.checkpoint.saved_form import laid_out, own_strides, with_strides
from swift_ft.checkpoint.stale_gradients import as_saved, forms_of, from_saved, put_forms
from swift_ft.checkpoint.state_payload import StatePath, StatePayload, TensorKind
from swift_ft.checkpoint.step.places import BY_NAME, Place, Saved
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import TopologyMismatchError, UnsupportedError
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.torch_adapters.wrappers import unwrapped_optimizer
from swift_ft.torch_core.buffers import with_unsaved
from swift_ft.torch_core.model_state import is_extra, model_state, plain_name

ParameterGroups = Mapping[str, Mapping[str, int]]
"""By optimizer and by parameter: the number of the parameter group that it is in."""


class LayeredState:
    """The stacks of layers in a training state: the pipeline's, and copies of it such as averages.

    Attributes:
        count: layers of the whole model; 0 if there is no stack.

    Raises:
        UnsupportedError: for stacks of different models.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._stacks = [*stacks_in(state)]
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
    def stage(self) -> str:
        """The stages of this worker, and how many there are in its pipeline; empty if there is no stack."""
        stacks = [one.stack for one in self._stacks[:1]]
        return "".join(f"{', '.join(map(str, stack.stages))} of {stack.num_stages}" for stack in stacks)

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

    def layer_at(self, path: str) -> int | None:
        """The layer that a path from a part of the state leads to; None if it leads to none."""
        found = (one.layer_at(path) for one in self._stacks)
        return next((layer for layer in found if layer is not None), None)

    def layer_of_place(self, place: Place) -> int | None:
        """The layer that a variable of the script is in; None if it is in none."""
        return self.layer_at(place[1] if place[0] in BY_NAME else place[0])

    def values_in(self, saved: Saved, wanted: Container[int | None]) -> dict[str, dict[str, Any]]:
        """Those of the script's variables that are in some layers, or, for None, in no layer."""
        chosen = {
            path: {name: v for name, v in values.items() if self.layer_of_place((path, name)) in wanted}
            for path, values in saved.items()
        }
        return {path: values for path, values in chosen.items() if values}

    def names_in_optimizers(self) -> dict[str, list[tuple[str, str] | None]]:
        """By optimizer, the part and the name of each parameter, by its index in what is saved."""
        return {
            name: [known_as for _, _, known_as in self._grouped(optimizer)]
            for name, optimizer in self._state.optimizers.items()
        }

    # ------------------------------------------------------------------------------------------- moves

    def take(self, layers: Collection[int], *, rest: bool = False) -> StatePayload:
        """All that this worker has of some layers. The tensors are the live ones.

        Args:
            layers: their numbers.
            rest: take all that is in no layer, too, but for parts with a ``state_dict()`` of their own.
        """
        wanted: set[int | None] = {*layers, *((None,) if rest else ())}
        tensors: dict[StatePath, torch.Tensor] = {}
        extra: dict[str, dict[str, Any]] = {}
        strides: dict[Place, list[int]] = {}
        for part, name, value in self._of_models(sorted(layers), rest=rest):
            if is_extra(name, value):
                extra.setdefault(part, {})[name] = value
            else:
                tensors["models", part, name] = value
                if value.layout == torch.strided and not value.is_contiguous():
                    strides[part, name] = [*value.stride()]
        plain: dict[str, dict[str, Any]] = {}
        for name, optimizer in self._state.optimizers.items():
            plain[name] = {}
            for group, parameter, known_as in self._grouped(optimizer):
                if known_as is None or self.layer_of(*known_as) not in wanted:
                    continue
                values, fields = {}, optimizer.state.get(parameter, {})
                for field, value in fields.items():
                    if isinstance(value, torch.Tensor):
                        tensors["optimizers", name, *known_as, field] = value
                    else:
                        values[field] = value
                own = own_strides(fields, parameter)
                plain[name]["/".join(known_as)] = {"group": group, "values": values, "strides": own}
        optimizers = self._state.optimizers.items()
        values = {
            "optimizers": plain,
            "groups": {name: options_of(optimizer.param_groups) for name, optimizer in optimizers},
            "extra": extra,
            "strides": strides,
            "flags": [self._flags(one, number) for one in self._stacks for number in sorted(layers)],
            "carried": self.values_in(self._carried(), wanted),
            "gradients": as_saved(forms_of(self._names_in(wanted))),
        }
        return StatePayload(tensors, self._state.pack(values))

    def _of_models(self, layers: Sequence[int], *, rest: bool) -> Iterator[tuple[str, str, Any]]:
        """Parameters, buffers and extra state: the part of each, its name there, and the value."""
        for one in self._stacks:
            for number in layers:
                for key, value in model_state(one.stack.layer(number)).items():
                    yield one.part, f"{one.prefix}{number}.{key}", value
        if rest:
            for part, module in self._state.modules.items():
                for name, value in model_state(module).items():
                    if self.layer_of(part, name) is None:
                        yield part, name, value

    def saved_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of the layers here that a ``state_dict()`` has, by the names of the script."""
        for one in self._stacks:
            for number in self.layers:
                for path, module in one.stack.layer(number).named_modules():
                    buffers, saved = with_unsaved(module)
                    prefix = ".".join(filter(None, (f"{one.part}.{one.prefix}{number}", path)))
                    for name in sorted(saved):
                        if (buffer := buffers[name]) is not None:
                            yield f"{prefix}.{name}", buffer

    @staticmethod
    def _flags(one: Stack, number: int) -> dict[str, Any]:
        """Of a layer in a stack: which parameters require gradients, and which modules are in training mode.

        The script may have set them before the session began, so that they do not count as changed.
        """
        layer = one.stack.layer(number)
        return {
            "layer": [one.part, number],
            "gradients": {name: parameter.requires_grad for name, parameter in layer.named_parameters()},
            "training": {name: module.training for name, module in layer.named_modules()},
        }

    def _carried(self) -> Saved:
        """The script's variables that have changed."""
        return self._state.carried.to_save() if self._state.carried is not None else {}

    def prepare(self, layout: StageLayers, arrived: Iterable[StatePayload]) -> None:
        """Build the layers that :meth:`give` will need, and see whether what has arrived fits into them.

        Raises:
            TopologyMismatchError: it does not.
            Exception: what the script's ``build_layer`` raised.
        """
        built = {
            (one.part, f"{one.prefix}{number}.{key}"): value
            for one in self._stacks
            for number, layer in one.stack.prepare(layout).items()
            for key, value in model_state(layer).items()
        }
        for payload in arrived:
            for path, kind in payload.kinds.items():
                if path[0] == "models":
                    _check(built.get((path[1], path[2])), path[2], kind)
            self._numbers_here(self._state.unpack(payload.plain))

    def forget_prepared(self) -> None:
        """Drop the layers that :meth:`prepare` has built: the layout is not taken after all."""
        for one in self._stacks:
            one.stack.forget_prepared()

    def give(self, layout: StageLayers, arrived: Iterable[StatePayload]) -> None:
        """Have the layers of a layout, with the state that has arrived for those that were not here.

        Args:
            layout: the new one.
            arrived: what :meth:`take` returned, where the layers were.

        Raises:
            TopologyMismatchError: no group of an optimizer is like the one that a parameter was in;
                :meth:`prepare` says so before.
        """
        arrived = list(arrived)
        plain = [self._state.unpack(payload.plain) for payload in arrived]
        groups = {name: self._groups_now(name) for name in self._state.optimizers}
        for of_payload in plain:
            for name, numbers in self._numbers_here(of_payload).items():
                groups[name] |= numbers
        self.arrange(layout, groups)
        for payload, values in zip(arrived, plain, strict=True):
            self._fill(payload, values, rest=False)
        if (carried := self._state.carried) is not None:
            for values in plain:
                carried.put(values["carried"])

    def give_whole(self, layout: StageLayers, arrived: Sequence[StatePayload]) -> None:
        """Have a whole state: layers that have arrived, and all that is in no layer, from the first payload.

        Args:
            layout: the layers here.
            arrived: what :meth:`take` returned at workers of the iteration that this one goes on with.

        Raises:
            TopologyMismatchError: no group of an optimizer is like the one that a parameter was in.
        """
        plain = [self._state.unpack(payload.plain) for payload in arrived]
        groups: dict[str, dict[str, int]] = {}
        options: dict[str, list[Options]] = {}
        for name in self._state.optimizers:
            came = _in_groups(name, plain)
            numbers, options[name] = self.groups_here(name, came, plain[0]["groups"][name])
            groups[name] = self._groups_now(name) | numbers
        came_with = {number for values in plain for number in _layers_in(values)}
        stays = {*self.layers} - came_with
        kept = self.values_in(self._carried(), stays) if stays else {}
        self.arrange(layout, groups)
        for name, optimizer in self._state.optimizers.items():
            set_options(optimizer, options[name])
        for number, (payload, values) in enumerate(zip(arrived, plain, strict=True)):
            self._fill(payload, values, rest=number == 0)
        if (carried := self._state.carried) is not None:
            of_others = [self.values_in(values["carried"], came_with) for values in plain[1:]]
            self._state.of_earlier_run = False  # it comes from workers that live
            carried.take_over(merged_values([kept, *of_others, plain[0]["carried"]]))

    def groups_here(
        self, name: str, came: Mapping[str, InGroup], own: Sequence[Options]
    ) -> tuple[dict[str, int], list[Options]]:
        """By parameter that comes to an optimizer, its group here, and the options of all groups then.

        Args:
            name: which optimizer.
            came: by the name of a parameter, the group that it was in.
            own: the options of the groups where this worker's place was, or a similar one's.

        Raises:
            TopologyMismatchError: no group is like the one that a parameter was in.
        """
        optimizer = self._state.optimizers[name]
        here, now = options_of(optimizer.param_groups), self._groups_now(name)
        schedulers = (part for part in self._state.small.values() if isinstance(part, LRScheduler))
        by_number = any(unwrapped_optimizer(one.optimizer) is optimizer for one in schedulers)
        return groups_here(name, here, now, came, own, by_number=by_number)

    def _numbers_here(self, plain: Mapping[str, Any]) -> dict[str, dict[str, int]]:
        """By optimizer and parameter, the group for what has arrived. Raises if there is none."""
        return {
            name: numbers_here(name, options_of(optimizer.param_groups), _in_groups(name, [plain]))
            for name, optimizer in self._state.optimizers.items()
        }

    def arrange(self, layout: StageLayers, groups: ParameterGroups) -> None:
        """Have the layers of a layout: new ones have the values with which the script makes them.

        Args:
            layout: the new one.
            groups: in which parameter group each parameter of an optimizer is, new ones included. Others
                are in no optimizer.

        Raises:
            TopologyMismatchError: a layer that is here lacks a parameter that an optimizer is to have.
        """
        before, left = {*self.layers}, {*self._in_layers()}
        for one in self._stacks:
            one.stack.arrange(layout)
        if (carried := self._state.carried) is not None and (made := {*self.layers} - before):
            carried.note_made(lambda place: self.layer_of_place(place) in made)
        for name, optimizer in self._state.optimizers.items():
            self._regroup(name, optimizer, groups[name], left)

    def _regroup(
        self, name: str, optimizer: Optimizer, groups: Mapping[str, int], left: Container[torch.Tensor]
    ) -> None:
        """First what is in no layer, as it was; then the layers' parameters, in the order of the layers.

        Args:
            left: the parameters of the layers that were here before.
        """
        grouped = [[p for p in group["params"] if p not in left] for group in optimizer.param_groups]
        in_layers = self._in_layers()
        for parameter, known_as in in_layers.items():
            if (group := groups.get(known_as)) is not None:
                grouped[group].append(parameter)
        # An optimizer without them would go on, and nothing would say that it trains less.
        for known_as in sorted(groups.keys() - {*in_layers.values()}):
            if self.layer_of(*_place(known_as)) in self.layers:
                raise TopologyMismatchError(
                    f"{name} is to update {known_as}, and build_layer() makes a layer without it here: it "
                    "must make the same layer on all workers.",
                    key=known_as,
                )
        for own, parameters in zip(optimizer.param_groups, grouped, strict=True):
            own["params"][:] = parameters
        here = {parameter for parameters in grouped for parameter in parameters}
        for gone in [p for p in optimizer.state if p not in here]:
            del optimizer.state[gone]

    def _fill(self, payload: StatePayload, plain: Mapping[str, Any], *, rest: bool) -> None:
        def is_wanted(part: str, name: str) -> bool:
            return rest or self.layer_of(part, name) is not None

        for part, values in plain["extra"].items():
            for key, value in values.items():
                if is_wanted(part, key):
                    owner = self._state.modules[part].get_submodule(key.rpartition(".")[0])
                    owner.set_extra_state(value)
        models = ((path, tensor) for path, tensor in payload.tensors.items() if path[0] == "models")
        tensors = {(path[1], path[2]): tensor for path, tensor in models}
        if rest:
            self._fill_rest({path: t for path, t in tensors.items() if self.layer_of(*path) is None})
        for (part, name), tensor in tensors.items():
            if self.layer_of(part, name) is not None:
                own = with_strides(tensor, plain["strides"].get((part, name)))
                _assign(self._state.modules[part], name, own)
        by_name = {"/".join(known_as): p for p, known_as in self._names().items()}
        for name, optimizer in self._state.optimizers.items():
            groups: dict[torch.Tensor, Options] = {
                parameter: optimizer.param_groups[number] for number, parameter, _ in self._grouped(optimizer)
            }
            for known_as, fields in plain["optimizers"].get(name, {}).items():
                part, key = _place(known_as)
                if not is_wanted(part, key):
                    continue
                parameter = by_name[known_as]
                state = dict(fields["values"])
                for path, tensor in payload.tensors.items():
                    if path[:4] == ("optimizers", name, part, key):
                        own = laid_out(tensor, parameter, fields["strides"].get(path[4]))
                        state[path[4]] = _beside(own, parameter, groups[parameter])
                if state:
                    optimizer.state[parameter] = state
                else:  # no step was made there yet
                    optimizer.state.pop(parameter, None)
        came = {(part, plain_name(name)) for part, name in tensors if is_wanted(part, name)}
        places = {parameter: place for parameter, place in self._names().items() if place in came}
        put_forms(places, from_saved(plain["gradients"]))
        for flags in plain["flags"]:
            self._set_flags(flags)

    def _fill_rest(self, tensors: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Give what is in no layer other values. The tensors stay the same: others may hold them."""
        own = self._state.local_models() if tensors else {}
        for (part, name), tensor in tensors.items():
            here = own[part].get(name)
            if here is None or here.shape != tensor.shape:
                shape = None if here is None else tuple(here.shape)
                raise does_not_fit(f"{part}.{name}", name, tuple(tensor.shape), shape)
            with torch.no_grad():
                here.copy_(tensor)

    def _set_flags(self, flags: Mapping[str, Any]) -> None:
        """The inverse of :meth:`_flags`."""
        part, number = flags["layer"]
        for one in self._stacks:
            if one.part != part:
                continue
            layer = one.stack.layer(number)
            for name, requires_grad in flags["gradients"].items():
                layer.get_parameter(name).requires_grad_(requires_grad)
            for name, training in flags["training"].items():
                layer.get_submodule(name).training = training

    # ------------------------------------------------------------------------------------------- names

    def _names(self) -> dict[torch.Tensor, tuple[str, str]]:
        """By parameter: the part that has it, and its name there."""
        return self._state.parameter_names()

    def _names_in(self, wanted: Container[int | None]) -> dict[torch.Tensor, tuple[str, str]]:
        """Those of the parameters in some layers, or, for None, in no layer."""
        return {one: place for one, place in self._names().items() if self.layer_of(*place) in wanted}

    def _in_layers(self) -> dict[torch.Tensor, str]:
        """The name of each parameter that is in a layer here, in the order of the layers."""
        named = self._names().items()
        return {one: "/".join(place) for one, place in named if self.layer_of(*place) is not None}

    def _grouped(self, optimizer: Optimizer) -> Iterator[tuple[int, nn.Parameter, tuple[str, str] | None]]:
        """The group, and the name, of each parameter."""
        names = self._names()
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                yield number, parameter, names.get(parameter)

    def _groups_now(self, optimizer: str) -> dict[str, int]:
        grouped = self._grouped(self._state.optimizers[optimizer])
        return {"/".join(name): group for group, _, name in grouped if name is not None}


def _in_groups(optimizer: str, plain: Iterable[Mapping[str, Any]]) -> dict[str, InGroup]:
    """By the name of a parameter that has arrived, its group in an optimizer there."""
    return {
        known_as: InGroup(fields["group"], values["groups"][optimizer])
        for values in plain
        for known_as, fields in values["optimizers"][optimizer].items()
    }


def _place(known_as: str) -> tuple[str, str]:
    """The part of the state, and the name there, of a parameter of an optimizer."""
    part, _, name = known_as.partition("/")
    return part, name


def _layers_in(plain: Mapping[str, Any]) -> set[int]:
    return {flags["layer"][1] for flags in plain["flags"]}


def merged_values(saved: Iterable[Saved]) -> dict[str, dict[str, Any]]:
    """Values of all, of which later ones count."""
    found: dict[str, dict[str, Any]] = {}
    for one in saved:
        for path, values in one.items():
            found.setdefault(path, {}).update(values)
    return found


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
