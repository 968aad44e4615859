"""An owner's parameters and inputs on their way to all members, at the begin of each iteration (paper §5.2).

    first iteration     everything, with names and shapes: a member sees whether its module is the script's
    later ones          owner ─▶ member ─▶ next ─▶ ...: the parameters that updates change, then the inputs,
                        and with them what the script has changed itself

Members pass on what has arrived, so an owner sends its parameters once, however many help. It computes while
they travel: they do not change before its next update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist

from swift_ft.checkpoint.state_payload import StatePath, StatePayload, TensorKind, pack, unpack
from swift_ft.errors import CannotHelpError, UnsupportedError
from swift_ft.runtime.helpers.outside_values import OutsideValues, Settings, check_settings
from swift_ft.runtime.helpers.pieces import Arriving, Piece, pieces_of, send_plain
from swift_ft.runtime.replicas.transfer import Link, receive, send
from swift_ft.torch_adapters.communication import device_of, wait_for
from swift_ft.torch_adapters.pipelining.microbatch import Inputs, StageChain
from swift_ft.torch_core.fingerprints import Fingerprint, Sampler

_TRAINED = "parameter"
_CONSTANT = "constant"
_SETTINGS, _CONSTANTS = "changed settings", "changed constants"
"""Keys beside those of the inputs."""


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes of the script since the last iteration, in other ways than by an update.

    Attributes:
        settings: plain values of its objects; in the first iteration, all.
        constants: buffers and frozen parameters.
    """

    settings: Settings
    constants: dict[StatePath, torch.Tensor]


