"""One member of a parallel replay: survivors compute microbatches of lost stages (paper §5.2).

    owner    runs the user's loop: sends parameters and inputs ─▶ computes its share ─▶ collects ─▶ updates
    helper   receives them ─▶ computes its share, from the same logs ─▶ sends gradients and messages

Only owners update parameters, in the user's own code. Helpers need no optimizer, and the step's own code for
gradients (clipping, for example) runs unchanged. All members compute all stages of all owners, so the workers
of a machine need no pipeline among themselves, and any number of helpers can serve any number of owners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

import torch
import torch.distributed as dist

from swift_ft.checkpoint.state_payload import pack, unpack
from swift_ft.logging import Direction, LogReader
from swift_ft.recovery.helpers import ParallelReplay, ReductionHop
from swift_ft.runtime.helpers.gradient_reduction import (
    EarlySum,
    StageGradients,
    begins_in_order,
    has_all_gradients,
)
from swift_ft.runtime.helpers.outside_values import OutsideValues
from swift_ft.runtime.helpers.parameters import OwnersState
from swift_ft.runtime.helpers.pieces import Arriving, as_it_travels, send_plain
from swift_ft.runtime.replicas.transfer import Link
from swift_ft.torch_adapters.communication import wait_for, wait_on_host
from swift_ft.torch_adapters.pipelining.microbatch import Computed, Gradients, Inputs, StageChain
from swift_ft.torch_adapters.pipelining.p2p_routes import Route


class GradientReduction(StrEnum):
    """The order in which the gradients of microbatches are added up."""

    ORDERED = "ordered"
    """One by one, in the original order: the rebuilt state is bit-identical."""
    ALLREDUCE = "allreduce"
    """Each member adds up its own first: least memory and waiting, but the rounding differs."""


@dataclass(slots=True)
class Member:
    """Takes part in a parallel replay, iteration by iteration.

    Attributes:
        replay: its owners, helpers and iterations.
        rank: this worker.
        group: has all members.
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
    _states: dict[int, OwnersState] = field(default_factory=dict)
    _read: int = -1  # the iteration whose messages have been read
    _begun: bool = False  # an iteration is computed

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
        under_way: list[dist.Work] = []
        given = self._distribute_inputs(inputs, under_way, partial(self._read_messages, iteration))
        routes = {stage: self._route(stage, given[stage]) for stage, _ in self._stages()}
        summed = [stage for stage in routes if self._is_summed(routes[stage], stage in given[stage].begun)]
        self.chain.begin(iteration, summed)
        own: dict[int, dict[int, Computed]] = {owner: {} for owner in self.replay.owners}
        share, helps = self._share(self.rank), self.rank not in own
        outside = None if helps else self._states[self.rank].outside
        early: dict[int, EarlySum] = {}
        with torch.enable_grad():
            for number, microbatch in enumerate(share):
                if outside is not None and number == self._noted_from(share):
                    outside.note()
                if microbatch == share[-1] and helps and len(summed) == len(routes):
                    early = self._send_early(routes, under_way)
                computed = self.chain.compute(microbatch, given)
                for stage, owner in self._stages():
                    own[owner][microbatch] = computed[self.chain.place(stage)]
                if helps and microbatch != share[-1]:
                    self._send_messages(own, microbatch, under_way)
        arriving: list[ArrivingResults] = []
        if outside is not None:
            outside.check()
            self._begun = True
            arriving = self._arriving(own)
            self._exchange_messages(own, slice(-1), arriving, under_way)
        sums = {}
        for stage, owner in reversed(self._stages()):  # as backward passes come to them
            if stage in early:
                early[stage].finish()
                self.chain.take_gradients(stage)
                continue
            before = (had or {}).get(stage) if stage in given[stage].begun else None
            terms = self._terms(stage, routes[stage], own[owner], stage in summed)
            total = self._add_up(stage, routes[stage], terms, before, under_way)
            if total is not None:
                sums[stage] = total
        if helps:
            self._send_messages(own, share[-1], under_way)
        else:
            self._exchange_messages(own, slice(-1, None), arriving, under_way)
        results: dict[int, Computed] = {}
        for owner in own:
            if owner != self.rank:
                under_way += send_others(own[owner], self._link_to(owner))
                continue
            results = own[owner]
            for one in arriving:
                results.update(one.take())
        wait_on_host(under_way, [self.chain.device])
        return results, sums

    def _noted_from(self, share: Sequence[int]) -> int:
        """From which place in an owner's share on nothing else may change: the first one may fill caches."""
        return 0 if self._begun or len(share) == 1 else 1

    def _stages(self) -> list[tuple[int, int]]:
        return [(stage, self.holders[stage]) for stage in self.chain.stages]

    def _link_to(self, owner: int) -> Link:
        return Link(self.group, self.rank, owner)

    def _share(self, rank: int) -> range:
        return self.replay.microbatches_of(rank, self.microbatches)

    def _read_messages(self, iteration: int) -> None:
        """Read all messages of this worker's microbatches from the log, unless that is done."""
        if self._read == iteration:
            return
        self._read = iteration

        def fill(microbatch: int, route: Route, buffer: torch.Tensor) -> int:
            return self.source.read_into(route.key(iteration, microbatch), buffer)

        for microbatch in self._share(self.rank):
            self.chain.receive(microbatch, partial(fill, microbatch))

    def _distribute_inputs(
        self, inputs: Inputs | None, under_way: list[dist.Work], meanwhile: Callable[[], None]
    ) -> dict[int, Inputs]:
        """Send each owner's parameters and inputs to all members; return the inputs by stage.

        Args:
            inputs: of this worker, if it is an owner.
            under_way: each send that is started is added to it.
            meanwhile: called while parameters travel.
        """
        given: dict[int, Inputs] = {}
        for owner in self.replay.owners:
            stages = [stage for stage, holder in self._stages() if holder == owner]
            if owner not in self._states:
                route = [owner, *(member for member in self.replay.members if member != owner)]
                outside = OutsideValues(*self.chain.code_of(stages))
                self._states[owner] = OwnersState(self.group, route, self.rank, self.chain, stages, outside)
            if owner == self.rank:
                assert inputs is not None
                found, works = inputs, self._states[owner].send(inputs)
                meanwhile()
            else:
                found, works = self._states[owner].receive(meanwhile)
            under_way += works
            given.update(dict.fromkeys(stages, found))
        return given

    # --------------------------------------------------------------------------------------- gradients

    def _route(self, stage: int, given: Inputs) -> list[ReductionHop]:
        """The route of a stage's gradients from member to member."""
        order = self.chain.order.added(stage)
        return self.replay.hops(order, self.holders[stage], begun=stage in given.begun)

    def _is_summed(self, route: list[ReductionHop], begun: bool) -> bool:
        """Whether autograd adds up all gradients of a stage that this member computes."""
        return self.mode == GradientReduction.ALLREDUCE or begins_in_order(
            route, self.rank, self._share(self.rank), begun=begun
        )

    def _terms(
        self, stage: int, route: list[ReductionHop], own: Mapping[int, Computed], summed: bool
    ) -> dict[int, list[Gradients]]:
        """The gradients that this member adds at each of its hops, by the hop's number."""
        if summed:
            return {0: [self.chain.take_gradients(stage)]}
        return {
            number: [own[microbatch].gradients.pop(stage) for microbatch in hop.microbatches]
            for number, hop in enumerate(route)
            if hop.rank == self.rank
        }

    def _add_up(
        self,
        stage: int,
        route: list[ReductionHop],
        terms: Mapping[int, list[Gradients]],
        had: Gradients | None,
        under_way: list[dist.Work],
    ) -> Gradients | None:
        """Gradients of a stage from all members, at its owner."""
        owner, parameters = self.holders[stage], self.chain.parameters(stage)
        gradients = StageGradients(self.group, owner, parameters, had, under_way)
        if self.mode == GradientReduction.ALLREDUCE:
            return gradients.by_member(self.replay.members, *terms[0])
        return gradients.in_order(route, terms)

    def _send_early(
        self, routes: Mapping[int, list[ReductionHop]], under_way: list[dist.Work]
    ) -> dict[int, EarlySum]:
        """At a helper whose sum autograd adds up, begin to send it before its last microbatch."""
        if len(routes) > 1 or self.chain.device.type != "cpu":
            return {}  # sums of stages travel one after the other; a device's own threads would send
        ((stage, route),) = routes.items()
        parameters = self.chain.parameters(stage)
        if not has_all_gradients(parameters):
            return {}
        after = route[1].rank if self.mode == GradientReduction.ORDERED else self.holders[stage]
        return {stage: EarlySum(Link(self.group, self.rank, after), parameters, under_way)}

    # ----------------------------------------------------------------------------------------- results

    def _send_messages(
        self, own: Mapping[int, Mapping[int, Computed]], microbatch: int, under_way: list[dist.Work]
    ) -> None:
        for owner, computed in own.items():
            under_way += send_messages(computed[microbatch], self._link_to(owner))

    def _arriving(self, own: Mapping[int, Mapping[int, Computed]]) -> list[ArrivingResults]:
        """At an owner, the results of all other members."""
        like = next(iter(own[self.rank].values()))
        return [
            ArrivingResults(Link(self.group, member, self.rank), self._share(member), like, self.chain.device)
            for member in self.replay.members
            if member != self.rank
        ]

    def _exchange_messages(
        self,
        own: Mapping[int, Mapping[int, Computed]],
        which: slice,
        arriving: Sequence[ArrivingResults],
        under_way: list[dist.Work],
    ) -> None:
        """At an owner, begin to receive messages from all, and to send them to other owners.

        All receive from each other in one order, as a backend needs that has one queue for both directions.
        """
        for owner in own:
            if owner == self.rank:
                for one in arriving:
                    one.expect(which)
                continue
            for microbatch in self._share(self.rank)[which]:
                under_way += send_messages(own[owner][microbatch], self._link_to(owner))


