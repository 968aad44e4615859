"""Tensors that a script reaches, that change while training, and that neither the state nor a step has.

Modules outside of the state: target and teacher networks, averaged copies, a criterion with a centre. No
optimizer steps with them, so only their values tell. A replacement would have them as its script makes them,
and nobody would notice: they are an error. Large tensors and arrays that a script holds by itself may be
batches as well, which each step fills with others: they are named once.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from swift_ft.checkpoint.step.containers import content_in, items_in
from swift_ft.checkpoint.step.kinds import CONTAINERS, FIXED_EXACTLY, PROXIES
from swift_ft.checkpoint.step.leaves import MOST_BYTES
from swift_ft.checkpoint.step.script import ScriptVariables
from swift_ft.checkpoint.step.traces import (
    Trace,
    can_be_sampled,
    is_looked_into,
    sample_of_array,
    samples_of_tensors,
    trace_of,
)
from swift_ft.errors import IncompleteStateError
from swift_ft.torch_adapters.wrappers import wrapped_ddp
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import same_bits, tensors_in
from swift_ft.units import format_bytes

_logger = logging.getLogger(__name__)

_LEADS_NOWHERE = FIXED_EXACTLY | {tuple}
"""Types of elements that are not looked into."""
_MOST_LOOKED_AT = 100_000
"""Elements of one container."""


class Outside:
    """Compares these tensors with what they were when they were first seen, by a sample of each.

    Args:
        variables: finds what a script can reach.
    """

    def __init__(self, variables: ScriptVariables) -> None:
        self._variables = variables
        self._first: dict[int, tuple[weakref.ref[Any], bytes]] = {}  # by id(), which may be given again
        self._said: set[str] = set()
        self._held: dict[str, tuple[int, int, Trace]] = {}  # containers, by name: id(), length and trace
        self._names: set[str] | None = None  # of containers at the first look: others may be batches

    def check(self) -> None:
        """Call it after a look of the variables.

        Raises:
            IncompleteStateError: a module has changed that is not in the state.
        """
        self._first = {number: one for number, one in self._first.items() if one[0]() is not None}
        for path, module in self._modules():
            tensors = [t for t in (*module.parameters(), *module.buffers()) if self._counts(t)]
            found = zip(tensors, self._changed(tensors, samples_of_tensors(tensors)), strict=True)
            changed = [tensor for tensor, one in found if one]
            if changed and not self._part_saves(path, changed):
                remedy = f'Pass it too, as in Session({{..., "{_last_name(path)}": {path}}}, ...).'
                if wrapped_ddp(module) in self._variables.state.modules.values():
                    remedy = (
                        "Of it the state has the DDP model: keep what it adds in a module of its own, and "
                        "pass that, too."
                    )
                raise IncompleteStateError(
                    f"The module {path} (a {type(module).__name__}) changes while training and is not in "
                    f"Session(state): a replacement would begin with what its script makes. {remedy}"
                )
        large = dict(self._large())
        containers = {name: value for name, value in large.items() if isinstance(value, CONTAINERS)}
        self._check_containers(containers)
        of_torch = {name: value for name, value in large.items() if isinstance(value, torch.Tensor)}
        arrays = {name: value for name, value in large.items() if isinstance(value, np.ndarray)}
        self._compare(of_torch, samples_of_tensors([*of_torch.values()]))
        self._compare(arrays, list(map(sample_of_array, arrays.values())))

    def _check_containers(self, named: Mapping[str, Any]) -> None:
        """Compare those that no step puts back, or not what is in their elements."""
        if self._names is None:
            self._names = {*named}
        held, self._held = self._held, {}
        for name, value in named.items():
            if name not in self._names or (
                id(value) not in self._variables.unnoted and is_looked_into(value)
            ):
                continue
            number, length, trace = held.get(name, (0, 0, None))
            if number != id(value):
                length, trace = len(value), None
            # What has been added to a list since is cut off.
            first = [*islice(value, length)] if isinstance(value, list) else value
            now = trace_of(first, self._variables.protected.has)
            if now != (trace or now):
                self._say(name, f"{len(value):,} elements")
            self._held[name] = id(value), length, trace or now

    def _compare(self, named: Mapping[str, Any], samples: Sequence[bytes]) -> None:
        changed = self._changed([*named.values()], samples)
        for (name, value), one in zip(named.items(), changed, strict=True):
            if one:
                self._variables.changing.add([value])
                self._say(name, format_bytes(value.nbytes))

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The outermost ones, by path."""
        held = {id(module) for module in self._variables.state.tree.modules()}
        for path, module in self._variables.modules():
            if id(module) not in held:
                held |= {id(inner) for inner in module.modules()}
                yield path, module

    def _part_saves(self, path: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the part of the state through which a path leads has copies of tensors in its own state."""
        root = re.split(r"[.\[]", path, maxsplit=1)[0]
        part = self._variables.state.small.get(root)
        saved = [*tensors_in(part.state_dict())] if part is not None else []
        return bool(saved) and all(
            any(one.shape == tensor.shape and same_bits(one, local(tensor).to(one.device)) for one in saved)
            for tensor in tensors
        )

    def _large(self) -> Iterator[tuple[str, Any]]:
        for namespace, name in self._variables.slots:
            value = namespace.variables.get(name)
            # A module's own tensors are watched as parameters are; buffers are put back by themselves.
            watched = namespace.module is not None or namespace.is_of_buffers
            if not watched or issubclass(type(value), CONTAINERS):
                yield from self._large_in(f"{namespace.path}.{name}".lstrip("."), value)
        for (_, name), value in self._variables.of_loop().items():
            yield from self._large_in(name, value)

    def _large_in(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if type(value) in PROXIES:
            return
        if isinstance(value, CONTAINERS):
            yield name, value
        if isinstance(value, dict | list) and not _LEADS_NOWHERE.issuperset(map(type, content_in(value))):
            for key, inner in islice(items_in(value), _MOST_LOOKED_AT):
                if isinstance(inner, torch.Tensor | np.ndarray):
                    yield from self._large_in(f"{name}[{key!r}]", inner)
                elif isinstance(inner, CONTAINERS):
                    yield f"{name}[{key!r}]", inner
        elif isinstance(value, np.ndarray):
            if value.nbytes > MOST_BYTES and not isinstance(value, np.memmap):
                yield name, value
        elif isinstance(value, torch.Tensor) and self._counts(value) and value.nbytes > MOST_BYTES:
            yield name, value

    def _counts(self, tensor: torch.Tensor) -> bool:
        if is_lazy(tensor) or not can_be_sampled(tensor):
            return False
        return tensor.grad_fn is None and not self._variables.protected.has_memory_of(tensor)

    def _changed(self, values: Sequence[Any], samples: Sequence[bytes]) -> Iterator[bool]:
        for value, sample in zip(values, samples, strict=True):
            known = self._first.get(id(value))
            if known is None or known[0]() is not value:
                self._first[id(value)] = weakref.ref(value), sample
                yield False
            else:
                yield known[1] != sample

    def _say(self, name: str, size: str) -> None:
        if name in self._said:
            return
        self._said.add(name)
        _logger.warning(
            "%s (%s) changes while training, and is too large to be noted: an interrupted step does not put "
            "it back, and a replacement has its own. If later steps need what is in it, let a module of "
            "Session(state) hold it, or an object with state_dict() and load_state_dict()",
            name,
            size,
            extra={"event": "large_value_changes", "variable": name},
        )


def _last_name(path: str) -> str:
    return re.split(r"\W+", path.rstrip("])'\""))[-1]
