"""The policy as a part of worker 0: it looks between two iterations whether a change to another world pays.

facts (the state, what was measured) ──▶ decide() ──▶ advise: say it once
└─▶ auto: plan it
the next world's worker 0 says what came of it, beside what was forecast
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swift_ft.costs.job import Worker
from swift_ft.costs.layer_profile import NANOSECONDS, LayerProfile
from swift_ft.costs.next_world import change_ns
from swift_ft.costs.survivors_plan import plan_after_loss
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.next_pipelines import Sizes, takes_unlike
from swift_ft.recovery.policy import (
    Facts,
    Kind,
    Limits,
    Past,
    Proposal,
    Waiting,
    decide,
    members_of,
    spares_of,
)
from swift_ft.recovery.regrowth import growth_of
from swift_ft.runtime.policy.forecasts import Forecasts, Now, no_forecast
from swift_ft.runtime.worker.part import Part, StepInfo
from swift_ft.runtime.worker.ports import Job
from swift_ft.units import counted

_logger = logging.getLogger(__name__)

_EVERY = 4
"""Iterations from one look to the next. A machine that leaves is seen at once."""
_SETTLED = 8
"""Iterations after a change, until the time of one says what it brought."""


@dataclass(frozen=True, slots=True)
class Measures:
    """Facts about the work.

    Attributes:
        medians: seconds of an iteration without waits and with them; None as long as too few are known.
        workers: what all have measured in their first iterations; None until all have.
        forecasts: times of an iteration with other machines.
        layers: what each layer of a LayerStack costs; None as long as that is unknown.
    """

    medians: Callable[[], tuple[float, float] | tuple[None, None]]
    workers: Callable[[], Sequence[Worker] | None]
    forecasts: Forecasts
    layers: Callable[[State], Sequence[LayerProfile] | None] = lambda state: None


class PolicyPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        job: where changes are planned.
        limits: which worlds may be chosen.
        measures: what is known about the work.
        chooses: whether it plans changes, or only says which one pays.
    """

    name = "policy"

    def __init__(self, job: Job, limits: Limits, measures: Measures, *, chooses: bool) -> None:
        self._job = job
        self._limits = limits
        self._measures = measures
        self._chooses = chooses
        self._seen: dict[str, int] = {}  # spares, and since which iteration
        self._given_up: int | None = None
        self._under_way = 0  # the number of the world that is planned; 0 for none
        self._said: set[tuple[Kind, tuple[str, ...]]] = set()
        self._said_dear = False
        self._cost_ns: int | None = None
        self._compared = 0  # the world of which was said what came
        # Owner: the journal's thread. Which world all stop for, and since when.
        self._stopped: tuple[int, float] | None = None
        self._pause_ns: int | None = None

    def on_change(self, state: State) -> None:
        """Note how long all stand still for the next world. In the journal's thread."""
        change = state.worlds.change
        if change is not None and change.offered and self._stopped is None:
            self._stopped = (change.world.number, time.monotonic())
        if change is None and self._stopped is not None and state.phase == Phase.LIVE:
            world, at = self._stopped
            self._stopped = None
            if world == state.worlds.present.number:
                self._pause_ns = round_ns(time.monotonic() - at)

    def boundary(self, step: StepInfo) -> None:
        state, iteration = self._job.state, step.completed
        self._note(state, iteration)
        self._compare(state, iteration)
        if state.phase != Phase.LIVE or state.worlds.change is not None or state.layouts.pending is not None:
            return
        if self._limits.only_returns and state.worlds.full is None:
            return
        if state.round.finished or (iteration % _EVERY and not state.membership.draining):
            return
        if (facts := self._facts(state, iteration)) is None:
            return
        found = decide(facts)
        if isinstance(found, Proposal):
            self._propose(state, found, iteration)
        elif found.too_dear and not self._said_dear:
            self._said_dear = True
            _logger.warning(
                "--policy would change to other machines, but for --policy-price: %s",
                found.reason,
                extra={"event": "change_too_dear", "iteration": iteration, "reason": found.reason},
            )

    def _note(self, state: State, iteration: int) -> None:
        """Keep what the state forgets: since when machines wait, and when a change was given up."""
        self._seen = {name: self._seen.get(name, iteration) for name in spares_of(state)}
        change = state.worlds.change
        if self._under_way and change is None and state.worlds.present.number != self._under_way:
            self._given_up = iteration
        self._under_way = change.world.number if change is not None else 0

    def _facts(self, state: State, iteration: int) -> Facts | None:
        """None as long as too little is known."""
        own_s, step_s = self._measures.medians()
        if own_s is None or step_s is None or state.plan is None:
            return None
        members = members_of(state)
        now = Now(round_ns(step_s), round_ns(own_s), len(members) + len(self._seen))
        # A plan is for as many machines as it was made for.
        forecasts = no_forecast if state.worlds.present.plan else self._measures.forecasts
        least = max(self._limits.least, state.shape.min_machines or 1)
        steps = state.round.statuses[0].steps
        since = max(state.worlds.present.since, state.plan.resume)
        growth = growth_of(state, self._limits.most)
        facts = Facts(
            iteration=iteration,
            left=None if steps is None else steps - iteration,
            members=members,
            spares=tuple(Waiting(name, at) for name, at in self._seen.items()),
            now_ns=now.iteration_ns,
            forecast=tuple(sorted(forecasts(state, now).items())),
            cost_ns=self._cost(),
            past=Past(state.worlds.planned, since, self._given_up),
            limits=replace(self._limits, least=least),
            grown=() if growth is None else growth.machines,
        )
        return replace(facts, spent_ns=state.worlds.present.spent_until(iteration, facts.now_machine_ns))

    def _cost(self) -> int:
        """The time for which a change stops training: as long as the last one did, or as forecast."""
        if self._pause_ns is not None:
            return self._pause_ns
        if self._cost_ns is None:
            if (workers := self._measures.workers()) is None:
                return change_ns(())
            self._cost_ns = change_ns(workers)
        return self._cost_ns

    def _propose(self, state: State, found: Proposal, iteration: int) -> None:
        if self._chooses:
            self._choose(state, found, iteration)
        elif (found.kind, found.machines) not in self._said:
            self._said.add((found.kind, found.machines))
            _advise(found, iteration)

    def _choose(self, state: State, found: Proposal, iteration: int) -> None:
        forecast, asked_by = found.forecast, "--on-loss" if self._limits.only_returns else "--policy"
        _logger.info(
            "%s changes to machines %s: %s. Training is to stand still for %.2g s.%s",
            asked_by,
            ", ".join(found.machines),
            found.reason,
            forecast.cost_ns / NANOSECONDS,
            _pays(found),
            extra={
                "event": "change_chosen",
                "kind": str(found.kind),
                "machines": len(found.machines),
                "iteration": iteration,
                "before_s": forecast.before_ns / NANOSECONDS,
                "after_s": forecast.after_ns / NANOSECONDS,
                "cost_s": forecast.cost_ns / NANOSECONDS,
                "pays_after": forecast.pays_after,
                "price": found.price,
            },
        )
        self._job.append(
            ev.ChangePlanned(
                world=state.worlds.planned + 1,
                machines=found.machines,
                plan=self._plan_of(state, found),
                reason=found.reason,
                asked_by="--on-loss shrink" if self._limits.only_returns else "--policy auto",
                # Who has asked for no policy wants no forecast compared either.
                before_ns=0 if self._limits.only_returns else forecast.before_ns,
                after_ns=forecast.after_ns,
                cost_ns=forecast.cost_ns,
            )
        )

    def _plan_of(self, state: State, found: Proposal) -> str:
        """The layout of the next world; empty if its workers find one by their number."""
        growth, full = growth_of(state, self._limits.most), state.worlds.full
        if found.kind != Kind.RETURN or growth is None or full is None:
            return ""
        if not growth.pipelines:
            return growth.plan
        sizes, layers = Sizes(full.layers, full.microbatches), self._measures.layers(state)
        return plan_after_loss(growth.pipelines, sizes, layers, unlike=takes_unlike(state)).to_text()

    def _compare(self, state: State, iteration: int) -> None:
        """Once the next world has trained for a while: what came, beside what was forecast."""
        world = state.worlds.present
        if world.forecast is None or self._compared == world.number or iteration < world.since + _SETTLED:
            return
        _, step_s = self._measures.medians()
        if step_s is None or state.plan is None or state.plan.resume != world.since:
            return  # a recovery has come between, or too few iterations are known
        self._compared = world.number
        forecast, pause_s = world.forecast, (self._pause_ns or 0) / NANOSECONDS
        _logger.info(
            "The change to world %d: an iteration takes %.3g s, forecast were %.3g s, and before it %.3g s. "
            "Training stood still for %.2g s, forecast were %.2g s.",
            world.number,
            step_s,
            forecast.after_ns / NANOSECONDS,
            forecast.before_ns / NANOSECONDS,
            pause_s,
            forecast.cost_ns / NANOSECONDS,
            extra={
                "event": "change_compared",
                "world": world.number,
                "iteration": iteration,
                "before_s": forecast.before_ns / NANOSECONDS,
                "after_s": forecast.after_ns / NANOSECONDS,
                "cost_s": forecast.cost_ns / NANOSECONDS,
                "came_after_s": step_s,
                "came_cost_s": pause_s,
            },
        )


def _advise(found: Proposal, iteration: int) -> None:
    """Say which change pays now."""
    forecast = found.forecast
    _logger.warning(
        "--policy advises a change to machines %s: %s. Training would stand still for %.2g s.%s",
        ", ".join(found.machines),
        found.reason,
        forecast.cost_ns / NANOSECONDS,
        _pays(found),
        extra={
            "event": "change_advised",
            "kind": str(found.kind),
            "machines": len(found.machines),
            "iteration": iteration,
            "before_s": forecast.before_ns / NANOSECONDS,
            "after_s": forecast.after_ns / NANOSECONDS,
            "cost_s": forecast.cost_ns / NANOSECONDS,
            "pays_after": forecast.pays_after,
            "price": found.price,
        },
    )


def _pays(found: Proposal) -> str:
    after = found.forecast.pays_after
    return "" if after is None else f" It pays after {counted(after, 'iteration')}."


def round_ns(seconds: float) -> int:
    """Seconds as whole nanoseconds."""
    return round(seconds * NANOSECONDS)
