"""A simulated worker: the core of a real one (`swift_ft/runtime/worker/core.py`), among stand-ins.

What is simulated is what surrounds the core: its process, its connections, its state, and a script.

BOOT ──▶ RECOVER ──▶ (GATHER) ──▶ REPLAY, HELP ──▶ RECOVER ──▶ JOIN ──▶ RESEND ──▶ RUN ──▶ FINISHING ──▶ exit
            ▲           │           │                      │        │         │
            └─────── CONFIRM ◀──────┴──────────────────────┴────────┴─────────┘   (communication failed)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from swift_ft.errors import DivergenceError, SwiftError
from swift_ft.recovery import events as ev
from swift_ft.recovery.handlers.worlds import all_prepared
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.reconcile import Transfer
from swift_ft.runtime.worker.core import WorkerCore
from swift_ft.runtime.worker.flow import Flow
from swift_ft.runtime.worker.part import Interruption, Part, Round, StepInfo
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.testing.simulation.connection import Mode, Pending, Ticks
from swift_ft.testing.simulation.ports import ports_of
from swift_ft.testing.simulation.replay import ReplayingProcess
from swift_ft.testing.simulation.store import GENESIS, Content, Violation
from swift_ft.testing.simulation.world import Host, World

T = TypeVar("T")


class Worker(ReplayingProcess, Part):
    """One process, with its training thread. It is the only part of its core.

    Attributes:
        core: decides.
        stage: the stage that it holds.
        layers: of a model that is a stack of layers; 0 for any other.
    """

    layers = 0

    def __init__(self, world: World, machine: Host, rank: int, started_in: int) -> None:
        super().__init__(world, machine, rank, started_in)
        self.stage = rank
        self.core = WorkerCore(rank, WorkerStatus(), self, ports_of(self))
        self._next_transfer = 0
        self._half_updated = False
        self._iterations_without_session = 0
        sessionless = world.settings.sessionless
        self.mode = Mode.SESSIONLESS if sessionless else Mode.BOOT
        self._flow = self._without_session() if sessionless else self._train()
        self._call: Callable[[], Any] = next(self._flow)
        self._ticks: Ticks[Any] | None = None

    def __repr__(self) -> str:
        at = self.content.iteration if self.content else None
        return (
            f"worker {self.rank} of {self.machine_name} "
            f"(started in {self.started_in}, {self.mode.name}, at {at})"
        )

    @property
    def dirty(self) -> str | None:
        """Why its state is neither before nor after an iteration, if so."""
        return self.core.status.dirty

    def act(self) -> bool:
        """Take one small step. False if there was nothing to do."""
        if self.unanswered:
            return False
        if not self.read(max(self.position, self.answered_at)):
            return True
        background = self.saves or self.commits or self.cleanups
        if background and self.world.rng.random() < self.world.settings.background_rate:
            return self.act_in_background()
        try:
            outcome = next(self._ticks) if self._ticks is not None else self._call()
        except StopIteration as end:
            self._decide(self._flow.send, end.value)
        except SwiftError as error:
            self._decide(self._flow.throw, error)
        else:
            if self._ticks is not None:
                return outcome is Pending.ACTED
            if isinstance(outcome, Generator):
                self._ticks = outcome
                return self.act()
            self._decide(self._flow.send, outcome)
        return True

    def _decide(self, go_on: Callable[[Any], Callable[[], Any]], outcome: object) -> None:
        """A call has returned, or has failed: its core says what comes next."""
        self._ticks = None
        with suppress(StopIteration):  # the script has returned
            self._call = go_on(outcome)

    # ------------------------------------------------------------------------------------- the script

    def _train(self) -> Flow[None]:
        """The script's loop; see `swift_ft/runtime/steps.py`."""
        yield self._boot
        core = self.core
        yield from core.recover()
        while True:
            yield from core.ready_to_step()
            if not (yield from core.settle()) or (yield from core.stops_for_layout()):
                continue
            if core.status.iteration >= self.world.settings.iterations and not self.replaying:
                if (yield from core.finish()):
                    self.complete()
                    return
                continue
            step = core.begin()
            interrupted = yield self._body
            if interrupted:
                yield from core.interrupted("the network broke", self.failure)
            else:
                self._check_content(step.completed)
                yield from core.completed()

    def _boot(self) -> Ticks[None]:
        """Import, build the model, claim the store (worker 0 decides for all)."""
        if self.rank == 0:
            self.world.claimed = True
            found = self.world.settings.resume
            if found:  # worker 0 reports the checkpoints that it found in the store
                yield from self.write(
                    ev.CheckpointCommitted(
                        iteration=found[-1], epoch=0, keep=self.world.settings.keep, earlier=found[:-1]
                    )
                )
        while not self.world.claimed:
            yield Pending.IDLE

    def _body(self) -> Ticks[bool]:
        """The body of a step. True if it was interrupted."""
        self.mode = Mode.REPLAY if self.replaying else Mode.RUN
        self.substep, self.failure, self._step_done = 0, None, False
        act = self._replay if self.replaying else self._run
        while not self._step_done:
            if self.mode == Mode.CONFIRM or self.failure is not None or self._others_stop():
                return True
            acted = act(self.view)
            if not self._step_done:
                yield Pending.ACTED if acted else Pending.IDLE
        return False

    def _others_stop(self) -> bool:
        """Whether other workers do not begin this iteration, because layers move before it."""
        return self.core.layers_move_next and not self.replaying and self.mode == Mode.RUN

    def _run(self, state: State) -> bool:
        """A part of one live iteration: forward, backward, the optimizer's step."""
        assert self.content is not None
        iteration, chain = self.content.iteration, self.content.chain
        before, after = self.before, self.after
        match self.substep:
            case 0:
                if before is not None and not self._recv_and_check(before, iteration):
                    return self.mode == Mode.CONFIRM
            case 1:
                if after is not None and not self._send(after, iteration, chain, self.history):
                    return True
            case 2:
                if after is not None and not self._recv_and_check(after, iteration):
                    return self.mode == Mode.CONFIRM
            case 3:
                if before is not None and not self._send(before, iteration, chain, self.history):
                    return True
            case _:
                self._apply(iteration, self.history)
                self._step_done = True
        self.substep += 1
        return True

    def break_half_updated(self) -> bool:
        """Communication fails after the optimizer's step: the state is between two iterations."""
        if self.mode != Mode.RUN or self.substep != 4:
            return False
        self._half_updated = True
        self.fail_communication()
        return True

    def diverge(self) -> None:
        """Its step finds that the result is wrong."""
        at = self.content.iteration if self.content is not None else None
        self.failure = DivergenceError("diverged", computed_in=at)

    # --------------------------------------------------------------------------------------- its parts

    def why_checkpoint(self, committed: int | None) -> str:
        """Like a worker whose log nears its budget, but more often."""
        return "chance" if self.world.rng.random() < self.world.settings.request_rate else ""

    def boundary(self, step: StepInfo) -> None:
        """Once the next world is prepared, some worker says where all stop for it, sometimes a bit late."""
        state = self.view
        change = state.worlds.change
        if change is None or state.layouts.pending is not None or not all_prepared(state, change):
            return
        ahead = 1 if self.world.rng.random() < 0.2 else ev.REQUESTED_AHEAD
        self.append(
            ev.SwitchRequested(
                rank=self.rank,
                generation=step.generation,
                iteration=step.completed + ahead,
                world=change.world.number,
            )
        )

    def interrupted(self, interruption: Interruption) -> None:
        """Undo what an incomplete step changed. Here, that is nothing."""
        if self._half_updated:
            assert self.content is not None
            self.content = Content(self.content.iteration, hash((self.content.chain, "half updated")))
            self.core.status.dirty, self._half_updated = "optimizer", False

    def settle(self, state: State) -> None:
        """Others may read its log."""
        self.flush()

    def report(self, report: ev.StatusReported) -> ev.StatusReported:
        """Add all that the core does not know."""
        if report.iteration is None:
            self.content = None
        else:
            self._check_content(report.iteration)
        return replace(report, layers=self.layers, **self._facts())

    def _facts(self) -> dict[str, Any]:
        """Of its stage, in its report."""
        return {
            "stages": (self.rank,),
            "pipeline_known": self.world.shapes_known,
            "log_gap_before": self.log_gap_before,
            "can_resend": self.can_resend(),
            "max_replay_shards": self.world.max_replay_shards,
        }

    def _check_content(self, iteration: int) -> None:
        if self.content is None or self.content.iteration != iteration:
            raise Violation(f"{self} has {self.content}, and its core counts {iteration} iterations")

    def open(self, state: State, begin: int) -> None:
        """Its log of a generation begins. One that has done its task has the state that the plan names."""
        if state.phase == Phase.RECOVERING and (self.content is None or self.content.iteration != begin):
            raise Violation(f"{self} is to begin at iteration {begin} with {self.content}")
        self._open_log(state)

    def prepare(self, round: Round) -> None:
        """The order is to run: have a state of the iteration with which all go on."""
        self._follow(round)
        if self.content is None:
            self.content = self.initial(GENESIS)
        if self.content.iteration != round.plan.resume + round.task.resend_from_log:
            raise Violation(f"{self} goes live in a generation that resumes at {round.plan.resume}")

    def initial(self, state: T) -> T:
        """The script's own initial state, if that is still there."""
        if not self.core.status.fresh:
            raise Violation(f"{self} begins anew, and no longer has what its script began with")
        return state

    def _follow(self, round: Round) -> None:
        self.plan, self.history = round.plan, self._history_of(round.state)

    def join(self, round: Round) -> Ticks[str | None]:  # type: ignore[override]  # its driver takes ticks
        """Resend, if this worker is ahead."""
        self.substep = 0
        if round.task.resend_from_log:
            yield from self.stay(Mode.RESEND, self._resend)
        else:
            self.mode = Mode.EQUAL
        return self._outcome()

    def _outcome(self) -> str | None:
        """Of an exchange with others."""
        if self.failure is not None:
            raise self.failure
        return None if self.mode == Mode.EQUAL else "the network broke"

    def close(self) -> Ticks[None]:  # type: ignore[override]  # its driver takes ticks
        """Stay until the last checkpoint is committed."""
        while True:
            if self.act_in_background():
                yield Pending.ACTED
            elif self._committed >= (self.view.checkpoints.owed or 0) or self.view.phase == Phase.ENDED:
                return
            else:
                yield Pending.IDLE  # until a deadline

    @property
    def _committed(self) -> int:
        return self.view.checkpoints.committed or 0

    def finish(self) -> None:
        """The log is complete."""
        self.flush()

    # -------------------------------------------------------------------------------- exchanges with others

    def _due_transfer(self) -> Transfer | None:
        """The next transfer of the plan in which this worker takes part; None if there is none any more."""
        assert self.plan is not None
        transfers = self.plan.transfers
        while self._next_transfer < len(transfers) and self.rank not in transfers[self._next_transfer].ranks:
            self._next_transfer += 1
        return transfers[self._next_transfer] if self._next_transfer < len(transfers) else None

    def _resend(self, state: State) -> bool:
        """One iteration ahead: send the interrupted iteration again from this worker's own log."""
        assert self.plan is not None
        iteration, tasks = self.plan.resume, self.plan.tasks
        behind = [peer for peer in self.neighbours() if not tasks[peer].resend_from_log]
        if self.substep == 0 and behind:
            self._resend_to(behind, iteration, state)
            return True
        for peer in behind:
            mail = self._recv(peer, iteration)
            if mail is None:
                return self.mode == Mode.CONFIRM
            self._check_repeated(peer, iteration, mail)
        self.mode = Mode.EQUAL
        self.world.seen["resent from log"] += 1
        return True

    def _resend_to(self, behind: list[int], iteration: int, state: State) -> None:
        for peer in behind:
            own = self.sent_to(peer, iteration)
            if isinstance(own, str):
                if own == "missing" and not self._outdated(state):
                    raise Violation(f"{self} has to resend iteration {iteration} to rank {peer}: {own}")
                self._abort_replay(f"its own log is {own}")
                self.mode = Mode.RECOVER
                return
            if not self._send(peer, iteration, own.chain, own.history):
                return
        self.substep = 1

    def _check_repeated(self, peer: int, iteration: int, mail: tuple[int, int]) -> None:
        """A worker that resends receives again what it received before."""
        own = self.world.store.read_log(self.rank, iteration, self.log_since)
        if not isinstance(own, str) and mail != (own.chain, own.history):
            raise Violation(f"{self} resends, and rank {peer} sends other bytes than before")

    # ---------------------------------------------------------------------------------- without a session

    def _without_session(self) -> Flow[None]:
        while True:
            yield lambda: self.stay(Mode.SESSIONLESS, self._run_without_session)

    def _run_without_session(self, _: State) -> bool:
        """A plain script: it works while all workers are there, and fails when one is not."""
        group = self.world.group(-self.started_in)
        group.joined.add(self.rank)
        self.joining_generation = -self.started_in
        if len(group.joined) < self.size:
            return False
        iterations = self.world.settings.iterations
        if group.broken or (group.gone and self._iterations_without_session < iterations):
            self.exit(1)
            return True
        self._iterations_without_session += 1
        if self._iterations_without_session >= iterations:
            self.joining_generation = None  # it needs no other worker any more
            self.exit(0)
        return True
