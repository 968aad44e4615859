"""Values outside of gradients and messages that stages and a loss read or change as they compute.

Helpers have their own modules and their own loss function. What computing changes there is lost with them,
and what the script sets in its own objects does not reach them. So an owner looks whether its share of the
microbatches leaves anything behind, and a helper whether its attributes have the owner's values.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from swift_ft.checkpoint.step.kinds import CONTAINERS, FIXED_EXACTLY, GENERATORS
from swift_ft.checkpoint.step.namespaces import MISSING, Namespace
from swift_ft.checkpoint.step.reach import Reach, content_of, reach
from swift_ft.checkpoint.step.traces import can_be_sampled, trace_of
from swift_ft.errors import CannotHelpError
from swift_ft.torch_core.module_tree import all_within
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import bits_of, version_of

_LOSS = "the loss function"
_FEW = 64
"""Elements of a tensor that counts as a setting."""

Settings = dict[str, tuple[Any, ...]]
"""By path, the type of an attribute and its plain value."""


def _root_of(stage: int) -> str:
    return f"stage {stage}"


class OutsideValues:
    """All that computing some stages, and a loss, can reach besides their parameters and buffers.

    Args:
        modules: by stage.
        loss: the loss function; None where the last stage is not among them.
    """

    def __init__(self, modules: Mapping[int, nn.Module], loss: Callable[..., Any] | None) -> None:
        self._roots: dict[str, Any] = {_root_of(stage): module for stage, module in modules.items()}
        if loss is not None:
            self._roots[_LOSS] = loss
        self._within = {id(module) for module in all_within(modules.values())}
        self._found: Reach | None = None
        self._noted: dict[tuple[int, str], _Noted] | None = None

    # ----------------------------------------------------------------------------- changed by computing

    def note(self) -> None:
        """Some microbatches are about to be computed."""
        self._noted = {key: _Noted(value) for key, value in self._values()}

    def check(self) -> None:
        """They have been computed.

        Raises:
            CannotHelpError: that has changed more than gradients.
        """
        if self._noted is None:
            return
        noted, self._noted = self._noted, None
        for key, value in self._values():
            if (before := noted.pop(key, None)) is None or before.differs_from(value):
                self._refuse(key)
        for key in noted:
            self._refuse(key)

    def _refuse(self, key: tuple[int, str]) -> None:
        raise CannotHelpError(
            f"computing a microbatch changes {key[1]}, which would not see those that others compute"
        )

    def _values(self) -> Iterator[tuple[tuple[int, str], Any]]:
        """Each value with a key: a number that tells places apart, and its name."""
        found = self._reach()
        yield (-1, "the state of Python's random numbers"), random.getstate()
        yield (-2, "the state of NumPy's random numbers"), np.random.get_state(legacy=True)
        for number, namespace in enumerate(found.namespaces):
            for name in namespace.names():
                yield (number, f"{namespace.path}.{name}"), namespace.variables.get(name, MISSING)
            yield from self._of_other_module(number, namespace)
        for number, (path, cell) in enumerate(found.cells, len(found.namespaces)):
            yield (number, path), content_of(cell)
        for number, leaf in enumerate(found.leaves, len(found.namespaces) + len(found.cells)):
            yield (number, "what a container has"), leaf

    def _reach(self) -> Reach:
        """Once for a replay: to look for all takes some milliseconds."""
        if self._found is None:
            self._found = reach(self._roots.items())
        return self._found

    def _of_other_module(self, number: int, namespace: Namespace) -> Iterator[tuple[tuple[int, str], Any]]:
        """The gradients and buffers of a module that is in no stage, such as a criterion."""
        module = namespace.module
        if module is None or id(module) in self._within:
            return
        for name, parameter in module.named_parameters(recurse=False):
            yield (number, f"the gradient of {namespace.path}.{name}"), parameter.grad
        for name, buffer in module.named_buffers(recurse=False):
            yield (number, f"the buffer {namespace.path}.{name}"), buffer

    # ------------------------------------------------------------------------------- set by the script

    def settings(self) -> Settings:
        """The plain values of what belongs to the stages' modules and to the loss, by path."""
        found = self._reach()
        variables = [
            (f"{namespace.path}.{name}", namespace.variables.get(name, MISSING))
            for namespace in found.namespaces
            if namespace.module is not None and namespace.path.startswith((*self._roots,))
            for name in namespace.names()
            if name != "training"  # travels with the inputs
        ]
        variables += [(path, content_of(cell)) for path, cell in found.cells if path.startswith(_LOSS)]
        return {path: plain for path, value in variables if (plain := _plain(value)) is not None}


def check_settings(ours: Settings, owners: Settings) -> None:
    """Compare the settings of a helper's modules with the owner's.

    Raises:
        CannotHelpError: they have another value of the same thing.
    """
    for path, value in owners.items():
        if path in ours and ours[path] != value:
            raise CannotHelpError(
                f"{path} is {_shown(ours[path])} here, and the script has made it {_shown(value)}"
            )


def _plain(value: Any) -> tuple[Any, ...] | None:
    """A value that can be sent and compared; None of others, and of None, which is often yet to be filled."""
    if isinstance(value, bool | int | str):
        return (type(value).__name__, value) if type(value) in FIXED_EXACTLY else None
    if type(value) is float:
        return ("float", value.hex())
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    if is_tensor and value.numel() <= _FEW and can_be_sampled(value) and value.device.type == "cpu":
        return ("tensor", *value.shape, *bits_of(local(value)).tolist())
    return None


def _shown(plain: tuple[Any, ...]) -> str:
    if plain[0] == "tensor":
        return "another tensor"
    return repr(float.fromhex(plain[1]) if plain[0] == "float" else plain[1])


class _Noted:
    """A value at one moment."""

    def __init__(self, value: Any) -> None:
        # A graph may hold much memory, and so is not held.
        is_tensor = isinstance(value, torch.Tensor)
        self._value: Callable[[], Any] = weakref.ref(value) if is_tensor else lambda: value
        self._content = _content_of(value)

    def differs_from(self, now: Any) -> bool:
        """Whether it is another one, or has changed in itself."""
        before = self._value()
        if type(before) in FIXED_EXACTLY and type(before) is type(now):
            return not (before is now or before == now)
        if before is not now and not (_is_plain(before) and type(before) is type(now)):
            return True
        return bool(self._content != _content_of(now))


def _is_plain(value: Any) -> bool:
    """Whether an equal value is as good."""
    return isinstance(value, tuple)


def _content_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        content = None if value.grad_fn is not None else _digest_of(value)
        return version_of(value), content
    # Others are one and the same, or have variables that are compared themselves.
    may_change = isinstance(value, (tuple, np.ndarray, *CONTAINERS, *GENERATORS))
    return _digest_of(value) if may_change else None


def _digest_of(value: Any) -> int:
    return trace_of(value, lambda one: isinstance(one, nn.Parameter)).digest
