"""The hook on models that ``fully_shard`` has sharded (FSDP2, HSDP): back to the shards, and who holds which.

FSDP keeps where it is in an iteration: what is gathered, what still travels, which hooks have run. A loss
interrupts it anywhere. :meth:`ShardedModels.reset` brings it back to the beginning: all parameters sharded,
nothing under way, no gradient kept. Its groups live on behind their handles (`lasting_group.py`).

Private parts used (tested on torch 2.11 to 2.14), besides those of `versions/fsdp_groups.py` and
`versions/fsdp_reset.py`:

- of an ``FSDPModule``: ``_get_fsdp_state()``.
- of that state: ``_is_root``, ``_state_ctx.is_last_backward``.
- of a parameter group: ``mesh_info.mesh``, ``_all_gather_result``, ``_to_sharded()``, ``is_sharded``,
  ``fsdp_params``, and the switches in ``_SWITCHES``.
- of its parameters: ``_unsharded_param``, ``unsharded_accumulated_grad``, ``grad_offload_event``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from swift_ft.errors import UnsupportedError
from swift_ft.torch_adapters.versions.fsdp_groups import groups_of
from swift_ft.torch_adapters.versions.fsdp_reset import forget_forward_order, reset_iteration

_SWITCHES = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")
"""The switches that a script sets when it accumulates gradients."""


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module, or to any inside of it."""
    return any(True for _ in _sharded_modules([module]))


def refuse_wrapped_shards(what: str, model: Any) -> None:
    """Refuse the older ``FullyShardedDataParallel`` wrapper, in a model or anything else.

    Raises:
        UnsupportedError: it is there; says what to do instead.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    if any(base.__name__ == "FullyShardedDataParallel" for inner in modules for base in type(inner).__mro__):
        raise UnsupportedError(
            f"{what} is sharded by FullyShardedDataParallel, whose flat parameters no session can restore: "
            "shard it with torch.distributed.fsdp.fully_shard, or wrap it in DistributedDataParallel."
        )


class ShardedModels:
    """All modules of a script that ``fully_shard`` was applied to.

    Args:
        modules: those that the script trains, sharded or not.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(_sharded_modules(modules))
        self._switches: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._modules)

    @property
    def number(self) -> int:
        """Of this worker among those over which a model is sharded, and its replicas: each has other data."""
        for group in self._groups():
            mesh, number = group.mesh_info.mesh, 0
            for dimension, coordinate in enumerate(_coordinate(mesh)):
                number = number * mesh.size(dimension) + coordinate
            return number
        return 0

    def begin(self) -> None:
        """A step begins: all workers have nothing but their shards.

        A worker that still had a whole parameter, from a validation say, would not take part in gathering it.
        The others, among them one that was replaced since, would wait for it.

        Raises:
            UnsupportedError: if gradients were carried over from the previous step.
        """
        for module in self._modules:
            forget_forward_order(module._get_fsdp_state())
        for group in self._groups():
            if not group.is_sharded:
                group._to_sharded()
            if any(gradient is not None for gradient in _kept_gradients(group)):
                raise UnsupportedError(
                    "Gradients of a sharded model are carried over from one step to the next, which a "
                    "repeated step would count twice: accumulate them inside one `with step:`.",
                    alike=True,
                )
        self._switches = [
            *((group, name, getattr(group, name)) for group in self._groups() for name in _SWITCHES),
            *((m._get_fsdp_state()._state_ctx, "is_last_backward", True) for m in self._modules),
        ]

    def reset(self) -> None:
        """Back to the beginning of the step, after it was interrupted and its communication has ended."""
        for group in self._groups():
            group._all_gather_result = None  # else it would be waited for, and that has failed
        for module in self._modules:
            if module._get_fsdp_state()._is_root:  # None before its first forward pass, which prepares all
                reset_iteration(module)
        for group in self._groups():
            if not group.is_sharded:
                group._to_sharded()
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                parameter.grad_offload_event = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
        for owner, name, value in self._switches:
            setattr(owner, name, value)

    def _groups(self) -> Iterator[Any]:
        for module in self._modules:
            yield from groups_of(module._get_fsdp_state())


def _sharded_modules(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Modules that ``fully_shard`` was applied to; of a list of them, which share a state, the first."""
    seen: set[int] = set()
    for module in modules:
        for inner in module.modules():
            if not any(base.__name__ == "FSDPModule" for base in type(inner).__mro__):
                continue
            fsdp: Any = inner
            state = fsdp._get_fsdp_state()
            if id(state) not in seen:
                seen.add(id(state))
                yield fsdp


def _kept_gradients(group: Any) -> Iterator[torch.Tensor | None]:
    for parameter in group.fsdp_params:
        yield parameter.unsharded_accumulated_grad
        if hasattr(parameter, "_unsharded_param"):
            yield parameter._unsharded_param.grad


def place_of(modules: Iterable[nn.Module]) -> str:
    """The shards of this worker, in words: ``shard 1 of 2``. Workers with equal words hold the same.

    That follows from the meshes and placements of the parameters, whatever made them: FSDP, or
    ``distribute_tensor``. Empty if nothing is sharded. The modules have only their shards.
    """
    places: dict[_Axes, str] = {}
    for parameter in _distributed(modules):
        axes = _axes_of(parameter)
        coordinate = _coordinate(parameter.device_mesh)
        index, count = 0, 1
        for dimension in axes.dimensions:
            size = parameter.device_mesh.size(dimension)
            index, count = index * size + coordinate[dimension], count * size
        if count > 1:
            # By axes: of three parameters over three axes of two workers, words alone would tell too little.
            places[axes] = f"shard {index} of {count}"
    return ", ".join(places.values())


def replicas_of(modules: Iterable[nn.Module]) -> list[int]:
    """Ranks of the workers that hold the same shards as this one, which is among them, in a mesh's order.

    That is the same of every parameter. Empty if nothing is sharded.
    """
    found: list[int] | None = None
    for parameter in _distributed(modules):
        mesh, sharded = parameter.device_mesh, _axes_of(parameter).dimensions
        here = enumerate(_coordinate(mesh))
        held = tuple(coordinate if dimension in sharded else slice(None) for dimension, coordinate in here)
        ranks: list[int] = mesh.mesh[held].flatten().tolist()
        found = ranks if found is None else [rank for rank in found if rank in ranks]
    return found or []


@dataclass(frozen=True)
class _Axes:
    """The dimensions of a mesh over which a tensor is sharded."""

    mesh: DeviceMesh
    dimensions: tuple[int, ...]


def _axes_of(parameter: DTensor) -> _Axes:
    pairs = enumerate(parameter.placements)
    sharded = tuple(dimension for dimension, placement in pairs if not isinstance(placement, Replicate))
    return _Axes(parameter.device_mesh, sharded)


def _distributed(modules: Iterable[nn.Module]) -> Iterator[DTensor]:
    for parameter in (p for module in modules for p in module.parameters()):
        if isinstance(parameter, DTensor):
            yield parameter


def _coordinate(mesh: DeviceMesh) -> list[int]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # a worker has no parameters on a mesh of others
    return list(coordinate)