@dataclass(slots=True)
class OwnersState:
    """The state of one owner's stages, at that owner or at another member.

    Attributes:
        group: has all members.
        route: the owner, then all other members in the order in which they receive.
        rank: this worker.
        chain: the stages of all owners, on this worker.
        outside: what the stages and their loss have besides, on this worker.
    """

    group: dist.ProcessGroup
    route: Sequence[int]
    rank: int
    chain: StageChain
    stages: Sequence[int]
    outside: OutsideValues
    _trained: list[StatePath] | None = None
    _pieces: list[Piece[StatePath]] = field(default_factory=list)
    _settings: Settings = field(default_factory=dict)  # the owner's, as sent so far
    _sampler: Sampler = field(default_factory=Sampler)
    _constants: tuple[list[StatePath], Fingerprint] | None = None  # as sent last
    _kinds: dict[StatePath, TensorKind] = field(default_factory=dict)

    def send(self, inputs: Inputs) -> list[dist.Work]:
        """At the owner, begin to send what an iteration needs.

        Returns:
            What is under way. The parameters must not change before it has ended.

        Raises:
            CannotHelpError: the script trains other parameters than in the first iteration, or its modules
                have other tensors.
            RuntimeError: as torch does, if a peer is gone.
        """
        values = self._values()
        trained = _trained(values)
        if self._trained is None:
            # Once with names and shapes, to all: afterwards both ends know them (decision 33).
            send(StatePayload(values, _packed(inputs, self._changes(values))), Link(self.group, self.rank))
            self._agree(trained, values)
            return []
        # Both ends have cut what travels into pieces by that list.
        if trained != self._trained:
            stage, name = sorted({*trained} ^ {*self._trained})[0][1:]
            raise CannotHelpError(f"the script has changed whether {name} of stage {stage} is trained")
        packed = _packed(inputs, self._changes(values))
        works = []
        if (link := self._onwards()) is not None:
            for piece in self._pieces:
                works.append(link.carry(piece.join([values[path] for path in piece.keys])))
            works += send_plain(packed, link)
        return works

    def _changes(self, values: Mapping[StatePath, torch.Tensor]) -> _Changes:
        """Nothing tells that a script changes a tensor itself: so versions and samples are compared."""
        now = self.outside.settings()
        settings = {path: value for path, value in now.items() if self._settings.get(path) != value}
        self._settings = now
        paths = [path for path in values if path[0] == _CONSTANT]
        taken = self._sampler.take([values[path] for path in paths])
        before, self._constants = self._constants, (paths, taken)
        kinds = {path: TensorKind.of(values[path]) for path in paths}
        if before is None:
            self._kinds = kinds
            return _Changes(settings, {})
        if unlike := {*kinds.items()} ^ {*self._kinds.items()}:
            stage, name = min(path for path, _ in unlike)[1:]
            raise CannotHelpError(f"the script has given stage {stage} another kind of tensor: see {name}")
        return _Changes(settings, {paths[n]: values[paths[n]].detach() for n in taken.differing(before[1])})

    def receive(self, meanwhile: Callable[[], None] = lambda: None) -> tuple[Inputs, list[dist.Work]]:
        """At another member, receive what an iteration needs, and begin to pass it on.

        Args:
            meanwhile: called once, while it travels.

        Returns:
            The inputs, and what is under way.

        Raises:
            CannotHelpError: this worker's modules are not the script's, or have other settings.
            RuntimeError: as torch does, if a peer is gone.
        """
        works: list[dist.Work] = []
        values = self._values()
        if self._trained is None:
            link = Link(self.group, self.route[0])
            plain = receive(link, self._allocate, lambda _: meanwhile()).plain
            self._agree(_trained(values), values)
        else:
            # A chain: the owner sends once, however many members there are (decision 33).
            before = self.route[self.route.index(self.rank) - 1]
            link, onwards = Link(self.group, before, self.rank), self._onwards()
            targets = [[values[path] for path in piece.keys] for piece in self._pieces]
            flats = [piece.target(some) for piece, some in zip(self._pieces, targets, strict=True)]
            arriving = [link.carry(flat) for flat in flats]
            inputs = Arriving(link)
            meanwhile()
            for work, flat, piece, some in zip(arriving, flats, self._pieces, targets, strict=True):
                wait_for([work])
                if onwards is not None:
                    # Before it is used here, since the next member waits for it.
                    works.append(onwards.carry(flat))
                piece.fill(some, flat)
            plain = inputs.take()
            if onwards is not None:
                works += send_plain(plain, onwards)
        unpacked = unpack(plain, self.chain.device)
        with torch.no_grad():
            for path, tensor in unpacked.pop(_CONSTANTS):
                values[tuple(path)].copy_(tensor)
        self._settings |= {path: tuple(value) for path, value in unpacked.pop(_SETTINGS).items()}
        check_settings(self.outside.settings(), self._settings)
        found = Inputs(**unpacked)
        for stage in self.stages:
            # Modules are built in training mode, and the script may evaluate some of them.
            self.chain.set_modes(stage, found.evaluating[stage])
        return found, works

    def _onwards(self) -> Link | None:
        """To the next member; None for the last one."""
        after = self.route.index(self.rank) + 1
        return Link(self.group, self.rank, self.route[after]) if after < len(self.route) else None

    def _agree(self, trained: list[StatePath], values: Mapping[StatePath, torch.Tensor]) -> None:
        self._trained = trained
        self._pieces = pieces_of({path: values[path] for path in trained}, device_of(self.group))

    def _values(self) -> dict[StatePath, torch.Tensor]:
        """All parameters and buffers. Updates change only those that are trained."""
        found: dict[StatePath, torch.Tensor] = {}
        for stage in self.stages:
            module = self.chain.stages[stage].submod
            for name, parameter in module.named_parameters():
                found[_TRAINED if parameter.requires_grad else _CONSTANT, str(stage), name] = parameter
            for name, buffer in module.named_buffers():
                found[_CONSTANT, str(stage), name] = buffer
        return found

    def _allocate(self, kinds: dict[StatePath, TensorKind]) -> Mapping[StatePath, torch.Tensor]:
        here = self._values()
        ours = StatePayload(here).kinds
        if ours != kinds:
            different = sorted({*ours.items()} ^ {*kinds.items()}, key=lambda item: item[0])
            stage, name = different[0][0][1:]
            raise CannotHelpError(
                f"build({stage}) makes a module that differs from the script's stage {stage}: see {name}"
            )
        return here


def _trained(values: Mapping[StatePath, torch.Tensor]) -> list[StatePath]:
    return [path for path in values if path[0] == _TRAINED]


def _packed(inputs: Inputs, changes: _Changes) -> bytes:
    plain = {f.name: getattr(inputs, f.name) for f in fields(Inputs)}
    plain[_SETTINGS], plain[_CONSTANTS] = changes.settings, [*changes.constants.items()]
    try:
        return pack(plain)
    except UnsupportedError as error:
        raise CannotHelpError(f"an argument of a stage cannot be sent. {error}") from error
