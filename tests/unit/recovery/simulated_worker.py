"""A worker of the simulated network: what the executor does with the protocol's orders, in small.

BOOT ──▶ RECOVER ──▶ (GATHER) ──▶ REPLAY, HELP ──▶ RECOVER ──▶ JOIN ──▶ SERVE ──▶ RUN ──▶ FINISHING ──▶ exit
            ▲           │           │                      │        │        │
            └─────── CONFIRM ◀──────┴──────────────────────┴────────┴────────┘   (communication broke)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from simulated_connection import Mode
from simulated_promises import check_served
from simulated_replay import Rebuilt
from simulated_store import GENESIS, Content, Violation

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.plan import Plan, Way

if TYPE_CHECKING:
    from simulated_machine import Machine
    from simulation import Simulation

__all__ = ["Worker"]


class Worker(Rebuilt):
    """One process, with what its training thread does."""

    def __init__(self, sim: Simulation, machine: Machine, rank: int, launched: int) -> None:
        super().__init__(sim, machine, rank, launched)
        self.mode = Mode.BARE if sim.bare else Mode.BOOT
        self.plan: Plan | None = None
        self.part = rank  # the stage that it holds
        self.bare_work = 0
        self._acts: dict[Mode, Callable[[State], bool]] = {
            Mode.BOOT: self._boot,
            Mode.RECOVER: self._recover,
            Mode.GATHER: self._gather,
            Mode.REPLAY: self._replay,
            Mode.HELP: self._help,
            Mode.JOIN: self._join,
            Mode.SERVE: self._serve,
            Mode.RUN: self._run,
            Mode.CONFIRM: self._confirm,
            Mode.FINISHING: self._finishing,
            Mode.BARE: self._bare,
        }

    def __repr__(self) -> str:
        at = self.content.iteration if self.content else None
        return f"worker {self.rank} of {self.name} (launched {self.launched}, {self.mode.name}, at {at})"

    # ----------------------------------------------------------------------------------- one small step

    def act(self) -> bool:
        """Do a little. False if there was nothing to do."""
        if not self.read(self.position):
            return True
        if (
            self.savings or self.committings or self.cleanings
        ) and self.sim.rng.random() < self.sim.background_rate:
            return self.background()
        return self._acts[self.mode](self.view)

    # ----------------------------------------------------------------------------------------- recovery

    def _boot(self, _: State) -> bool:
        """Import, build the model, claim the store (worker 0 decides for all)."""
        if self.rank == 0:
            self.sim.claimed = True
            if self.sim.resume is not None and not self.tell(ev.Committed(self.sim.resume, 0)):
                return True
        elif not self.sim.claimed:
            return False
        self.mode = Mode.RECOVER
        return True

    def _recover(self, state: State) -> bool:
        match self.order(state):
            case WorkerOrder.HOLD:
                return False
            case WorkerOrder.STOP:
                self.exit(1)
            case WorkerOrder.REPORT:
                self._report(state)
            case WorkerOrder.EXECUTE:
                self._execute(state)
            case WorkerOrder.RUN:
                self._prepare(state)
        return True

    def _report(self, state: State) -> None:
        live = self.content is not None and not self.source
        self.flush()
        self.source = False
        at = None if self.content is None else self.content.iteration
        stages, known = (self.rank,), self.sim.shapes_known
        told = ev.Reported(self.rank, state.generation, at, live, stages, known, self.dirty)
        self.tell(replace(told, serves=self.serves(), parts=self.sim.parts))

    # --------------------------------------------------------------------------------------------- live

    def _prepare(self, state: State) -> None:
        """Ordered to run: open the log and begin to form the group."""
        assert state.plan is not None
        plan = state.plan
        if self.content is None:
            self.content = GENESIS  # the script's own beginning
        if self.content.iteration != plan.resume + plan.tasks[self.rank].serve:
            raise Violation(f"{self} goes live in a generation that resumes at {plan.resume}")
        self._enter(state, plan)

    def _enter(self, state: State, plan: Plan) -> None:
        """Begin to form the group of a generation."""
        self._open_log(state)
        self.plan, self.history = plan, self._history_of(state)
        self.joining, self.stage, self.mode = state.generation, 0, Mode.JOIN
        self.meanwhile = WorkerOrder.RUN
        self.sim.group(state.generation).joined.add(self.rank)

    def _join(self, state: State) -> bool:
        generation = self.joining
        assert generation is not None
        assert self.plan is not None
        group = self.sim.group(generation)
        if len(group.joined) < state.world and not group.gone and not group.broken:
            return False
        self.running, self.joining = generation, None
        if len(group.joined) < state.world or group.gone or group.broken:
            self.broken()
            return True
        if self.disturbed(state):
            self.leave_group()
            self.mode = Mode.RECOVER
            return True
        self.sim.check_formed(generation, self.plan)
        self.sim.shapes_known = True
        self._formed(state)
        return True

    def _formed(self, state: State) -> None:
        """The group stands: who is ahead serves, all others train."""
        assert self.plan is not None
        if self.plan.tasks[self.rank].serve:
            self.mode = Mode.SERVE
        else:
            self.mode = Mode.RUN
            if state.committed is None and self.plan.way == Way.START:
                self._save(state)

    def _serve(self, state: State) -> bool:
        """One iteration ahead: send the interrupted iteration again from this worker's own log."""
        assert self.plan is not None
        iteration, tasks = self.plan.resume, self.plan.tasks
        served = [peer for peer in self.neighbours() if not tasks[peer].serve]
        if self.stage == 0 and served:
            for peer in served:
                own = self.sent_to(peer, iteration)
                if isinstance(own, str):
                    if own == "missing" and not self._outdated(state):
                        raise Violation(f"{self} has to serve iteration {iteration} to rank {peer}: {own}")
                    generation = self.running
                    assert generation is not None
                    self.leave_group()
                    self._cannot(generation, f"its own log is {own}")
                    return True
                if not self._send(peer, iteration, own.chain, own.history):
                    return True
            self.stage = 1
            return True
        for peer in served:
            got = self._receive(peer, iteration)
            if got is None:
                return self.mode == Mode.CONFIRM
            check_served(self, peer, iteration, got)
        self.stage, self.mode = 0, Mode.RUN
        self.sim.seen["served"] += 1
        return True

    def _run(self, state: State) -> bool:
        """A part of one live iteration: forward, backward, the optimizer's step."""
        if self.stage == 0 and not self._goes_on(state):
            return True
        assert self.content is not None
        iteration, chain = self.content.iteration, self.content.chain
        before, after = self.before, self.after
        match self.stage:
            case 0:
                if before is not None and not self._take(before, iteration):
                    return self.mode == Mode.CONFIRM
            case 1:
                if after is not None and not self._send(after, iteration, chain, self.history):
                    return True
            case 2:
                if after is not None and not self._take(after, iteration):
                    return self.mode == Mode.CONFIRM
            case 3:
                if before is not None and not self._send(before, iteration, chain, self.history):
                    return True
            case _:
                self._apply(iteration, self.history)
                self._ask_now_and_then()
                self.stage = -1
        self.stage += 1
        return True

    def _goes_on(self, state: State) -> bool:
        """Between two steps: whether there is one more to do in this generation."""
        assert self.content is not None
        if self.disturbed(state):
            self.leave_group()
            self.mode = Mode.RECOVER
            return False
        if self.content.iteration >= self.sim.iterations:
            self.flush()
            self.mode = Mode.FINISHING
            self.tell(ev.Finished(self.rank, state.generation))
            return False
        return True

    def _finishing(self, state: State) -> bool:
        """Stay until everybody has completed the last iteration, and the last checkpoint is committed."""
        if len(state.finished) < state.world:
            if self.disturbed(state):
                self.leave_group()
                self.mode = Mode.RECOVER
                return True
            return False
        if self.background():
            return True
        regular = self.sim.iterations % self.sim.checkpoint_every == 0
        if regular and (state.committed or 0) < self.sim.iterations and state.phase != Phase.ENDED:
            return False  # until a deadline
        self.done()
        return True

    def break_half_updated(self) -> bool:
        """Communication fails after the optimizer's step: the state is between two iterations."""
        if self.mode != Mode.RUN or self.stage != 4:
            return False
        assert self.content is not None
        self.content = Content(self.content.iteration, hash((self.content.chain, "half updated")))
        self.dirty = "optimizer"
        self.broken()
        return True

    # ---------------------------------------------------------------------------------- without a session

    def _bare(self, _: State) -> bool:
        """A plain script: it works while everybody is there, and fails when somebody is not."""
        group = self.sim.group(-self.launched)
        group.joined.add(self.rank)
        self.joining = -self.launched
        if len(group.joined) < self.sim.world:
            return False
        if group.broken or (group.gone and self.bare_work < self.sim.iterations):
            self.exit(1)
            return True
        self.bare_work += 1
        if self.bare_work >= self.sim.iterations:
            self.joining = None  # it needs nobody any more
            self.exit(0)
        return True
