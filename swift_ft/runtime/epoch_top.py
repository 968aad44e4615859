"""The lines at the top of an epoch, which a replacement runs again, and the state before and after them.

A replacement that begins in the middle of an epoch has a state from after these lines. Run on it, they would
draw the next numbers of a generator, and halve a rate twice. So the state from before them is a part of the
training state, but for its tensors: the lines run on that, and what had arrived comes back after them.

    epochs(): begins()            over()                 settle()
              the state of before │ the lines at the top │ what had arrived
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch

from swift_ft.checkpoint.stale_gradients import NotedGradients
from swift_ft.checkpoint.step.carried import CarriedVariables
from swift_ft.checkpoint.step.hyper_parameters import HyperParameters, put_values
from swift_ft.checkpoint.step.parameter_copies import Kind, ParameterCopies, owners_of
from swift_ft.checkpoint.step.places import Arrived
from swift_ft.checkpoint.training_state import TrainingState
from swift_ft.determinism import derive_seed, seed_host, seed_torch, set_host_random_state
from swift_ft.torch_core.buffers import BufferCopies
from swift_ft.torch_core.fingerprints import Fingerprint, Sampler

_TOP = -2
"""In seeds, where those of steps have a -1."""
_BUFFERS = "(buffers)"


class Epochs:
    """The place of a run among its epochs. A part of the training state.

    Attributes:
        number: of the epoch that the next iteration belongs to, from 0.
        began: iterations that were complete as it began.
        top: the state before the lines at the top of an epoch, packed, but for tensors.
        top_of: that epoch; -1 before the first one. The state is from after these lines if it is ``number``.
        written: parameters that these lines change, or whose optimizer's state they change.
    """

    def __init__(self) -> None:
        self.number = self.began = 0
        self.top, self.top_of = b"", -1
        self.written: tuple[str, ...] = ()

    @property
    def has_top(self) -> bool:
        """Whether the state is from after the lines at the top of its epoch, and ``top`` from before them."""
        return self.top_of == self.number

    def is_begun(self, iteration: int) -> bool:
        """Whether the state, of this iteration, is from after the lines at the top of its epoch."""
        return self.has_top or iteration > self.began  # a run without epochs() has no top

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        return {
            "number": self.number,
            "began": self.began,
            "top": self.top,
            "top_of": self.top_of,
            "written": [*self.written],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self.number, self.began = state["number"], state["began"]
        self.top, self.top_of = state["top"], state["top_of"]
        self.written = tuple(state["written"])


class _Moment:
    """The state before or after the lines at the top, but for variables and parameters that they leave alone.

    Args:
        state: what the session protects.
        written: parameters that these lines change, and "(buffers)".
    """

    def __init__(self, state: TrainingState, written: Collection[str]) -> None:
        self._state = state
        small = state.snapshot()
        self._parts, self._random = small["parts"], small["random"]
        self._groups = HyperParameters(state.optimizers.values())
        self._buffers = BufferCopies(state.tree.modules()) if _BUFFERS in written else None
        named = state.named_parameters()
        self._gradients = NotedGradients(named.values())
        copied: dict[torch.Tensor, Kind] = {named[name]: Kind.AFTER for name in written if name in named}
        self._parameters = ParameterCopies(copied, owners_of(state.parameters))

    def put_back(self) -> None:
        """As it was. Random numbers on accelerators are seeded as a step begins."""
        self._parameters.put_back(())
        self._gradients.put_back()
        if self._buffers is not None:
            self._buffers.restore()
        _load(self._state, self._parts)
        self._groups.put_into_present()  # after schedulers, which set rates
        set_host_random_state(self._random)


class EpochTop:
    """Runs the lines at the top of an epoch on the state that they were first run on.

    Args:
        state: what the session protects.
        carried: the variables of the script.
        epochs: the place of the run among them, a part of the state.
        seed: of the random numbers at the top of an epoch: they are the same on all workers.
    """

    def __init__(self, state: TrainingState, carried: CarriedVariables, epochs: Epochs, seed: int) -> None:
        self._state = state
        self._carried = carried
        self.epochs = epochs
        self._seed = seed
        self._own: Mapping[str, Any] = {}  # of `epochs`, for this process and epoch
        # Before the lines at the top: the variables that have arrived, and all else if these lines run again.
        self._arrived: Arrived | None = None
        self._midway: _Moment | None = None
        self._after: _Moment | None = None  # these lines; None where they have run again
        self._sampler = Sampler()
        self._tensors: tuple[dict[str, list[torch.Tensor]], Fingerprint] | None = None
        # The variables as the last step of an epoch began, with the epoch and the iteration:
        self._before_last: tuple[int, int, Arrived] | None = None

    def begins(self, iteration: int) -> None:
        """The script is about to run the lines at the top of an epoch.

        Args:
            iteration: the one that the state is at.
        """
        epochs, carried = self.epochs, self._carried
        arrived, has_top = carried.arrived, epochs.has_top
        self._midway = None
        if epochs.is_begun(iteration):
            if arrived is None and self._before_last is None:  # a state without variables has come
                arrived = Arrived(carried.to_save(), frozenset())
            elif arrived is None:  # this process has been here: it is to repeat the epoch's last step
                assert self._before_last is not None
                assert self._before_last[:2] == (epochs.number, iteration)
                arrived = self._before_last[2]
            # All buffers: not every change of them is seen.
            self._midway = _Moment(self._state, {*epochs.written, _BUFFERS})
        if not has_top:
            epochs.top, epochs.written = self._packed(), ()
        carried.epoch_begins()
        if has_top and arrived is not None:
            self._return_to_top(arrived)
        self._arrived, carried.arrived = arrived, None
        epochs.top_of = epochs.number
        watched = self._watched()
        self._tensors = watched, self._sampler.take(_flat(watched))
        # Drawn from what the last step has left, they would be others in a replacement.
        seed = derive_seed(self._seed, epochs.number, _TOP)
        seed_torch(seed)
        seed_host(seed)

    def over(self) -> None:
        """The script is through with these lines."""
        self._carried.top_is_over()
        written = {*self.epochs.written, *self._written()}
        self._after = _Moment(self._state, written) if self._midway is None else None
        self.epochs.written = tuple(sorted(written))
        self._own = self.epochs.state_dict()

    def settle(self, iteration: int) -> str:
        """A step of the epoch is about to begin: have the state as it is after the lines at the top.

        Args:
            iteration: the one that the state is at.

        Returns:
            Why the process has to start again; empty if it has not.
        """
        midway, self._midway = self._midway, None
        before, self._arrived = self._arrived, None
        carried, epochs = self._carried, self.epochs
        if carried.arrived is not None:  # after these lines had run: it replaces what they have done
            if not epochs.is_begun(iteration):
                if self._after is None:
                    return (
                        f"its state is of the beginning of epoch {epochs.number} now, and its script has run "
                        "the first lines of this epoch with a later one"
                    )
                self._after.put_back()
                carried.epoch_begins_again()
            epochs.load_state_dict({**self._own, "number": epochs.number, "began": epochs.began})
        elif before is not None and midway is not None:
            midway.put_back()
            carried.take_over_again(before)
            carried.say_what_is_unlike()
        elif before is not None:
            carried.say_what_is_missing(before)
        if carried.arrived is None:  # else what has arrived before is replaced
            carried.arrived = before
        return ""

    def last_step_begins(self, iteration: int) -> None:
        """The epoch's last step is about to begin. A script that is behind it may have to repeat it."""
        variables = Arrived(self._carried.to_save(), frozenset())
        self._before_last = self.epochs.number, iteration, variables

    def step_begins(self) -> None:
        """All that has arrived is in its place."""
        arrived, self._carried.arrived = self._carried.arrived, None
        if arrived is not None:
            self._carried.say_what_is_behind(arrived)

    def _packed(self) -> bytes:
        state = self._state
        groups = HyperParameters(state.optimizers.values()).values()
        return state.pack(
            {
                "parts": _returning(state.snapshot()["parts"], state),
                "groups": dict(zip(state.optimizers, groups, strict=True)),
                "variables": self._carried.to_save(),
            }
        )

    def _return_to_top(self, arrived: Arrived) -> None:
        top = self._state.unpack(self.epochs.top)
        _load(self._state, top["parts"])
        for name, optimizer in self._state.optimizers.items():
            if name in top["groups"]:
                put_values(optimizer, top["groups"][name])
        self._carried.take_over_again(Arrived(top["variables"], arrived.own))
        if arrived.own:  # it was another replica's top
            self.epochs.top = self._packed()

    def _watched(self) -> dict[str, list[torch.Tensor]]:
        """By parameter: it, and what an optimizer keeps of it. And the buffers."""
        found = {name: [parameter] for name, parameter in self._state.named_parameters().items()}
        names = {parameter: name for name, (parameter,) in found.items()}
        watched: dict[str, list[torch.Tensor]] = {name: [*tensors] for name, tensors in found.items()}
        for optimizer, parameter in self._state.parameters:
            if (name := names.get(parameter)) is not None:
                held = optimizer.state.get(parameter, {}).values()
                watched[name] += [value for value in held if isinstance(value, torch.Tensor)]
        watched[_BUFFERS] = [b for module in self._state.modules.values() for b in module.buffers()]
        return watched

    def _written(self) -> set[str]:
        """Parameters that the lines at the top have changed, or "(buffers)"."""
        assert self._tensors is not None
        (before, fingerprint), self._tensors = self._tensors, None
        owners = [name for name, tensors in before.items() for _ in tensors]
        changed = self._sampler.take(fingerprint.tensors).differing(fingerprint)
        now = self._watched()
        others = {
            name
            for name in now.keys() | before.keys()
            if [*map(id, now.get(name, ()))] != [*map(id, before.get(name, ()))]
        }
        return {owners[index] for index in changed} | others


def _flat(watched: Mapping[str, list[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for tensors in watched.values() for tensor in tensors]


def _returning(parts: Mapping[str, Any], state: TrainingState) -> dict[str, Any]:
    """Those that return to a state of before: no iterators, whose batches would come again."""
    return {
        name: value
        for name, value in parts.items()
        if not (name.startswith("swift_ft.") or hasattr(state.small[name], "__iter__"))
    }


def _load(state: TrainingState, parts: Mapping[str, Any]) -> None:
    now = state.snapshot()["parts"]
    for name, value in _returning(parts, state).items():
        if state.pack(now[name]) != state.pack(value):
            state.small[name].load_state_dict(copy.deepcopy(value))
