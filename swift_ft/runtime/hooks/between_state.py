"""The state around a hook between two steps: what the hook must not change, and what is put back after it.

See `runtime/hooks/between.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from swift_ft.checkpoint.step.hyper_parameters import HyperParameters
from swift_ft.checkpoint.step.noted import NotedVariables
from swift_ft.checkpoint.step.small_parts import LoadedParts
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.determinism import host_random_state, set_host_random_state
from swift_ft.torch_core.buffers import BufferCopies
from swift_ft.torch_core.fingerprints import Sampler
from swift_ft.torch_core.global_modes import GlobalModes
from swift_ft.torch_core.tensors import same_values, version_of

NoteVariables = Callable[[], NotedVariables]
"""Notes the variables of the script."""


class ModuleModes:
    """The training mode of each module, its buffers, and the host's random state, to be put back.

    The random state is put back because a replay has it without the hook.
    """

    def __init__(self, state: TrainingState) -> None:
        self._training: list[tuple[nn.Module, bool]] = [
            (module, module.training) for module in state.tree.modules()
        ]
        self._buffers = BufferCopies(state.tree.modules())
        self._random = host_random_state()

    def restore(self, *, buffers: bool) -> None:
        """As it was. Buffers only if the hook was interrupted: it may have left some of them changed."""
        for module, training in self._training:
            module.training = training
        set_host_random_state(self._random)
        if buffers:
            self._buffers.restore()


class FixedState:
    """The state that a hook must not change.

    Args:
        state: what the session protects.
        sampler: takes elements of its parameters. One for all hooks knows where to look.
    """

    def __init__(self, state: TrainingState, sampler: Sampler) -> None:
        self._state = state
        self._sampler = sampler
        self._parameters: dict[str, tuple[int, int]] = self._versions()
        self._named = state.named_parameters()
        self._elements = sampler.take([*self._named.values()])
        self._buffers = BufferCopies(state.tree.modules())
        self._small = state.snapshot()["parts"]
        self._groups = _hyper_parameters(state)

    def changed(self) -> str | None:
        """The name of something that is not what it was; None if all is."""
        for place, version in self._versions().items():
            if version != self._parameters.get(place, version):
                return str(place)
        if rewritten := self.rewritten():
            return rewritten[0]
        for name, module in self._state.modules.items():
            if self._buffers.differs_from(BufferCopies(module.modules()), module):
                return f"the buffers of {name}"
        now = self._state.snapshot()["parts"]
        for name, before in self._small.items():
            if not same_values(before, now[name], incomparable=True):
                return str(name)
        for name, groups in _hyper_parameters(self._state).items():
            if not same_values(groups, self._groups[name], incomparable=True):
                return f"the hyper-parameters of {name}"
        return None

    def rewritten(self) -> list[str]:
        """Names of the parameters that have other elements than they had, as a sample shows.

        A write through ``.data`` moves no count: averaged weights are put in place so, and taken out again.
        """
        now = self._sampler.take(self._elements.tensors)
        names = [*self._named]
        return [names[index] for index in sorted(now.rewritten(self._elements))]

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {
            f"{part}.{name}": (p.data_ptr(), version_of(p))
            for part, module in self._state.modules.items()
            for name, p in module.named_parameters()
            if not isinstance(p, DTensor)  # FSDP replaces them in each forward pass
        }


class ChangeableState:
    """All that a hook and its ``then`` may change.

    That is small state, hyper-parameters, variables of the script and torch's global modes.
    """

    def __init__(self, state: TrainingState, note_variables: NoteVariables) -> None:
        self._state = state
        self._modes = GlobalModes()
        self._variables = note_variables()
        self._small = state.snapshot()
        self._groups = HyperParameters(state.optimizers.values())

    def complete(self) -> None:
        """The hook is over: of variables and modes, what the script sets from now on is not the hook's."""
        self._modes.keep_changed()
        self._variables.keep_changed()

    def restore(self) -> None:
        """As it was."""
        self._modes.put_back()
        self._state.restore(self._small)
        loaded = LoadedParts(self._state)
        self._variables.put_back()
        loaded.put_right()
        self._groups.put_back()  # after schedulers, which set rates


def _hyper_parameters(state: TrainingState) -> dict[str, list[dict[str, Any]]]:
    values = HyperParameters(state.optimizers.values()).values()
    return dict(zip(state.optimizers, copy.deepcopy(values), strict=True))
