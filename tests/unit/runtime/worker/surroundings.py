"""A worker's core among stand-ins that write down what is asked of them, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from immutables import Map

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Checkpoints, Layouts, PendingLayout, Phase, RecoveryRound, State
from swift_ft.recovery.orders import WorkerOrder
from swift_ft.recovery.plan import Plan, RecoveryMode, Task
from swift_ft.recovery.worlds import Change, World, Worlds
from swift_ft.runtime.worker.core import WorkerCore
from swift_ft.runtime.worker.flow import Flow, perform
from swift_ft.runtime.worker.part import Interruption, Part, Round, StepInfo
from swift_ft.runtime.worker.parts import Parts
from swift_ft.runtime.worker.ports import Judgement, Ports
from swift_ft.runtime.worker.status import WorkerStatus

RANK = 1
MANY = 1000
"""Calls: more than any check makes."""


def a_state(generation: int = 1, plan: Plan | None = None, **more: Any) -> State:
    """A live state, with ``more``: ``committed``, ``asked_in``, ``pending`` (where layers move).

    With ``next`` another world of that number is to take over (at ``pending``, if that is there), from
    ``copies`` of states after a loss, and with ``since`` the present one is the first that has done so, at
    that iteration.
    """
    pending, following = more.get("pending"), more.get("next", 0)
    copies = Map(more.get("copies", {}))
    change = Change(World(following), generation + 1, copies=copies) if following else None
    present = World(1, since=more["since"]) if "since" in more else World()
    return State(
        phase=Phase.LIVE,
        generation=generation,
        round=RecoveryRound(asked_in=more.get("asked_in", generation), plan=plan),
        checkpoints=Checkpoints(committed=more.get("committed", 0), log_since=more.get("log_since", 0)),
        layouts=Layouts(pending=PendingLayout(pending, world=following) if pending is not None else None),
        worlds=Worlds(present, change),
    )


def of_task(task: Task, mode: RecoveryMode = RecoveryMode.REPLAY, **more: Any) -> Plan:
    """A plan in which this worker has a task."""
    return Plan(mode=mode, resume=more.pop("resume", task.end), tasks={RANK: task}, **more)


class Surroundings(Part):
    """All ports and the only part of a core, as one.

    Attributes:
        said: what was asked of them, in order.
        events: what was written into the journal.
        orders: what is to be done next, and the state of that time.
        answers: what calls return, by name (``generation_over``), or the errors that they raise; a list
            is used up.
        status: of the core.
        active: the next step is a replayed one.
        when_paused: the state that the journal has come to as the parts pause; None if it has not gone on.
        when_waiting: is called as it waits for the others.
    """

    until = 0
    parts_from: int | None = None
    replayed = 0
    active = behind = joint = repeats = False

    def __init__(
        self,
        core: type[WorkerCore] = WorkerCore,
        *,
        orders: Iterable[tuple[WorkerOrder, State]] = (),
        **answers: Any,
    ) -> None:
        self.said: list[str] = []
        self.calls = 0
        self.events: list[ev.Event] = []
        self.orders = [*orders]
        self.answers = answers
        self.state = a_state()
        self.when_paused: State | None = None
        self.when_waiting: Callable[[], object] = lambda: None
        self.status = WorkerStatus()
        ports: Any = Ports(
            self, self, _Replays(self), self, _Checkpoints(self), _Hooks(self), self, verification=self
        )
        self.core = core(RANK, self.status, Parts([self]), ports)
        self.core.generation = 1

    def says(self, flow: Flow[Any]) -> list[str]:
        """What a flow asks of its surroundings. What it returns comes last, unless it is None."""
        self.said.clear()
        result = perform(flow)
        return [*self.said, *([f"-> {result}"] if result is not None else [])]

    def count(self) -> None:
        """A core with a fault may never end."""
        self.calls += 1
        assert self.calls < MANY

    def note(self, name: str, what: object = "", default: Any = None) -> Any:
        """Write down a call, and answer it."""
        self.count()
        self.said.append(f"{name} {what}".rstrip())
        answer = self.answers.get(name.rstrip("?").replace(" ", "_"), default)
        if isinstance(answer, list):
            answer = answer.pop(0) if answer else default
        if isinstance(answer, BaseException):
            raise answer
        return answer

    # ---------------------------------------------------------------------------------------- the job

    def next_order(self) -> tuple[WorkerOrder, State]:
        order, self.state = self.orders.pop(0)
        self.said.append(f"order {order}")
        return order, self.state

    def order(self, _: State) -> WorkerOrder:
        order: WorkerOrder = self.answers.get("order", WorkerOrder.EXECUTE)
        return order

    def append(self, event: ev.Event) -> State:
        self.events.append(event)
        state = "" if self.status.known else " without a state"
        self.said.append(f"append {type(event).__name__}{state}")
        return self.state

    def generation_over(self, _: State) -> bool:
        return bool(self.note("generation over?", default=False))

    def is_cancelled(self) -> bool:
        return bool(self.note("cancelled?", default=False))

    def replay_cancelled(self, asked_in: int) -> bool:
        return bool(self.note("replay cancelled?", asked_in, default=False))

    def wait_for_others(self) -> State:
        self.note("wait for others")
        self.when_waiting()
        return self.state

    def wait_for_finish(self) -> State:
        self.note("wait for finish")
        return self.state

    # ----------------------------------------------------------------------------------- the next world

    def make_ready(self) -> None:
        self.note("make ready")

    def offer(self, state: State, iteration: int) -> ev.Event:
        self.note("offer", f"{iteration} to {state.worlds.change and state.worlds.change.world.number}")
        return ev.StateOffered(
            rank=RANK, generation=state.generation, iteration=iteration, address="", digest=""
        )

    def withdraw(self) -> None:
        self.note("withdraw")

    def take(self, state: State) -> ev.Event:
        self.note("take", f"in {state.generation}, known: {self.status.known}")
        return ev.StateTaken(rank=RANK, world=state.worlds.change.world.number if state.worlds.change else 0)

    # -------------------------------------------------------------------------------------- the links

    def enter(self, generation: int) -> bool:
        return bool(self.note("enter", generation, default=True))

    def keep(self) -> None:
        self.note("keep")

    def leave(self) -> None:
        self.note("leave")

    def leave_generation(self) -> None:
        self.note("leave generation")

    def abort(self) -> None:
        self.note("abort")

    def destroy_left(self) -> None:
        self.note("destroy left")

    def on_connection_broken(self, cause: str) -> None:
        self.note("broken", cause)

    def move(self, state: State) -> bool:
        return bool(self.note("move", state.generation, default=True))

    # --------------------------------------------------------------------------------------- the part

    def begin(self, step: StepInfo) -> None:
        self.note("begin", f"{step.iteration} in {step.generation}{' again' * step.replayed}")

    def computation(self, step: StepInfo) -> int:
        number: int = self.answers.get("computation", 0)
        return number if step.repeatable else 0

    def judge(self, step: StepInfo) -> Judgement:
        judgement: Judgement = self.note("judge", step.iteration, Judgement())
        return judgement

    def again(self, step: StepInfo) -> None:
        self.note("again", step.iteration)

    def completed(self, step: StepInfo) -> None:
        self.note("completed", step.iteration)

    def boundary(self, step: StepInfo) -> None:
        self.note("boundary", f"{step.iteration} in {step.generation}")

    def why_checkpoint(self, committed: int | None) -> str:
        return str(self.answers.get("why_checkpoint", ""))

    def pause(self) -> None:
        self.note("pause")
        self.state = self.when_paused or self.state

    def interrupted(self, interruption: Interruption) -> None:
        self.note("interrupted", _words(interruption))
        self.status.dirty = self.answers.get("dirty", self.status.dirty)

    def put_back(self, interruption: Interruption) -> None:
        self.note("put back", _words(interruption))

    def settle(self, state: State) -> None:
        self.note("settle", state.generation)

    def report(self, report: ev.StatusReported) -> ev.StatusReported:
        self.note("report")
        return replace(report, holds=("the model",))

    def idle(self) -> None:
        self.note("idle")

    def open(self, state: State, begin: int) -> None:
        self.note("open", f"{begin} in {state.generation}")

    def ready(self, ready: ev.WorkerReady) -> ev.WorkerReady:
        return replace(ready, received=7)

    def prepare(self, round: Round) -> None:
        self.note("prepare", round.plan.resume)

    def join(self, round: Round) -> str | None:
        cause: str | None = self.note("join", round.rank)
        return cause

    def live(self, round: Round) -> None:
        dirty = f", {self.status.dirty}" if self.status.dirty else ""
        self.note("live", f"{round.state.generation}{dirty}")

    def finish(self) -> None:
        self.note("finish")

    def close(self) -> None:
        self.note("close")


class _Side:
    """A port of which the surroundings hold the fields, so that a check sets them there."""

    def __init__(self, around: Surroundings) -> None:
        self.__dict__["_around"] = around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._around, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._around, name, value)


class _Replays(_Side):
    def begin(self, state: State, task: Task, shared: object) -> bool:
        self._around.status.known = True
        return bool(self._around.note("replay", f"until {task.replay_until}", default=True))

    def help(self, state: State, shared: object, iteration: int) -> bool:
        return bool(self._around.note("help", iteration, default=True))

    def end(self) -> None:
        self._around.note("end replay")


class _Checkpoints:
    def __init__(self, around: Surroundings) -> None:
        self._around = around

    def load(self, state: State, task: Task) -> None:
        status = self._around.status
        self._around.note("load", f"{task.load} at {status.iteration}, known: {status.known}")

    def due(self, iteration: int) -> bool:
        return iteration in self._around.answers.get("due", ())

    def regular(self, iteration: int) -> bool:
        return iteration in self._around.answers.get("regular", ())

    def save(self, iteration: int, *, replaying: bool = False) -> None:
        early = " before all is done" if self._around.status.parts_done is not None else ""
        self._around.note("save", f"{iteration}{' in a replay' if replaying else ''}{early}")

    def leave(self, iteration: int) -> None:
        self._around.note("leave", f"{iteration}")

    def request(self, iteration: int, generation: int, reason: str) -> None:
        self._around.note("request", f"{iteration} in {generation}: {reason}")

    def failure(self, error: Exception, generation: int) -> ev.Event:
        return ev.ReplayFailed(rank=RANK, generation=generation, reason=str(error))

    def flush_notes(self) -> None:
        self._around.note("flush notes")


class _Hooks(_Side):
    def check(self) -> None:
        self._around.note("check")

    def due(self, iteration: int) -> int:
        self._around.count()
        return int(self._around.answers.get("hooks", {}).get(iteration, 0))

    def do(self, iteration: int, position: int, generation: int) -> str | None:
        cause: str | None = self._around.note("do", f"{position} after {iteration} in {generation}")
        return cause

    def take_over(self, iteration: int, until: int, *, begin: int = 0) -> None:
        self._around.note("take over", f"{begin}..{until} after {iteration}")


def _words(interruption: Interruption) -> str:
    caught = ", caught" if interruption.caught else ""
    return f"{'in' if interruption.in_step else 'between'}{caught}"