# member    computes ─▶ its messages, at once ─▶ ... ─▶ computes the last one ─▶ gradients ─▶ its messages
#               ─▶ checksums, losses, outputs
#     owner     computes its own share ─▶ receives all in this order
#
# A schedule's microbatches have messages of the same shapes. So an owner knows from its own ones what
# arrives.


def send_messages(result: Computed, link: Link) -> list[dist.Work]:
    """Begin to send the messages of a microbatch to their owner, who logs them."""
    return [link.carry(as_it_travels(tensor, link.device)) for tensor in result.sent.values()]


def send_others(results: Mapping[int, Computed], link: Link) -> list[dist.Work]:
    """Begin to send everything else but gradients.

    Args:
        results: of all microbatches of this worker.
        link: to the owner.
    """
    plain = {
        microbatch: {
            "received": [(_route_to_text(route), value) for route, value in result.received.items()],
            "output": result.output,
            "loss": result.loss,
            "random": result.random,
        }
        for microbatch, result in results.items()
    }
    return send_plain(pack(plain), link)


class ArrivingResults:
    """The results of a member that are about to be received.

    Args:
        link: from the member to the owner, this worker.
        microbatches: the member's share.
        like: any of the owner's own microbatches.
        device: of the stages.
    """

    def __init__(self, link: Link, microbatches: Sequence[int], like: Computed, device: torch.device) -> None:
        self._link, self._microbatches, self._like, self._device = link, microbatches, like, device
        self._messages: dict[tuple[int, Route], torch.Tensor] = {}
        self._works: list[dist.Work] = []

    def expect(self, which: slice) -> None:
        """Begin to receive the messages of these of the microbatches."""
        for microbatch in self._microbatches[which]:
            for route, tensor in self._like.sent.items():
                message = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._link.device)
                self._messages[microbatch, route] = message
                self._works.append(self._link.carry(message))

    def take(self) -> dict[int, Computed]:
        """By microbatch, without gradients. Call it when all messages are expected.

        Raises:
            RuntimeError: as torch does, if the member is gone.
        """
        others = Arriving(self._link)
        wait_for(self._works)
        results = {}
        for microbatch, plain in unpack(others.take(), self._device).items():
            results[microbatch] = Computed(
                received={_route_from_text(*text): checksum for text, checksum in plain["received"]},
                output=plain["output"],
                loss=plain["loss"],
                random=plain["random"],
            )
        for (microbatch, route), tensor in self._messages.items():
            results[microbatch].sent[route] = tensor.to(self._device)
        return results


def _route_to_text(route: Route) -> tuple[str, str, str, str]:
    return (str(route.direction), str(route.source), str(route.destination), str(route.slot))


def _route_from_text(direction: str, source: str, destination: str, slot: str) -> Route:
    return Route(Direction(direction), int(source), int(destination), int(slot))
