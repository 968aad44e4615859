"""What a session protects, as one value that can be saved, loaded, sent, and put back."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from swift_ft.determinism import host_random_state, set_host_random_state

__all__ = ["Path", "TensorKind", "TrainingState", "bytes_of"]

Path = tuple[str, ...]
"""Where a tensor is in :meth:`TrainingState.to_save`."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What a tensor looks like."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class TrainingState:
    """What a session protects: modules, optimizers, and small objects with a ``state_dict``.

    Args:
        parts: by name. A module or an optimizer is large state; everything else must have ``state_dict()``
            and ``load_state_dict()`` and is copied at every step.

    Attributes:
        parameters: all parameters of all optimizers, each with its optimizer; the index in this list is what
            events and plans mean by a parameter.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
        self.optimizers = {name: part for name, part in parts.items() if isinstance(part, Optimizer)}
        large = self.modules.keys() | self.optimizers.keys()
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

    # -------------------------------------------------------------------------------------- small state

    def snapshot(self) -> dict[str, Any]:
        """A copy of all small state and of the host's random state, for putting it back (kilobytes)."""
        parts = {name: copy.deepcopy(part.state_dict()) for name, part in self.small.items()}
        return {"parts": parts, "random": host_random_state()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Put back what :meth:`snapshot` copied."""
        for name, part in self.small.items():
            part.load_state_dict(copy.deepcopy(saved["parts"][name]))
        set_host_random_state(saved["random"])

    # -------------------------------------------------------------------------------------- everything

    def to_save(self) -> dict[str, Any]:
        """Everything, by name, as DCP stores it; large tensors are the live ones.

        Optimizers are kept as they are (no helper of DCP's is asked: it would run a step on one whose state
        is still empty, and so count a step that never was).
        """
        optimizers, plain = {}, {}
        for name, optimizer in self.optimizers.items():
            saved = optimizer.state_dict()
            tensors, rest = _split_tensors(saved["state"])
            optimizers[name] = {"state": tensors}
            plain[name] = {"state": rest, "param_groups": saved["param_groups"]}
        return {
            "models": {name: get_model_state_dict(module) for name, module in self.modules.items()},
            "optimizers": optimizers,
            "plain": {"bytes": _to_bytes({"small": self.snapshot(), "optimizers": plain})},
        }

    def to_load(self, stored: Mapping[Path, TensorKind], aside: bool = False) -> dict[str, Any]:
        """Tensors to be filled: the model's own, and fresh ones for optimizers.

        Args:
            stored: the tensors that will come, by their path in :meth:`to_save`.
            aside: fresh ones for models too, so that nothing changes before :meth:`take_over`.
        """
        optimizers: dict[str, Any] = {name: {"state": {}} for name in self.optimizers}
        for path, kind in stored.items():
            if path[0] == "optimizers":
                _, name, _, parameter, field = path
                tensor = torch.empty(kind.shape, dtype=kind.dtype)
                optimizers[name]["state"].setdefault(parameter, {})[field] = tensor
        models = {name: get_model_state_dict(module) for name, module in self.modules.items()}
        if aside:
            models = {
                name: {
                    key: torch.empty_like(value) if isinstance(value, torch.Tensor) else value
                    for key, value in model.items()
                }
                for name, model in models.items()
            }
        return {"models": models, "optimizers": optimizers, "plain": {"bytes": io.BytesIO()}}

    def buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """The buffers among what :meth:`to_save` names as models: the live tensors, by the same names."""
        places = {b.data_ptr() for module in self.modules.values() for b in module.buffers() if b.numel()}
        saved = {name: get_model_state_dict(module) for name, module in self.modules.items()}
        return {
            name: {k: t for k, t in model.items() if isinstance(t, torch.Tensor) and t.data_ptr() in places}
            for name, model in saved.items()
        }

    def take_over(self, loaded: dict[str, Any]) -> None:
        """Make what :meth:`to_load` was filled with the state."""
        loaded["plain"]["bytes"].seek(0)
        plain = torch.load(loaded["plain"]["bytes"], weights_only=True)
        for name, module in self.modules.items():
            set_model_state_dict(module, loaded["models"][name])
        for name, optimizer in self.optimizers.items():
            state: dict[int, dict[str, Any]] = {
                int(i): dict(v) for i, v in plain["optimizers"][name]["state"].items()
            }
            for parameter, fields in loaded["optimizers"][name]["state"].items():
                state.setdefault(int(parameter), {}).update(fields)
            groups = plain["optimizers"][name]["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.restore(plain["small"])


def bytes_of(saved: Mapping[str, Any]) -> int:
    """Size of the tensors in what :meth:`TrainingState.to_save` returned."""
    sizes = (bytes_of(v) if isinstance(v, Mapping) else getattr(v, "nbytes", 0) for v in saved.values())
    return sum(sizes)


def _split_tensors(
    state: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, dict[str, Any]]]:
    """An optimizer's state by parameter: tensors apart from plain values."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    rest: dict[str, dict[str, Any]] = {}
    for parameter, fields in state.items():
        rest[str(parameter)] = {k: v for k, v in fields.items() if not isinstance(v, torch.Tensor)}
        if found := {k: v for k, v in fields.items() if isinstance(v, torch.Tensor)}:
            tensors[str(parameter)] = found
    return tensors, rest


def _to_bytes(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer
