"""The way of copied values back into what holds them in a script."""

from __future__ import annotations

import operator
from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from swift_ft.checkpoint.step.containers import fill, plain
from swift_ft.checkpoint.step.frozen import ARRAY, GENERATOR, Copier, frozen, tuple_like
from swift_ft.checkpoint.step.kinds import CONTAINERS, GENERATORS, OF_BYTES, is_fixed, write_state
from swift_ft.checkpoint.step.namespaces import MISSING
from swift_ft.checkpoint.step.of_class import CONTENT, OF_CLASS, empty, is_of_class, longest
from swift_ft.checkpoint.step.references import PARAMETER, UNKNOWN, References
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import expanded_dims, same_bits, storage_id


class Placing:
    """Puts values into what is in their places, which others may hold, too.

    What is one thing among the values becomes one thing here. No thing here is given two values: where an
    object of the script has them in other places by now, one of these places gets a new thing.

    Args:
        is_protected: tells tensors and containers that a value must not be written to.
        references: by which a name stands for a parameter of the state.

    Attributes:
        lacks: something in a container could not be made here: what was there is, or nothing.
    """

    def __init__(
        self,
        is_protected: Callable[[Any], bool] = lambda _: False,
        references: References | None = None,
    ) -> None:
        self._is_protected = is_protected
        self._references = references or References()
        self.lacks = False
        self._placed: dict[int, tuple[Any, Any]] = {}  # by id() of a value: it, and what has it here
        self._given: dict[int, Any] = {}  # by id(): things here that have got a value
        self._of_storage: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # tensors here, and values

    def copier(self) -> Copier:
        """Copies what is in places now, by the same names. One that goes on would know earlier copies."""
        return Copier(self._is_protected, self._references)

    def put(self, now: Any, value: Any) -> Any:
        """The content of a place from now on.

        Args:
            now: what is there; ``MISSING`` if nothing is.
            value: a copy, which stays as it is.

        Returns:
            ``now``, if it could take the value, and something new otherwise. ``UNKNOWN`` if a generator has
            to be there, which cannot be made, a parameter that this process does not have, or a container
            of a class that it has not.
        """
        if value is MISSING or is_fixed(value):
            return value
        if id(value) not in self._placed:
            free = id(now) not in self._given and not self._is_protected(now)
            self._placed[id(value)] = value, self._put(now if free else MISSING, value)
        return self._placed[id(value)][1]

    def _put(self, now: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._note(value, now if self._fill_tensor(now, value) else frozen(value))
        if isinstance(value, np.ndarray):
            return self._note(value, now if _fill_array(now, value) else value.copy())
        if isinstance(value, tuple):
            return self._tuple(now, value)
        if isinstance(value, dict) and PARAMETER in value:
            return self._references.parameter(value)
        if isinstance(value, dict) and GENERATOR in value:
            if not isinstance(now, GENERATORS):
                return UNKNOWN
            write_state(now, value[GENERATOR])
            return self._note(value, now)
        if isinstance(value, dict) and ARRAY in value:
            fits = isinstance(now, array) and now.typecode == value[ARRAY]
            content = array(value[ARRAY], value[CONTENT])
            return self._filled(value, now if fits else array(value[ARRAY]), content)
        if isinstance(value, dict) and OF_CLASS in value:
            here = now if is_of_class(now, value) else empty(value)
            return UNKNOWN if here is UNKNOWN else self._filled(value, here, value[CONTENT])
        kind: type | None = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
        if kind is None:
            return frozen(value)
        fits = isinstance(now, kind) and longest(now) == longest(value)
        here = now if fits else deque(maxlen=value.maxlen) if kind is deque else kind()
        return self._filled(value, here, value)

    def _filled(self, value: Any, here: Any, content: Any) -> Any:
        """A container with another content; it is known before that, which may hold it again."""
        if isinstance(content, dict) and any(self._references.key(key) is UNKNOWN for key in content):
            return UNKNOWN
        self._fill(self._note(value, here), content)
        return here

    def _note(self, value: Any, here: Any) -> Any:
        self._placed[id(value)] = value, here
        self._given[id(here)] = here
        if isinstance(here, torch.Tensor) and here.layout == torch.strided:
            self._of_storage.setdefault(storage_id(local(here)), []).append((here, value))
        return here

    @torch.no_grad()
    def _fill_tensor(self, now: Any, value: torch.Tensor) -> bool:
        """Whether a tensor of a place could take a value."""
        if not isinstance(now, torch.Tensor) or now.shape != value.shape or now.dtype != value.dtype:
            return False
        if isinstance(now, nn.Parameter) != isinstance(value, nn.Parameter) or not _is_writable(now):
            return False
        if _is_like(now, value):  # nothing is written: its memory may be a file that is mapped for reading
            now.requires_grad_(value.requires_grad)
            return True
        # It may be a view, as others are of its memory: these must not lose what they have got.
        others = self._of_storage.get(storage_id(local(now)), ())
        before = now.detach().clone() if others else None
        now.detach().copy_(value)
        if before is not None and not all(_is_like(here, theirs) for here, theirs in others):
            now.detach().copy_(before)
            return False
        now.requires_grad_(value.requires_grad)
        return True

    def _tuple(self, now: Any, value: tuple[Any, ...]) -> Any:
        there = now if isinstance(now, tuple) and len(now) == len(value) else (MISSING,) * len(value)
        inner = [self.put(old, new) for old, new in zip(there, value, strict=True)]
        if any(one is UNKNOWN for one in inner):
            return UNKNOWN
        kept = there is now and all(map(operator.is_, now, inner))
        return now if kept else tuple_like(value, inner)

    def _fill(self, here: Any, value: Any) -> None:
        if isinstance(here, dict):
            self._fill_dict(here, value)
            return
        if isinstance(here, OF_BYTES):
            fill(here, value)
            return
        before = plain(here) if isinstance(here, list | deque) else []
        before = [*before, *[MISSING] * len(value)][: len(value)]
        inner = [self.put(old, new) for old, new in zip(before, value, strict=True)]
        self.lacks |= any(new is UNKNOWN for new in inner)
        found = (old if new is UNKNOWN else new for old, new in zip(before, inner, strict=True))
        fill(here, [one for one in found if one is not MISSING])

    def _fill_dict(self, here: dict[Any, Any], value: dict[Any, Any]) -> None:
        """Give a dictionary the content of another one.

        Containers in it stay those that there are, or are such as it makes itself: a ``defaultdict`` among
        them makes entries of its own, which a plain dictionary of the same content would not.
        """
        before, content = plain(here), {}
        for name, inner in value.items():
            key = self._references.key(name)
            there = before.get(key, MISSING)
            if there is MISSING and isinstance(inner, CONTAINERS):
                makes = here.default_factory if isinstance(here, defaultdict) else None
                there = makes() if makes is not None else MISSING
            put = self.put(there, inner)
            self.lacks |= put is UNKNOWN
            if (found := there if put is UNKNOWN else put) is not MISSING:
                content[key] = found
        fill(here, content)


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether each element can be written to: none of a graph, and no expanded one."""
    if tensor.layout != torch.strided or tensor.grad_fn is not None or tensor.is_inference():
        return False
    return not expanded_dims(tensor)


def _fill_array(now: Any, value: np.ndarray[Any, Any]) -> bool:
    if not isinstance(now, np.ndarray) or now.shape != value.shape or now.dtype != value.dtype:
        return False
    # A view may be of another part of an array by now.
    if now.base is not None or not now.flags.writeable:
        return bool(now.tobytes() == value.tobytes())
    now[...] = value
    return True


def _is_like(here: torch.Tensor, value: torch.Tensor) -> bool:
    return same_bits(here.detach(), value.detach().to(here.device))
