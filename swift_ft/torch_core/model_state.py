"""A model's tensors by the names under which DCP stores them: as DCP says, without asking it each time.

DCP looks for the name of each tensor, and once more for each way in which a model may be wrapped. That takes
milliseconds of Python, several times in a recovery in which all others wait. What it finds follows from the
keys of ``state_dict()``, so the second time this module does without.

Private parts used (tested on torch 2.11 to 2.14), to see whether loading would run code of the model's own:

- of a module: ``_load_from_state_dict``, ``_load_state_dict_pre_hooks``, ``_load_state_dict_post_hooks``.

And to see whether a model says other names than it has, and what it has:

- of a module: ``_state_dict_hooks``, ``_parameters``, ``_buffers``, ``_non_persistent_buffers_set``,
  ``_modules``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from swift_ft.torch_core.shards import local

_Keys = tuple[str, ...]

_names: weakref.WeakKeyDictionary[nn.Module, tuple[_Keys, _Keys]] = weakref.WeakKeyDictionary()
"""By model: the keys of ``state_dict()``, and what DCP makes of each."""

_AROUND_PARTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
"""The names under which ``checkpoint_wrapper`` and ``torch.compile`` have what they wrap."""

_EXTRA = "_extra_state"
"""The last part of a key for what ``Module.get_extra_state`` returned."""


def is_extra(key: str, value: Any = None) -> bool:
    """Whether a value of a model's state is none of its parameters and buffers.

    It may be a tensor nevertheless, and have another size each time (the FP8 scales of TransformerEngine).
    """
    return key.rpartition(".")[2] == _EXTRA or not (value is None or isinstance(value, torch.Tensor))


def model_state(module: nn.Module) -> dict[str, Any]:
    """All that a model saves, by name; the same as DCP's ``get_model_state_dict``. Its tensors are live.

    Where hooks of the model change what it saves (torchtitan's fused projections save one weight as three),
    DCP cannot name that: then it is what the model has, by the names that it has there.
    """
    if _says_other_names(module):
        return _own_state(module)
    known = _names.get(module)
    with torch.no_grad():
        own: dict[str, Any] = module.state_dict() if known is not None else {}
    if known is not None and tuple(own) == known[0]:
        return dict(zip(known[1], own.values(), strict=True))
    found: dict[str, Any] = get_model_state_dict(module)
    _learn(module, found)
    return found


def buffers_by_key(module: nn.Module) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """A model's own buffers, each with the module that has it, by their names in :func:`model_state`.

    None where a hook of the model says other names.
    """
    if _says_other_names(module):
        return {}
    model_state(module)  # learns the names
    own, saved_as = _names.get(module, ((), ()))
    held = dict(module.named_buffers(remove_duplicate=False))
    return {
        key: (module.get_submodule(name.rpartition(".")[0]), held[name])
        for name, key in zip(own, saved_as, strict=True)
        if name in held
    }


Unmade = Mapping[nn.Module, Set[str]]
"""By module, the names of buffers that it has registered as None."""


def unmade_buffers(module: nn.Module) -> Unmade:
    """The buffers that a model would save and that are None: its first forward may make them."""
    found: weakref.WeakKeyDictionary[nn.Module, Set[str]] = weakref.WeakKeyDictionary()
    for part in module.modules():
        saved = {*part._buffers.keys()} - part._non_persistent_buffers_set
        if names := {name for name in saved if part._buffers[name] is None}:
            found[part] = names
    return found


def made_later(module: nn.Module, unmade: Unmade) -> dict[str, tuple[nn.Module, str]]:
    """The buffers of a model that are None, or once were, by the names that a tensor there has or would have.

    None where a hook of the model says other names.

    Args:
        module: the model.
        unmade: what :func:`unmade_buffers` said once.
    """
    if _says_other_names(module):
        return {}
    now = unmade_buffers(module)
    return {
        f"{prefix}{name}": (part, name)
        for prefix, part in _places_in(module, "")
        for name in sorted({*now.get(part, ()), *(unmade.get(part, set()) & {*part._buffers.keys()})})
    }


def _places_in(part: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """All modules of a model, each with what begins the names of its tensors in :func:`model_state`."""
    yield prefix, part
    for name, inner in part._modules.items():
        if inner is not None:
            is_wrapped = name in _AROUND_PARTS or isinstance(part, DistributedDataParallel)
            yield from _places_in(inner, prefix if is_wrapped else f"{prefix}{name}.")


def _says_other_names(module: nn.Module) -> bool:
    """Whether a hook that is not torch's changes what a model saves."""
    # FSDP1's flat parameters are DCP's matter.
    return any(map(_has_own_hooks, module.modules())) and not _has_flat_parameters(module)


def _own_state(module: nn.Module) -> dict[str, Any]:
    """A model's own tensors by name.

    Its hook is not asked what it makes of them: with shards that may need all other workers.
    """
    found: dict[str, Any] = {}
    for place, part in module.named_modules(remove_duplicate=False):
        prefix = _unwrapped(f"{place}.") if place else ""
        held = {**part._parameters, **part._buffers}
        for name, tensor in held.items():
            if tensor is not None and name not in part._non_persistent_buffers_set:
                found[f"{prefix}{name}"] = tensor.detach()
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            found[f"{prefix}{_EXTRA}"] = part.get_extra_state()
    return found


def _has_own_hooks(part: nn.Module) -> bool:
    """Whether hooks of the model change what it saves. torch's wrappers have such that DCP knows."""
    modules = (getattr(hook, "__module__", None) or "" for hook in part._state_dict_hooks.values())
    return any(module.partition(".")[0] != "torch" for module in modules)


def plain_name(name: str) -> str:
    """A name in a model without what torch's wrappers around its parts add: compiled, checkpointed layers.

    DDP and averages add ``module.``, which may also be the script's own: it stays.
    """
    return _without(_AROUND_PARTS, name)


def _unwrapped(name: str) -> str:
    """A name without what wrappers add to it."""
    return _without(_AROUND_PARTS | {"module"}, name)


def _without(wrappers: Set[str], name: str) -> str:
    *owners, last = name.split(".")
    return ".".join([*(owner for owner in owners if owner not in wrappers), last])


def _has_flat_parameters(module: nn.Module) -> bool:
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def _learn(module: nn.Module, found: Mapping[str, Any]) -> None:
    """Remember the names, if it is the names alone that DCP adds to what the model says itself."""
    _names.pop(module, None)
    if _has_flat_parameters(module):
        return
    with torch.no_grad():
        own: dict[str, Any] = module.state_dict()
    alike = all(_same_memory(one, found[name]) for one, name in zip(own.values(), found, strict=False))
    all_or_none = own.keys() == found.keys() or own.keys().isdisjoint(
        found
    )  # else DCP's order is another one
    if len(own) == len(found) and alike and all_or_none:
        _names[module] = tuple(own), tuple(found)


def load_model_state(module: nn.Module, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Load a whole state, as DCP's ``set_model_state_dict`` does.

    Args:
        module: the model.
        values: by name.
        own: what :func:`model_state` gives for it. If the values are in this memory already, nothing is left
            to do, unless the model has code of its own for what it loads.
    """
    if _says_other_names(module):
        _load_own(module, values, own)
        return
    in_place = own.keys() == values.keys() and all(_same_memory(own[name], values[name]) for name in own)
    if not (in_place and all(_loads_tensors_only(part) for part in module.modules())):
        set_model_state_dict(module, {**values})


def _load_own(module: nn.Module, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """By the names that a model has, so without its hooks, which convert other names."""
    if missing := own.keys() ^ values.keys():
        raise RuntimeError(f"Only one of the model and the state to load has {sorted(missing)[:3]}.")
    places = {_unwrapped(f"{place}.")[:-1] if place else "": part for place, part in module.named_modules()}
    with torch.no_grad():
        for name, value in values.items():
            if is_extra(name, value):
                places[name.rpartition(".")[0]].set_extra_state(value)
            elif not _same_memory(own[name], value):
                own[name].copy_(value)


def _same_memory(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or type(one) is not type(
        other
    ):
        return False
    here, there = local(one), local(other)
    alike = (here.dtype, here.shape, here.device) == (there.dtype, there.shape, there.device)
    return alike and here.stride() == there.stride() and here.data_ptr() == there.data_ptr()


def loads_itself(part: nn.Module) -> bool:
    """Whether a module has code of its own for what it loads: it may take tensors of another size.

    Those of ``torch.nn``, such as BatchNorm, do not.
    """
    return not type(part).__module__.startswith("torch.nn.") and not _loads_tensors_only(part)


def _loads_tensors_only(part: nn.Module) -> bool:
    kind, plain = type(part), nn.Module
    inherited = (
        kind._load_from_state_dict is plain._load_from_state_dict
        and kind.load_state_dict is plain.load_state_dict
    )
    return inherited and not part._load_state_dict_pre_hooks and not part._load_state_dict_post_hooks
