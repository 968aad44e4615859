"""One member of a parallel replay: survivors compute microbatches of lost stages (paper §5.2).

    owner    runs the user's loop: sends parameters and inputs ─▶ computes its share ─▶ collects ─▶ updates
    helper   receives them ─▶ computes its share, from the same logs ─▶ sends gradients and messages

Only owners update parameters, in the user's own code. Helpers need no optimizer, and the step's own code for
gradients (clipping, for example) runs unchanged. All members compute all stages of all owners, so the workers
of a machine need no pipeline among themselves, and any number of helpers can serve any number of owners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swift_ft.checkpoint.state_payload import (
    Allocate,
    StatePath,
    StatePayload,
    TensorKind,
    fresh_on,
    pack,
    unpack,
)
from swift_ft.determinism import host_random_state, random_state, set_host_random_state, set_random_state
from swift_ft.errors import CannotHelpError
from swift_ft.logging import Direction, LogReader
from swift_ft.recovery.helpers import ParallelReplay
from swift_ft.runtime.helpers.gradient_reduction import StageGradients
from swift_ft.runtime.replicas.transfer import Link, receive, send
from swift_ft.torch_adapters.pipelining.microbatch import Computed, Gradients, Inputs, StageChain
from swift_ft.torch_adapters.pipelining.p2p_routes import Route

__all__ = ["GradientReduction", "Helping", "Member", "own_random_state"]


class GradientReduction(StrEnum):
    """How the gradients of microbatches are added up."""

    ORDERED = "ordered"
    """One by one, in the original order: the rebuilt state is bit-identical."""
    ALLREDUCE = "allreduce"
    """Each member adds up its own first: least memory and waiting, but the rounding differs."""


@dataclass(frozen=True, slots=True)
class Helping:
    """How survivors help.

    Attributes:
        build: takes a stage index and makes that stage's module as the script does; None without helpers.
        mode: how gradients are added up.
        memory_bytes: host memory that a helper's own state may take while it helps; None for no limit. The
            rest goes to the local disk.
        folder: on the local disk, for that rest; by default among the system's temporary files.
    """

    build: Callable[[int], nn.Module] | None = None
    mode: GradientReduction = GradientReduction.ORDERED
    memory_bytes: int | None = None
    folder: Path | None = None


@contextmanager
def own_random_state() -> Iterator[None]:
    """Restore the random state after the block, so that a survivor's next step draws its own numbers."""
    host, device = host_random_state(), random_state()
    try:
        yield
    finally:
        set_host_random_state(host)
        set_random_state(device)


