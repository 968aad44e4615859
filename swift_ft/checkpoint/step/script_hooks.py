"""Hooks that a script has registered in the state's modules, their parameters and optimizers.

One that a step registers or removes is there, or gone, in the repeated step. A replacement runs the script
from its beginning, in a later step: what an earlier one has registered, it lacks. Hooks of libraries are
their own matter: many register some as they are first called.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType

import torch
from torch import nn
from torch.optim import Optimizer

from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import UnsupportedError
from swift_ft.program.own_code import is_own_class, is_own_module
from swift_ft.torch_core.module_hooks import Hook, KeptHooks, hooks_ever_registered, kept_hooks

_logger = logging.getLogger(__name__)

_Kinds = Counter[tuple[int | str, str, str]]
"""The number of hooks by owner (a parameter's name, or ``id()``), kind and name."""


@dataclass(frozen=True)
class _Noted:
    """A dictionary of hooks, with those of the script among them, and what was in it."""

    kept: KeptHooks
    hooks: Mapping[int, Hook]
    beside: tuple[Mapping[int, object], ...]

    @classmethod
    def of(cls, kept: KeptHooks) -> _Noted:
        return cls(kept, dict(kept.hooks), tuple(map(dict, kept.beside)))

    @property
    def own(self) -> list[int]:
        return [number for number, hook in self.hooks.items() if is_own_hook(hook)]

    def put_back(self, now: KeptHooks) -> None:
        """Have the script's hooks of then, and those of others of now."""
        stays = {number for number, hook in now.hooks.items() if not is_own_hook(hook)} | {*self.own}
        hooks = {n: hook for n, hook in {**self.hooks, **now.hooks}.items() if n in stays}
        pairs = zip(self.beside, now.beside, strict=True)
        beside = ({n: how for n, how in {**then, **here}.items() if n in stays} for then, here in pairs)
        now.fill(hooks, tuple(beside))


NotedHooks = tuple[_Noted, ...]
"""All dictionaries with hooks of the script."""


class ScriptHooks:
    """Notes them at the beginning of a step.

    Args:
        state: what the session protects.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._noted: NotedHooks = ()
        self._registered = -1
        self._named: Mapping[str, nn.Parameter] | None = None
        self._first: _Kinds | None = None  # before the first step
        self._usual: _Kinds | None = None  # after it
        self._has_stepped = False

    def note(self, named: Mapping[str, nn.Parameter]) -> NotedHooks:
        """The present ones, for :meth:`put_back`. A look at each module only where one may have come or gone.

        Args:
            named: the state's parameters: the same mapping as long as its modules are the same.

        Raises:
            UnsupportedError: others than after the first step.
        """
        may_be_others = self._registered != hooks_ever_registered() or named is not self._named
        if may_be_others or any(one.hooks.keys() != one.kept.hooks.keys() for one in self._noted):
            self._named = named
            self._noted = (*self._look(),)
            self._registered = hooks_ever_registered()
            self._check(named)
        elif self._has_stepped and self._usual is None:
            self._usual = self._first
        return self._noted

    def completed(self) -> None:
        """A step is complete."""
        self._has_stepped = True

    def put_back(self, noted: NotedHooks) -> None:
        """Have those of the script that there were."""
        now = {(id(one.kept.owner), one.kept.kind): one for one in self._look()}
        for one in noted:
            other = now.pop((id(one.kept.owner), one.kept.kind), None)
            if other is None or other.own != one.own:
                one.put_back(other.kept if other is not None else one.kept)
        for one in now.values():
            _Noted(one.kept, {}, tuple({} for _ in one.kept.beside)).put_back(one.kept)

    def forget(self) -> None:
        """The modules are others from now on."""
        self._registered, self._noted = -1, ()
        self._first = self._usual = None
        self._has_stepped = False

    def _look(self) -> Iterator[_Noted]:
        owners: list[nn.Module | torch.Tensor | Optimizer] = [*self._state.tree.modules()]
        owners += [*self._state.named_parameters().values(), *self._state.optimizers.values()]
        for owner in owners:
            for kept in kept_hooks(owner):
                if any(map(is_own_hook, kept.hooks.values())):
                    yield _Noted.of(kept)

    def _check(self, named: Mapping[str, nn.Parameter]) -> None:
        names = {id(parameter): name for name, parameter in named.items()}  # the tensor may be another one
        now = Counter(
            (names.get(id(one.kept.owner), id(one.kept.owner)), one.kept.kind, name_of(one.hooks[number]))
            for one in self._noted
            for number in one.own
        )
        if not self._has_stepped:
            self._first = now
        elif self._usual is None:
            self._usual = now
            if others := _differing(now, self._first or Counter()):
                _logger.warning(
                    "the first step has registered or removed hooks (%s): a replacement has them only if its "
                    "own first step, which has another number, does so. Register hooks before the first step",
                    others,
                    extra={"event": "hooks_of_first_step", "hooks": others},
                )
        elif others := _differing(now, self._usual):
            raise UnsupportedError(
                f"A step has registered or removed hooks ({others}): a replacement, which runs the script "
                "from its beginning, would not have done so. Register them before the first step, and let "
                "them ask for step.index.",
                alike=True,
            )


def is_own_hook(hook: Hook) -> bool:
    """Whether the script has made a hook, and no library."""
    while isinstance(hook, partial | MethodType):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    if isinstance(hook, FunctionType):
        return is_own_module(hook.__module__ or "")
    return is_own_class(type(hook))


def name_of(hook: Hook) -> str:
    """A hook in words."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _differing(one: _Kinds, other: _Kinds) -> str:
    return ", ".join(sorted({name for _, _, name in (one - other) + (other - one)}))
