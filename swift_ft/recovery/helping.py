"""One worker's part in a shared replay: survivors compute microbatches of what was lost (paper §5.2).

    owner    runs the user's loop: gives parameters and inputs ─▶ computes its share ─▶ collects ─▶ updates
    helper   waits for them ─▶ computes its share, from the same logs ─▶ gives gradients and messages

Only owners update parameters, in the user's own code: helpers need no optimizer, and whatever the body of the
step does with gradients happens as ever. All members compute all stages of all owners, so a machine's workers
need no pipeline among them, and any number of helpers serves any number of owners.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swift_ft.determinism import host_random_state, random_state, set_host_random_state, set_random_state
from swift_ft.errors import CannotHelpError
from swift_ft.logging import Direction, LogReader, copy_into
from swift_ft.microbatch import Computed, Gradients, Inputs, StageChain
from swift_ft.recovery.sharing import SharedReplay
from swift_ft.recovery.state import Path as TensorPath
from swift_ft.recovery.state import TensorKind
from swift_ft.recovery.summing import StageGradients
from swift_ft.recovery.transfer import Lane, Parcel, Place, fresh_on, receive, send
from swift_ft.routes import Route

__all__ = ["HelpMode", "Helping", "Member", "own_random_state"]


class HelpMode(StrEnum):
    """How the gradients of microbatches become one."""

    ORDERED = "ordered"
    """In the original order, one by one: the rebuilt state is bit-identical."""
    ALLREDUCE = "allreduce"
    """Each member adds up its own at once: the least to keep and to wait for, with other roundings."""


@dataclass(frozen=True, slots=True)
class Helping:
    """How survivors help.

    Attributes:
        build: makes the module of a stage, by stage index, as the script does; None where nobody helps.
        mode: how gradients are added up.
        memory_bytes: what a helper's own state may take of the host's memory meanwhile; the rest goes to the
            local disk. None for no limit.
        folder: there; by default among the system's temporary files.
    """

    build: Callable[[int], nn.Module] | None = None
    mode: HelpMode = HelpMode.ORDERED
    memory_bytes: int | None = None
    folder: Path | None = None


@contextmanager
def own_random_state() -> Iterator[None]:
    """What is drawn in the block leaves no trace: a survivor's next step finds its random state."""
    host, device = host_random_state(), random_state()
    try:
        yield
    finally:
        set_host_random_state(host)
        set_random_state(device)