@dataclass(slots=True)
class Member:
    """Takes part in a parallel replay, iteration by iteration.

    Attributes:
        replay: its owners, helpers and iterations.
        rank: this worker.
        group: of all members.
        chain: the stages of all owners.
        holders: the rank of every stage in the pipeline.
        microbatches: per iteration.
        source: reads the logs of the owners' neighbours.
        mode: how gradients are added up.
    """

    replay: ParallelReplay
    rank: int
    group: dist.ProcessGroup
    chain: StageChain
    holders: Mapping[int, int]
    microbatches: int
    source: LogReader
    mode: GradientReduction
    _constants_sent: bool = False

    def step(
        self, iteration: int, inputs: Inputs | None = None, had: Mapping[int, Gradients] | None = None
    ) -> tuple[dict[int, Computed], dict[int, Gradients]]:
        """Replay an iteration, together with all members.

        Args:
            iteration: counted from 0.
            inputs: an owner's inputs, from its script; None for a helper.
            had: the gradients that an owner's parameters already have, by stage.

        Returns:
            For an owner, its results by microbatch and its gradients by stage; for a helper, nothing.

        Raises:
            RuntimeError: as torch does, if a member is gone.
            RecoveryError: a message is not in the log, or damaged.
            CannotHelpError: other workers cannot compute a stage.
        """
        given = self._distribute_inputs(inputs)
        self.chain.begin(iteration)
        own: dict[int, dict[int, Computed]] = {owner: {} for owner in self.replay.owners}
        with torch.enable_grad():
            for microbatch in self.replay.microbatches_of(self.rank, self.microbatches):
                computed = self.chain.compute(microbatch, given, self._read_from_log(microbatch))
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
        if self.mode == GradientReduction.ALLREDUCE:
            return gradients.by_member(self.replay.members, self.chain.take_gradients(stage))
        hops = self.replay.hops(self.chain.order.added(stage), owner, begun=begun)
        return gradients.in_order(hops, {m: computed.gradients.pop(stage) for m, computed in own.items()})

    def _stages(self) -> list[tuple[int, int]]:
        return [(stage, self.holders[stage]) for stage in self.chain.stages]

    def _read_from_log(self, microbatch: int) -> Callable[[Route, torch.Tensor], None]:
        def fill(route: Route, buffer: torch.Tensor) -> None:
            self.source.read_into(route.key(self.chain.iteration, microbatch), buffer)

        return fill

    # -------------------------------------------------------------------------------- owner to members

    def _distribute_inputs(self, inputs: Inputs | None) -> dict[int, Inputs]:
        """Send each owner's parameters and inputs to all members; return the inputs by stage."""
        given: dict[int, Inputs] = {}
        for owner in self.replay.owners:
            link = Link(self.group, owner)
            stages = [stage for stage, holder in self._stages() if holder == owner]
            if owner == self.rank:
                assert inputs is not None
                plain = {f.name: getattr(inputs, f.name) for f in fields(Inputs)}
                send(StatePayload(self._values(stages), pack(plain)), link)
                found = inputs
            else:
                payload = receive(link, self._allocate(stages))
                found = Inputs(**unpack(payload.plain, self.chain.device))
                for stage in stages:
                    self.chain.set_modes(stage, found.evaluating[stage])
            given.update(dict.fromkeys(stages, found))
        self._constants_sent = True
        return given

    def _values(self, stages: Sequence[int]) -> dict[StatePath, torch.Tensor]:
        """Parameters every time, since each update changes them; buffers and frozen parameters only once."""
        found: dict[StatePath, torch.Tensor] = {}
        for stage in stages:
            module = self.chain.stages[stage].submod
            for name, parameter in module.named_parameters():
                if parameter.requires_grad or not self._constants_sent:
                    found["parameter", str(stage), name] = parameter
            if not self._constants_sent:
                for name, buffer in module.named_buffers():
                    found["buffer", str(stage), name] = buffer
        return found

    def _allocate(self, stages: Sequence[int]) -> Allocate:
        def allocate(kinds: dict[StatePath, TensorKind]) -> Mapping[StatePath, torch.Tensor]:
            here = self._values(stages)
            ours = StatePayload(here).kinds
            if ours != kinds:
                different = sorted({*ours.items()} ^ {*kinds.items()}, key=lambda item: item[0])
                stage, name = different[0][0][1:]
                raise CannotHelpError(
                    f"build({stage}) makes a module that differs from the script's stage {stage}: see {name}"
                )
            return here

        return allocate

    # -------------------------------------------------------------------------------- members to owner

    def _exchange(self, own: dict[int, dict[int, Computed]]) -> dict[int, Computed]:
        """Each member sends each owner the results for that owner's stages."""
        results: dict[int, Computed] = {}
        for owner in self.replay.owners:
            if owner != self.rank:
                send(self._to_payload(own[owner]), Link(self.group, self.rank, owner))
                continue
            results = own[owner]
            for member in reversed(self.replay.members):  # members with smaller shares have waited longer
                if member != self.rank:
                    payload = receive(Link(self.group, member, self.rank), fresh_on(self.chain.device))
                    results.update(self._from_payload(payload))
        return results

    def _to_payload(self, computed: dict[int, Computed]) -> StatePayload:
        tensors: dict[StatePath, torch.Tensor] = {}
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
        return StatePayload(tensors, pack(plain))

    def _from_payload(self, payload: StatePayload) -> dict[int, Computed]:
        results = {}
        for microbatch, plain in unpack(payload.plain, self.chain.device).items():
            results[microbatch] = Computed(
                received={_route_from_text(*text): checksum for text, checksum in plain["received"]},
                output=plain["output"],
                loss=plain["loss"],
                random=plain["random"],
            )
        for (microbatch, *route), tensor in payload.tensors.items():
            results[int(microbatch)].sent[_route_from_text(*route)] = tensor
        return results


def _route_to_text(route: Route) -> tuple[str, str, str, str]:
    return (str(route.direction), str(route.source), str(route.destination), str(route.slot))


def _route_from_text(direction: str, source: str, destination: str, slot: str) -> Route:
    return Route(Direction(direction), int(source), int(destination), int(slot))
