"""A simulated worker: a small version of what the executor does with the protocol's orders.

BOOT ──▶ RECOVER ──▶ (GATHER) ──▶ REPLAY, HELP ──▶ RECOVER ──▶ JOIN ──▶ RESEND ──▶ RUN ──▶ FINISHING ──▶ exit
            ▲           │           │                      │        │         │
            └─────── CONFIRM ◀──────┴──────────────────────┴────────┴─────────┘   (communication failed)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.plan import Plan
from swift_ft.recovery.reconcile import Transfer
from swift_ft.testing.simulation.connection import Mode
from swift_ft.testing.simulation.replay import ReplayingProcess
from swift_ft.testing.simulation.store import GENESIS, Content, Violation
from swift_ft.testing.simulation.world import Host, World

__all__ = ["Worker"]


class Worker(ReplayingProcess):
    """One process, with its training thread.

    Attributes:
        plan: the plan of the generation that it last joined.
        stage: the stage that it holds.
        layers: of a model that is a stack of layers; 0 for any other.
    """

    layers = 0

    def __init__(self, world: World, machine: Host, rank: int, started_in: int) -> None:
        super().__init__(world, machine, rank, started_in)
        self.mode = Mode.SESSIONLESS if world.settings.sessionless else Mode.BOOT
        self.plan: Plan | None = None
        self.stage = rank
        self._next_transfer = 0
        self._iterations_without_session = 0
        self._acts: dict[Mode, Callable[[State], bool]] = {
            Mode.BOOT: self._boot,
            Mode.RECOVER: self._recover,
            Mode.GATHER: self._gather,
            Mode.REPLAY: self._replay,
            Mode.HELP: self._help,
            Mode.JOIN: self._join,
            Mode.RESEND: self._resend,
            Mode.RUN: self._run,
            Mode.CONFIRM: self._confirm,
            Mode.FINISHING: self._finishing,
            Mode.SESSIONLESS: self._run_without_session,
        }

    def __repr__(self) -> str:
        at = self.content.iteration if self.content else None
        return (
            f"worker {self.rank} of {self.machine_name} "
            f"(started in {self.started_in}, {self.mode.name}, at {at})"
        )

    def act(self) -> bool:
        """Take one small step. False if there was nothing to do."""
        if self.unanswered:
            return False
        if not self.read(max(self.position, self.answered_at)):
            return True
        background = self.saves or self.commits or self.cleanups
        if background and self.world.rng.random() < self.world.settings.background_rate:
            return self.act_in_background()
        return self._acts[self.mode](self.view)

    # ----------------------------------------------------------------------------------------- recovery

    def _boot(self, _: State) -> bool:
        """Import, build the model, claim the store (worker 0 decides for all)."""
        if self.rank == 0:
            self.world.claimed = True
            if not self._report_earlier_run():
                return True
        elif not self.world.claimed:
            return False
        self.mode = Mode.RECOVER
        return True

    def _report_earlier_run(self) -> bool:
        """Worker 0 reports the checkpoints that it found in the store. False if that ends the process."""
        found = self.world.settings.resume
        return not found or self.append(
            ev.CheckpointCommitted(
                iteration=found[-1], epoch=0, keep=self.world.settings.keep, earlier=found[:-1]
            )
        )

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
        live = self.content is not None and not self.replaying
        self.flush()
        self.replaying = False
        at = None if self.content is None else self.content.iteration
        stages, known = (self.rank,), self.world.shapes_known
        status = ev.StatusReported(
            rank=self.rank,
            generation=state.generation,
            iteration=at,
            live=live,
            stages=stages,
            pipeline_known=known,
            dirty=self.dirty,
            log_gap_before=self.log_gap_before,
            layers=self.layers,
        )
        self.append(
            replace(status, can_resend=self.can_resend(), max_replay_shards=self.world.max_replay_shards)
        )

    # --------------------------------------------------------------------------------------------- live

    def _prepare(self, state: State) -> None:
        """The order is to run: open the log and begin to form the group."""
        assert state.plan is not None
        plan = state.plan
        if self.content is None:
            self.content = GENESIS  # the script's own initial state
        if self.content.iteration != plan.resume + plan.tasks[self.rank].resend_from_log:
            raise Violation(f"{self} goes live in a generation that resumes at {plan.resume}")
        self._enter(state, plan)

    def _enter(self, state: State, plan: Plan) -> None:
        """Begin to form the group of a generation."""
        self._open_log(state)
        self.plan, self.history = plan, self._history_of(state)
        self.joining_generation, self.substep, self.mode = state.generation, 0, Mode.JOIN
        self.expected_order = WorkerOrder.RUN

    def _join(self, state: State) -> bool:
        """Form the group, together with all other workers. An abort ends the wait for them."""
        generation = self.joining_generation
        assert generation is not None
        assert self.plan is not None
        group = self.world.group(generation)
        if self.rank not in group.joined:
            if self._is_to_leave(state, generation):
                self.detach_from_group()
                self.mode = Mode.RECOVER
                return True
            group.joined.add(self.rank)
            return True
        if len(group.joined) < state.world_size and not group.gone and not group.broken:
            if not self._is_to_leave(state, generation):
                return False  # until the generation is over, or a deadline
            self.leave_group()
            self.mode = Mode.RECOVER
            return True
        self.active_generation, self.joining_generation = generation, None
        if len(group.joined) < state.world_size or group.gone or group.broken:
            self.fail_communication()
            return True
        if self.generation_over(state):
            self.leave_group()
            self.mode = Mode.RECOVER
            return True
        self.world.check_formed(generation, self.plan)
        self.world.shapes_known = True
        self._formed(state)
        return True

    def _is_to_leave(self, state: State, generation: int) -> bool:
        """Whether the group that it is about to form, or forms, is not needed any more."""
        return state.generation != generation or self.order(state) != WorkerOrder.RUN

    def _formed(self, state: State) -> None:
        """The group is formed: workers that are ahead resend, all others train."""
        assert self.plan is not None
        if self.plan.tasks[self.rank].resend_from_log:
            self.mode = Mode.RESEND
        else:
            self.mode = Mode.RUN
            self._save_what_it_begins_with(state)

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
        self.substep, self.mode = 0, Mode.RUN
        self.world.seen["resent from log"] += 1
        return True

    def _resend_to(self, behind: list[int], iteration: int, state: State) -> None:
        for peer in behind:
            own = self.sent_to(peer, iteration)
            if isinstance(own, str):
                if own == "missing" and not self._outdated(state):
                    raise Violation(f"{self} has to resend iteration {iteration} to rank {peer}: {own}")
                generation = self.active_generation
                assert generation is not None
                self.leave_group()
                self._fail_replay(generation, f"its own log is {own}")
                return
            if not self._send(peer, iteration, own.chain, own.history):
                return
        self.substep = 1

    def _check_repeated(self, peer: int, iteration: int, mail: tuple[int, int]) -> None:
        """A worker that resends receives again what it received before."""
        own = self.world.store.read_log(self.rank, iteration, self.log_since)
        if not isinstance(own, str) and mail != (own.chain, own.history):
            raise Violation(f"{self} resends, and rank {peer} sends other bytes than before")

    def _run(self, state: State) -> bool:
        """A part of one live iteration: forward, backward, the optimizer's step."""
        if self.substep == 0 and not self._continues(state):
            return True
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
                self._maybe_request_checkpoint()
                self.substep = -1
        self.substep += 1
        return True

    def _continues(self, state: State) -> bool:
        """Between two steps: whether there is another one to do in this generation."""
        assert self.content is not None
        if self.generation_over(state):
            self.leave_group()
            self.mode = Mode.RECOVER
            return False
        if self.content.iteration >= self.world.settings.iterations:
            self.flush()
            self.mode = Mode.FINISHING
            self.append(ev.WorkerFinished(rank=self.rank, generation=state.generation))
            return False
        return True

    def _finishing(self, state: State) -> bool:
        """Stay until all have completed the last iteration, and the last checkpoint is committed."""
        if not state.all_finished:
            if self.generation_over(state):
                self.leave_group()
                self.mode = Mode.RECOVER
                return True
            return False
        if self.act_in_background():
            return True
        last = self.world.settings.iterations
        regular = last % self.world.settings.checkpoint_every == 0
        if regular and (state.checkpoints.committed or 0) < last and state.phase != Phase.ENDED:
            return False  # until a deadline
        self.complete()
        return True

    def break_half_updated(self) -> bool:
        """Communication fails after the optimizer's step: the state is between two iterations."""
        if self.mode != Mode.RUN or self.substep != 4:
            return False
        assert self.content is not None
        self.content = Content(self.content.iteration, hash((self.content.chain, "half updated")))
        self.dirty = "optimizer"
        self.fail_communication()
        return True

    # ---------------------------------------------------------------------------------- without a session

    def _run_without_session(self, _: State) -> bool:
        """A plain script: it works while all workers are there, and fails when one is not."""
        group = self.world.group(-self.started_in)
        group.joined.add(self.rank)
        self.joining_generation = -self.started_in
        if len(group.joined) < self.world.world_size:
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