@dataclass(slots=True)
class Member:
    """Takes part in a shared replay, iteration by iteration.

    Attributes:
        shared: who takes part.
        rank: this worker.
        group: of all members.
        chain: the stages of all owners.
        holders: the rank of every stage in the pipeline.
        microbatches: per iteration.
        source: the logs of the owners' neighbours.
        mode: how gradients are added up.
    """

    shared: SharedReplay
    rank: int
    group: dist.ProcessGroup
    chain: StageChain
    holders: Mapping[int, int]
    microbatches: int
    source: LogReader
    mode: HelpMode
    _begun: bool = False

    def step(
        self, iteration: int, inputs: Inputs | None = None, had: Mapping[int, Gradients] | None = None
    ) -> tuple[dict[int, Computed], dict[int, Gradients]]:
        """Replay an iteration, together with all members.

        Args:
            iteration: counted from 0.
            inputs: an owner's, from its script.
            had: gradients that an owner's parameters already have, by stage.

        Returns:
            An owner's results by microbatch, and its gradients by stage; nothing for a helper.

        Raises:
            RuntimeError: as torch does, if a member is gone.
            RecoveryError: a message is not in the log, or damaged.
            CannotHelpError: a stage cannot be computed by others.
        """
        given = self._give_inputs(inputs)
        self.chain.begin(iteration)
        own: dict[int, dict[int, Computed]] = {owner: {} for owner in self.shared.owners}
        with torch.enable_grad():
            for microbatch in self.shared.microbatches_of(self.rank, self.microbatches):
                computed = self.chain.compute(microbatch, given, self._serve(microbatch))
                for stage, owner in self._stages():
                    own[owner][microbatch] = computed[self.chain.place(stage)]
        sums = {}
        for stage, owner in self._stages():
            begun = stage in given[stage].begun
            total = self._add_up(stage, own[owner], (had or {}).get(stage) if begun else None, begun=begun)
            if total is not None:
                sums[stage] = total
        return self._exchange(own), sums

    def _add_up(
        self, stage: int, own: Mapping[int, Computed], had: Gradients | None, *, begun: bool
    ) -> Gradients | None:
        """Gradients of a stage from all members, at its owner."""
        owner = self.holders[stage]
        gradients = StageGradients(self.group, owner, self.chain.parameters(stage), had)
        if self.mode == HelpMode.ALLREDUCE:
            return gradients.by_member(self.shared.members, self.chain.take_gradients(stage))
        way = self.shared.legs(self.chain.order.added(stage), owner, begun=begun)
        return gradients.in_order(way, {m: computed.gradients.pop(stage) for m, computed in own.items()})

    def _stages(self) -> list[tuple[int, int]]:
        return [(stage, self.holders[stage]) for stage in self.chain.stages]

    def _serve(self, microbatch: int) -> Callable[[Route, torch.Tensor], None]:
        def fill(route: Route, buffer: torch.Tensor) -> None:
            copy_into(self.source.message(route.key(self.chain.iteration, microbatch)), buffer)

        return fill

    # -------------------------------------------------------------------------------- owner to members

    def _give_inputs(self, inputs: Inputs | None) -> dict[int, Inputs]:
        """Every owner gives its parameters and what its script put in; returns the inputs by stage."""
        given: dict[int, Inputs] = {}
        for owner in self.shared.owners:
            lane = Lane(self.group, owner)
            stages = [stage for stage, holder in self._stages() if holder == owner]
            if owner == self.rank:
                assert inputs is not None
                plain = {f.name: getattr(inputs, f.name) for f in fields(Inputs)}
                send(Parcel(self._values(stages), _pack(plain)), lane)
                found = inputs
            else:
                parcel = receive(lane, self._places(stages))
                found = Inputs(**_unpack(parcel.plain, self.chain.device))
            given.update(dict.fromkeys(stages, found))
        self._begun = True
        return given

    def _values(self, stages: Sequence[int]) -> dict[TensorPath, torch.Tensor]:
        """Parameters, which each update changes; all else only once."""
        found: dict[TensorPath, torch.Tensor] = {}
        for stage in stages:
            module = self.chain.stages[stage].submod
            for name, parameter in module.named_parameters():
                if parameter.requires_grad or not self._begun:
                    found["parameter", str(stage), name] = parameter
            if not self._begun:
                for name, buffer in module.named_buffers():
                    found["buffer", str(stage), name] = buffer
        return found

    def _places(self, stages: Sequence[int]) -> Place:
        def place(kinds: dict[TensorPath, TensorKind]) -> Mapping[TensorPath, torch.Tensor]:
            here = self._values(stages)
            ours = {path: TensorKind(tensor.dtype, tuple(tensor.shape)) for path, tensor in here.items()}
            if ours != kinds:
                different = sorted({*ours.items()} ^ {*kinds.items()}, key=lambda item: item[0])
                stage, name = different[0][0][1:]
                raise CannotHelpError(
                    f"build({stage}) makes another module than the script has in stage {stage}: see {name}"
                )
            return here

        return place

    # -------------------------------------------------------------------------------- members to owner

    def _exchange(self, own: dict[int, dict[int, Computed]]) -> dict[int, Computed]:
        """Everybody gives every owner what it has computed of its stages."""
        results: dict[int, Computed] = {}
        for owner in self.shared.owners:
            if owner != self.rank:
                send(self._parcel(own[owner]), Lane(self.group, self.rank, owner))
                continue
            results = own[owner]
            for member in reversed(self.shared.members):  # who had the smaller shares has waited longer
                if member != self.rank:
                    parcel = receive(Lane(self.group, member, self.rank), fresh_on(self.chain.device))
                    results.update(self._opened(parcel))
        return results

    def _parcel(self, computed: dict[int, Computed]) -> Parcel:
        tensors: dict[TensorPath, torch.Tensor] = {}
        plain: dict[int, dict[str, Any]] = {}
        for microbatch, result in computed.items():
            for route, tensor in result.sent.items():
                tensors[str(microbatch), *_route_to_text(route)] = tensor
            plain[microbatch] = {
                "received": [(_route_to_text(route), value) for route, value in result.received.items()],
                "output": result.output,
                "loss": result.loss,
                "random": result.random,
            }
        return Parcel(tensors, _pack(plain))

    def _opened(self, parcel: Parcel) -> dict[int, Computed]:
        results = {}
        for microbatch, plain in _unpack(parcel.plain, self.chain.device).items():
            results[microbatch] = Computed(
                received={_route_from_text(*text): checksum for text, checksum in plain["received"]},
                output=plain["output"],
                loss=plain["loss"],
                random=plain["random"],
            )
        for (microbatch, *route), tensor in parcel.tensors.items():
            results[int(microbatch)].sent[_route_from_text(*route)] = tensor
        return results


def _route_to_text(route: Route) -> tuple[str, str, str, str]:
    return (str(route.direction), str(route.source), str(route.destination), str(route.slot))


def _route_from_text(direction: str, source: str, destination: str, slot: str) -> Route:
    return Route(Direction(direction), int(source), int(destination), int(slot))


def _pack(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes, device: torch.device) -> Any:
    return torch.load(io.BytesIO(data), map_location=device, weights_only=True)
