"""Checks that the session's state holds everything that training changes.

A replacement gets only what is in the state. Anything left out is re-initialised in it while the survivors
keep theirs. So anything missing is an error that names it, before it can be lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from swift_ft.checkpoint.companions import (
    Companion,
    averaged_tensors,
    companions_of,
    is_companion,
    reachable,
    values_of,
)
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.errors import IncompleteStateError
from swift_ft.torch_core.model_state import model_state
from swift_ft.torch_core.optimizers import contained, parameters_of
from swift_ft.torch_core.shards import local
from swift_ft.torch_core.tensors import storage_id, tensors_in

_EXCHANGED = 16
"""So many lists of parameters of each optimizer are remembered. A script may go round in them."""


class Completeness:
    """Holds the session's state against what the script trains.

    Frozen parameters may be missing, and so may buffers that are not persistent: both are as the script makes
    them (`runtime/data/part.py`).

    Args:
        state: what the session protects.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._attached: dict[str, nn.Module] = {}  # by what an error calls it
        # Its parameters, by id(): as they are, and as they were a while ago. Some are exchanged in each step.
        self._vetted: WeakKeyDictionary[Optimizer, deque[list[int]]] = WeakKeyDictionary()
        self._hook: RemovableHandle | None = None
        self._begun = 0
        self._companions: dict[int, Companion] = {}  # by id(); those that are not in the state
        self._held_now: _Tensors | None = None  # in the running iteration

    def attach(self, owner: str, module: nn.Module) -> None:
        """A module is trained. All that it trains must be in the state.

        Args:
            owner: what an error calls the module, such as ``stage 1``.
            module: the module.

        Raises:
            IncompleteStateError: if it has a parameter or a buffer that is not there.
        """
        held = self._held()
        missing = [what for what, tensor in _trained(module) if tensor not in held]
        if missing:
            more = f" (nor are {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise IncompleteStateError(
                f"{owner}'s {missing[0]} is not in Session(state){more}: pass the module, as in "
                'Session({"model": model, "optimizer": optimizer}, ...).'
            )
        self._attached[owner] = module

    def made_by_script(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Attached tensors outside of the state, by name: a replacement makes them as the lost worker did."""
        held = self._held()
        for owner, module in self._attached.items():
            named: dict[str, torch.Tensor]
            named = {f"parameter {name!r}": tensor for name, tensor in module.named_parameters()}
            named |= {f"buffer {name!r}": tensor for name, tensor in module.named_buffers()}
            for what, tensor in named.items():
                if tensor.numel() and tensor not in held:
                    yield f"{owner}'s {what}", tensor

    def watch(self) -> None:
        """From now on, vet each optimizer before its first step, and when it has other parameters.

        Raises:
            IncompleteStateError: an optimizer of the state has another one in it, whose state nothing saves.
        """
        for inner, where, outer in self._inner_optimizers():
            if (
                inner.state is not getattr(outer, "state", None)
                and type(outer).state_dict is Optimizer.state_dict
            ):
                raise _unsaved(inner, where, outer)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """Watch no more."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def begin(self) -> None:
        """An iteration begins: note the schedulers, scalers and averages that the state does not hold.

        They are looked for in the first two iterations, and again in the 16th, the 32nd, the 64th and so on:
        some scripts make theirs late, and a look through the whole process is too slow for each iteration.
        """
        self._held_now = None
        self._begun += 1
        if self._begun <= 2 or (self._begun >= 16 and self._begun & (self._begun - 1) == 0):
            self._look_for_companions()

    def _look_for_companions(self) -> None:
        protected = self._protected()
        optimizers = [o for o in self._held_optimizers() if self._first_update(o, protected)]
        held = {id(part) for part in reachable(self._state.small.values(), is_companion)}
        held_tensors = self._held()
        for part in companions_of(optimizers, protected.values()):
            wraps = not isinstance(part, LRScheduler) and any(id(v) in held for v in values_of(part))
            in_module = any(tensor in held_tensors for tensor in averaged_tensors(part))
            if id(part) in held or wraps or in_module:
                continue
            # The id may have been an earlier object's.
            known = self._companions.get(id(part))
            if known is None or not known.follows(part):
                self._companions[id(part)] = Companion(part)

    def completed(self) -> None:
        """An iteration is complete.

        Raises:
            IncompleteStateError: if a scheduler, a scaler or an average has changed that is not in the state.
            UnsupportedError: an optimizer has state that is of none of its parameters.
        """
        self._held_now = None
        for companion in self._companions.values():
            if companion.has_stepped():
                raise IncompleteStateError(companion.why_wanted)
        if (
            self._begun <= 2
        ):  # an optimizer's own state_dict() shows what it has saved once there is something
            self._check_inner_states()

    def _inner_optimizers(self) -> Iterator[tuple[Optimizer, str, Optimizer]]:
        """Optimizers within those of the state that are not in it: each, where, and in which."""
        held = {id(optimizer) for optimizer in self._state.optimizers.values()}
        for outer in self._state.optimizers.values():
            for where, inner in vars(outer).items():
                if isinstance(inner, Optimizer) and id(inner) not in held:
                    yield inner, where, outer

    def _check_inner_states(self) -> None:
        self._state.check_optimizers()
        for outer in self._state.containers:
            if outer.state:
                raise IncompleteStateError(
                    f"The {type(outer).__name__} keeps a state of its own beside those of the optimizers in "
                    "it, and its state_dict() is not torch's: pass an optimizer with torch's state_dict()."
                )
        for inner, where, outer in self._inner_optimizers():
            saved = _Tensors(tensors_in(outer.state_dict()))
            if any(tensor.numel() and tensor not in saved for tensor in tensors_in([*inner.state.values()])):
                raise _unsaved(inner, where, outer)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Called by torch, before any optimizer's step."""
        # As a rule once for each optimizer: this is in the way of every step.
        has = [*map(id, parameters_of(optimizer))]
        if has in (vetted := self._vetted.setdefault(optimizer, deque(maxlen=_EXCHANGED))):
            return
        if optimizer in self._held_optimizers():
            self._check_parameters(optimizer)
        elif not self._is_container(optimizer) and (
            update := self._first_update(optimizer, self._protected())
        ):
            raise IncompleteStateError(
                f"The {type(optimizer).__name__} that updates {update} is not in Session(state): pass it, "
                'as in Session({"model": model, "optimizer": optimizer}, ...).'
            )
        vetted.append(has)

    def _check_parameters(self, optimizer: Optimizer) -> None:
        """All that an optimizer of the state updates must be there as well."""
        self._held_now = held = self._held_now or self._held()
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.numel() and parameter not in held:
                    held = self._held_now = self._held()  # it may be newer than the last look
                if parameter.numel() and parameter not in held:
                    raise IncompleteStateError(
                        f"The {type(optimizer).__name__} updates a parameter of shape "
                        f"{list(parameter.shape)} (number {index} of its group {number}) that no module in "
                        'Session(state) has: pass its module, as in Session({..., "head": head}, ...), or, '
                        'if no module has it, a list of it: "free": torch.nn.ParameterList([parameter]).'
                    )

    def _first_update(self, optimizer: Optimizer, protected: Mapping[str, nn.Module]) -> str:
        """The first parameter of the protected modules that an optimizer updates; empty if there is none."""
        own = _Tensors(parameters_of(optimizer))
        for owner, module in protected.items():
            for name, parameter in module.named_parameters():
                if parameter.numel() and parameter in own:
                    return f"{owner}'s parameter {name!r}"
        return ""

    def _protected(self) -> dict[str, nn.Module]:
        return {**self._attached, **{f"state[{n!r}]": m for n, m in self._state.modules.items()}}

    def _held(self) -> _Tensors:
        """All tensors that are saved with the state."""
        found = _Tensors()
        for module in self._state.modules.values():
            saved = model_state(module)
            found.add(tensors_in(saved))
            tensors = (*module.named_parameters(), *module.named_buffers())
            found.add(tensor for name, tensor in tensors if name in saved)  # saved as a copy, perhaps
        for part in self._state.small.values():
            found.add(tensors_in(part.state_dict()))
        return found

    def _held_optimizers(self) -> set[Optimizer]:
        """Those of the state, those that they wrap, and those that a part of the state saves with itself."""
        savers = [part for part in self._state.small.values() if _saves_an_optimizer(part.state_dict())]
        return {
            *reachable((*self._state.optimizers.values(), *self._state.containers, *savers), _is_optimizer)
        }

    def _is_container(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer only calls others, which are all in the state."""
        inner = contained(optimizer)
        return bool(inner) and self._held_optimizers().issuperset(inner)


class _Tensors:
    """A set of tensors; one that views a storage of the set is in it, too."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._tensors: set[int] = set()
        self._storages: set[int] = set()
        self.add(tensors)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Put tensors in."""
        for tensor in tensors:
            self._tensors.add(id(tensor))
            self._storages.add(storage_id(local(tensor)))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._tensors or storage_id(local(tensor)) in self._storages


def _trained(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The trained parameters and persistent buffers of a module, each with its name in an error."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.numel():
            yield f"parameter {name!r}", parameter
    saved = _Tensors(tensors_in(model_state(module)))
    for name, buffer in module.named_buffers():
        if buffer.numel() and buffer in saved:  # it is persistent
            yield f"buffer {name!r}", buffer


def _unsaved(inner: Optimizer, where: str, outer: Optimizer) -> IncompleteStateError:
    kind = type(outer).__name__
    return IncompleteStateError(
        f"The {type(inner).__name__} in {where} of the {kind} keeps a state of its own, which the {kind}'s "
        "state_dict() does not have: pass it as well, as in "
        f'Session({{..., "{where}": optimizer.{where}}}, ...).'
    )


def _saves_an_optimizer(saved: Any) -> bool:
    """Whether a ``state_dict()`` has an optimizer's groups somewhere in it."""
    if not isinstance(saved, Mapping):
        return False
    return any(str(key).startswith("param_groups") or _saves_an_optimizer(v) for key, v in saved.items())


def _is_optimizer(kind: type) -> bool:
    return issubclass(kind, Optimizer)
