"""The state that a session protects, as one value that can be saved, loaded, sent and restored."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from swift_ft.checkpoint.model_loading import check_shapes, load_model, to_fill
from swift_ft.checkpoint.optimizer_groups import fit_groups, load_optimizer
from swift_ft.checkpoint.plain_classes import KnownClasses
from swift_ft.checkpoint.plain_values import classes_in
from swift_ft.checkpoint.saved_form import (
    as_file,
    by_plain_names,
    check_keys,
    descriptions_in,
    extra_of,
    fields_in,
    laid_out,
    localized,
    place_of,
    shown_value,
    split_tensors,
    tensors_of,
)
from swift_ft.checkpoint.stages import StagesHere
from swift_ft.checkpoint.stale_gradients import as_saved, forms_of, from_saved, put_forms
from swift_ft.checkpoint.state_digest import STORED_AS, StateDigests, differing, tensor_digests
from swift_ft.checkpoint.state_payload import StatePath, TensorKind, pack, unpack
from swift_ft.determinism import host_random_state, set_host_random_state
from swift_ft.torch_adapters.wrappers import unwrapped_model, unwrapped_optimizer
from swift_ft.torch_core.model_state import model_state, unmade_buffers
from swift_ft.torch_core.module_tree import ModuleTree
from swift_ft.torch_core.optimizers import contained, parameters_of
from swift_ft.torch_core.scalers import put_stages
from swift_ft.torch_core.shards import local, rebuilt
from swift_ft.torch_core.tensors import copied, same_bits, tensors_in


class Carried(Protocol):
    """More values that travel with the state: :class:`swift_ft.checkpoint.step.carried.CarriedVariables`."""

    def to_save(self) -> Mapping[str, Mapping[str, Any]]:
        """Plain values, by path and name."""

    def take_over(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Put them in place, and give others the values of the start."""

    def note_made(self, is_new: Callable[[tuple[str, str]], bool]) -> None:
        """Parts of the state were made again: what these places have now counts as their start."""

    def put(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Put some values in place. Others stay as they are."""


class TrainingState:
    """The state that a session protects: modules, optimizers, and small objects with a ``state_dict``.

    Args:
        parts: by name. A module or an optimizer is large state; everything else must have ``state_dict()``
            and ``load_state_dict()`` and is copied at every step.

    Attributes:
        parameters: all parameters of all optimizers, each with its optimizer; the index in this list is what
            events and plans mean by a parameter.
        containers: optimizers that call others and have no state of their own: those others are protected.
        tree: all modules within those of the state.
        carried: the variables of the script, once the session has started.
        stages: of the pipeline that the worker has.
        in_run: what is loaded is of this run, and not of one that is resumed: its buffers may have any size.
        run: the name of this run, which no other one has.
        of_earlier_run: what was loaded last is of another run, which this one was started to continue.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        models = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        self.modules = {name: unwrapped_model(model) for name, model in models.items()}
        self._unmade = {name: unmade_buffers(module) for name, module in self.modules.items()}
        optimizers = {name: part for name, part in parts.items() if isinstance(part, Optimizer)}
        whole = {name: unwrapped_optimizer(optimizer) for name, optimizer in optimizers.items()}
        self.optimizers = {key: one for name, each in whole.items() for key, one in _each(name, each)}
        self.containers = [optimizer for optimizer in whole.values() if contained(optimizer)]
        self.tree = ModuleTree(self.modules)
        self.carried: Carried | None = None
        self.stages = StagesHere()
        self.in_run = self.of_earlier_run = False
        self.run = ""
        # Those of modules when ``_unowned`` was made, and those of optimizers.
        self._named: dict[str, nn.Parameter] | None = None
        self._owned: set[nn.Parameter] = set()
        self._unowned: list[nn.Parameter] = []
        large = self.modules.keys() | optimizers.keys()
        self.small = {name: part for name, part in parts.items() if name not in large}

    @property
    def parameters(self) -> list[tuple[Optimizer, nn.Parameter]]:
        """In the order of optimizers, groups and parameters: the same on every replica."""
        return [
            (optimizer, parameter)
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def parameter_names(self) -> dict[torch.Tensor, tuple[str, str]]:
        """By parameter of a module: the part that has it, and its name there."""
        names: dict[torch.Tensor, tuple[str, str]] = {}
        for part, module in self.modules.items():
            for name, parameter in module.named_parameters():
                names.setdefault(parameter, place_of(part, name.removeprefix("module.")))
        return names

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter of a module once, by a name that a user knows. Not to be changed."""
        return self.tree.named_parameters()

    def unowned_parameters(self) -> Sequence[nn.Parameter]:
        """The parameters of modules that no optimizer has: the same list until either has others."""
        named, owned = self.named_parameters(), {parameter for _, parameter in self.parameters}
        if named is not self._named or owned != self._owned:
            self._named, self._owned = named, owned
            self._unowned = [parameter for parameter in named.values() if parameter not in owned]
        return self._unowned

    def tensors(self) -> Iterator[torch.Tensor]:
        """All large state: of modules with their gradients, and of optimizers."""
        for module in self.modules.values():
            yield from module.buffers()
            for parameter in module.parameters():
                yield parameter
                if parameter.grad is not None:
                    yield parameter.grad
        for optimizer in self.optimizers.values():
            for fields in optimizer.state.values():
                yield from (value for value in fields.values() if isinstance(value, torch.Tensor))

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and optimizer state, as replicas must share them, by names that a user knows."""
        found: dict[str, torch.Tensor] = {**self.named_parameters()}
        names = {parameter: name for name, parameter in found.items()}
        owners = {id(optimizer): name for name, optimizer in self.optimizers.items()}
        for index, (optimizer, parameter) in enumerate(self.parameters):
            of = names.get(parameter, f"parameter {index}")
            for field, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{owners[id(optimizer)]}.{field} of {of}"] = value
        return found

    def inner_tensors(self) -> dict[str, torch.Tensor]:
        """All others of the large state: parameters that no module has, tensors in lists and dictionaries."""
        found: dict[str, torch.Tensor] = {}
        names = {parameter: name for name, parameter in self.named_parameters().items()}
        owners = {id(optimizer): name for name, optimizer in self.optimizers.items()}
        for index, (optimizer, parameter) in enumerate(self.parameters):
            if parameter not in names:
                found[f"parameter {index}"] = parameter
            of = names.get(parameter, f"parameter {index}")
            for field, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    inner = enumerate(tensors_in(value))
                    found |= {f"{owners[id(optimizer)]}.{field}[{n}] of {of}": one for n, one in inner}
        return found

    # -------------------------------------------------------------------------------------- small state

    def snapshot(self, *, plain: bool = True) -> dict[str, Any]:
        """A copy of all small state and of the host's random state (kilobytes), for :meth:`restore`.

        Args:
            plain: the random state can be saved and sent.
        """
        parts = {name: copied(part.state_dict()) for name, part in self.small.items()}
        return {"parts": parts, "random": host_random_state(plain=plain)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Return to what :meth:`snapshot` copied."""
        self.restore_parts(saved["parts"])
        set_host_random_state(saved["random"])

    def restore_parts(self, saved: Mapping[str, Any]) -> None:
        """As :meth:`restore`, and the host's random state stays."""
        for name, part in self.small.items():
            if name in saved or not name.startswith("swift_ft."):  # else from before there was one
                part.load_state_dict(copy.deepcopy(saved[name]))
            if isinstance(part, GradScaler):
                put_stages(part, {})  # the gradients that it has unscaled are gone

    # -------------------------------------------------------------------------------------- everything

    @cached_property
    def known(self) -> KnownClasses:
        """The classes whose objects may be saved: who reads them has the same in its state at the start.

        Asked for before the first step, and before anything is loaded.
        """
        parts = [*self.small.values(), *self.optimizers.values()]
        parts += [inner for module in self.modules.values() for inner in module.modules()]
        homes = {"__main__", *(type(part).__module__ for part in parts)}
        return KnownClasses(classes_in(self._beginning()), homes, own_files=True)

    def _beginning(self) -> dict[str, Any]:
        """The values that are not tensors of models and optimizers, before the first step."""
        groups = {
            name: {"param_groups": [{k: v for k, v in group.items() if k != "params"} for group in groups]}
            for name, groups in ((name, o.param_groups) for name, o in self.optimizers.items())
        }
        extra = {
            part: {
                f"{name}._extra_state".lstrip("."): inner.get_extra_state()
                for name, inner in module.named_modules()
                if type(inner).get_extra_state is not nn.Module.get_extra_state
            }
            for part, module in self.modules.items()
        }
        return {"small": self.snapshot(), "optimizers": groups, "extra": extra}

    def check_values(self) -> None:
        """See before the first step whether what is saved could be read again.

        Raises:
            UnsupportedError: names a value that could not.
        """
        self.pack(self._beginning())

    def check_optimizers(self) -> None:
        """See whether all state of optimizers is of their parameters: of what else could not be loaded.

        Raises:
            UnsupportedError: names the optimizer and the key of other state.
        """
        for name, optimizer in self.optimizers.items():
            check_keys(name, optimizer, optimizer.state_dict())

    def pack(self, plain: Any) -> bytes:
        """Plain values of this state as bytes. See :func:`~swift_ft.checkpoint.state_payload.pack`."""
        return pack(plain, self.known, shown_value)

    def unpack(self, data: bytes) -> Any:
        """The value that was packed by :meth:`pack`, here or at another worker with the same script."""
        return unpack(data, known=self.known)

    def to_save(self, digests: StateDigests | None = None) -> dict[str, Any]:
        """Everything, by name, as DCP stores it; large tensors are the live ones.

        Of a sharded tensor (``DTensor``) it is this worker's shard, as a plain tensor. The plain bytes say of
        what it is a part.

        Optimizers are read directly. DCP's helper would run a step on one whose state is still empty, and so
        count a step that never happened.

        Args:
            digests: of :meth:`named_tensors`, for :meth:`take_over` to compare.

        Raises:
            UnsupportedError: a value could not be read again. Names it.
        """
        optimizers, plain, names = {}, {}, self.parameter_names()
        for name, optimizer in self.optimizers.items():
            # Not by DCP's get_optimizer_state_dict(), which steps an optimizer whose state is
            # still empty (decision 81).
            saved = optimizer.state_dict()
            check_keys(name, optimizer, saved)
            tensors, values = split_tensors(saved["state"])
            optimizers[name] = {"state": tensors}
            parameters = parameters_of(optimizer)
            known_as = [names.get(parameter) for parameter in parameters]
            plain[name] = {
                "state": values,
                "param_groups": saved["param_groups"],
                "names": known_as,
                **fields_in(saved["state"], parameters),
            }
        whole = {name: model_state(module) for name, module in self.modules.items()}
        models = {name: tensors_of(values) for name, values in whole.items()}
        shards = {name: descriptions_in(tensors) for name, tensors in models.items()}
        of_optimizers = {name: descriptions_in(saved) for name, saved in optimizers.items()}
        rest = {
            "small": self.snapshot(),
            "optimizers": plain,
            "extra": {name: extra_of(values) for name, values in whole.items()},
            "carried": self.carried.to_save() if self.carried is not None else {},
            STORED_AS: {**(digests or {})},
            "shards": {"models": shards, "optimizers": of_optimizers},
            "stages": {"own": [*self.stages.own], "count": self.stages.count},
            "gradients": as_saved(forms_of(names)),
            "run": self.run,
        }
        return {
            "models": {name: localized(tensors) for name, tensors in models.items()},
            "optimizers": {name: localized(tensors) for name, tensors in optimizers.items()},
            "plain": {"bytes": as_file(self.pack(rest))},
        }

    def check(self, stored: Mapping[StatePath, TensorKind]) -> None:
        """Compare the models' tensors with those of a checkpoint.

        Raises:
            TopologyMismatchError: it does not fit this model; names a tensor and both shapes.
        """
        self._check({(path[1], path[2]): tuple(k.shape) for path, k in stored.items() if path[0] == "models"})

    def check_models(self, models: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """As :meth:`check`, for tensors that were read, by part and name."""
        self._check(
            {(part, key): tuple(t.shape) for part, model in models.items() for key, t in model.items()}
        )

    def _check(self, shapes: Mapping[tuple[str, str], tuple[int, ...]]) -> None:
        for name, model in self.local_models().items():
            theirs = {key: shape for (part, key), shape in shapes.items() if part == name}
            check_shapes(name, self.modules[name], model, theirs, self._unmade[name], in_run=self.in_run)

    def to_load(
        self,
        stored: Mapping[StatePath, TensorKind],
        aside: bool = False,
        models: Mapping[str, dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Tensors to be filled: the models' own, and new ones for optimizers.

        Args:
            stored: the tensors that will arrive, by their path in :meth:`to_save`.
            aside: new tensors for models too, so that nothing changes before :meth:`take_over`.
            models: as :meth:`local_models` gave them; to ask takes milliseconds.
        """
        optimizers: dict[str, Any] = {name: {"state": {}} for name in self.optimizers}
        for path, kind in stored.items():
            if path[0] == "optimizers":
                _, name, _, parameter, field = path
                tensor = torch.empty(kind.shape, dtype=kind.dtype)
                optimizers[name]["state"].setdefault(parameter, {})[field] = tensor
        models = models or self.local_models()
        filled = {}
        for name, model in models.items():
            kinds = {path[2]: kind for path, kind in stored.items() if path[:2] == ("models", name)}
            filled[name] = to_fill(self.modules[name], model, kinds, self._unmade[name], aside=aside)
        return {"models": filled, "optimizers": optimizers, "plain": {"bytes": io.BytesIO()}}

    def local_models(self) -> dict[str, dict[str, Any]]:
        """The live tensors of each model (this worker's shards), by their names in :meth:`to_save`."""
        return {name: localized(tensors_of(model_state(module))) for name, module in self.modules.items()}

    def buffers(self, of: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
        """The buffers of a trained model: the live tensors, by their names in :meth:`to_save`."""
        places = {b.data_ptr() for b in of.buffers() if b.numel()}
        return {
            name: {k: t for k, t in model.items() if t.data_ptr() in places}
            for name, model in self.local_models().items()
        }

    def take_over(self, loaded: dict[str, Any], plain: Mapping[str, Any] | None = None) -> list[str]:
        """Make the filled tensors of :meth:`to_load` the state.

        Args:
            loaded: the filled tensors, and the plain bytes unless ``plain`` has the values.
            plain: the values of the plain bytes.

        Returns:
            Names of tensors that are not what was saved, as far as digests came with them.

        Raises:
            TopologyMismatchError: what came is another worker's shard, or that of another layout, or lacks
                what a module keeps beside its tensors.
        """
        if plain is None:
            plain = self.unpack(loaded["plain"]["bytes"].getvalue())
            assert plain is not None
        shards = plain["shards"]
        for name, module in self.modules.items():
            values = {**loaded["models"][name], **plain["extra"][name]}
            load_model(name, module, values, shards["models"].get(name, {}), self._unmade[name])
        for name, optimizer in self.optimizers.items():
            state: dict[int, dict[str, Any]] = {
                int(i): dict(v) for i, v in plain["optimizers"][name]["state"].items()
            }
            described = shards["optimizers"].get(name, {}).get("state", {})
            groups = plain["optimizers"][name]["param_groups"]
            fit_groups(name, optimizer, groups, self._named_as(plain["optimizers"][name].get("names", ())))
            owners = parameters_of(optimizer)
            strides = plain["optimizers"][name].get("strides", {})
            for index, fields in loaded["optimizers"][name]["state"].items():
                for field, values in fields.items():
                    part = described.get(index, {}).get(field)
                    owner = owners[int(index)]
                    own = laid_out(values, owner, strides.get(index, {}).get(field))
                    value = own if part is None else rebuilt(own, part, owner)
                    state.setdefault(int(index), {})[field] = value
            for index, order in plain["optimizers"][name].get("order", {}).items():
                held = state[int(index)]
                state[int(index)] = {field: held[field] for field in order if field in held}
            load_optimizer(optimizer, {"state": state, "param_groups": groups})
        if (gradients := plain.get("gradients")) is not None:  # older checkpoints say nothing of them
            put_forms(self.parameter_names(), from_saved(gradients))
        self.of_earlier_run = plain.get("run", "") != self.run
        if self.carried is not None and "carried" in plain:
            self.carried.take_over(plain["carried"])
        self.restore(plain["small"])  # after the variables: a part may set some of what it holds itself
        if not (expected := plain[STORED_AS]):  # of verify="none"
            return []
        found = tensor_digests(self.named_tensors())
        return differing(by_plain_names(found), by_plain_names(expected))

    def _named_as(self, names: Iterable[Sequence[str] | None]) -> list[nn.Parameter | None]:
        """The parameters that an optimizer held when it was saved, in its order."""
        here = {place: parameter for parameter, place in self.parameter_names().items()}
        found = [here.get(place_of(*name)) if name is not None else None for name in names]
        return [parameter if isinstance(parameter, nn.Parameter) else None for parameter in found]

    def differing_from(self, loaded: Mapping[str, Any]) -> list[str]:
        """Names of tensors that are not, bit for bit, what :meth:`take_over` was given.

        What was filled in place cannot differ. An optimizer that converts what it loads would.
        """
        live = {_memory(tensor) for tensor in self.tensors() if tensor.layout == torch.strided}

        def differs(ours: Any, given: Any) -> bool:
            if not isinstance(given, torch.Tensor) or _memory(given) in live:
                return False
            here = local(ours) if isinstance(ours, torch.Tensor) else None
            return here is None or not same_bits(here, given.to(here.device))

        names = []
        for name, model in loaded["models"].items():
            if any(_memory(tensor) not in live for tensor in model.values()):
                ours = model_state(self.modules[name])
                names += [f"{name}.{key}" for key, given in model.items() if differs(ours.get(key), given)]
        for name, optimizer in self.optimizers.items():
            owners = parameters_of(optimizer)
            for index, fields in loaded["optimizers"][name]["state"].items():
                ours = optimizer.state.get(owners[int(index)], {})
                different = [field for field, given in fields.items() if differs(ours.get(field), given)]
                names += [f"{name}.{field} of parameter {index}" for field in different]
        return names


def _each(name: str, optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """An optimizer, or those that a container of optimizers has, each by a name of its own."""
    inner = contained(optimizer)
    if not inner:
        yield name, optimizer
    for number, one in enumerate(inner):
        yield f"{name}.{number}", one


def _memory(tensor: torch.Tensor) -> tuple[int, torch.dtype, int]:
    """The place of a tensor's values, and their form."""
    here = local(tensor)
    return here.data_ptr(), here.dtype, here.numel()
