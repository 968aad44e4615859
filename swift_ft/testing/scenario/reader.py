"""Runs a scenario line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from swift_ft.recovery import events as ev
from swift_ft.recovery.audit_orders import logs_needed_since, next_act, next_audit
from swift_ft.recovery.guests import guests_wanted
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import (
    agent_order,
    commit_due,
    leaves_after_checkpoint,
    saves_again,
    worker_order,
)
from swift_ft.recovery.plan import Plan, Task
from swift_ft.recovery.protocol import step
from swift_ft.recovery.reconcile import Transfer
from swift_ft.recovery.regrowth import growth_of
from swift_ft.recovery.requests import slots_to_ask
from swift_ft.recovery.survivors import answer_of
from swift_ft.recovery.worlds import next_todo
from swift_ft.testing.scenario.events import read_events
from swift_ft.testing.scenario.line import (
    NOTHING,
    Line,
    ScenarioError,
    next_ranks_of,
    number_or_none,
    numbers,
    ranks_of,
    started_in_of,
)


class Scenario:
    """Runs the lines of a scenario; the package's docstring lists them.

    Attributes:
        state: after the lines so far.
        expectations: how many lines expected something.
    """

    def __init__(self) -> None:
        self.state = State()
        self.expectations = 0

    def run(self, path: Path) -> None:
        """Run a file.

        Raises:
            ScenarioError: for a line that does not hold or cannot be read, with its number.
        """
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                self.run_line(text)
            except Exception as error:
                raise ScenarioError(f"{path.name}:{number}: {text.strip()}\n  {error}") from error

    def run_line(self, text: str) -> None:
        """Run one line."""
        line = Line(text)
        if not line:
            return
        name = line.take()
        if name == "expect":
            self.expectations += 1
            check(line.take(), line, self.state)
        else:
            for event in read_events(name, line, self.state):
                self.apply(event)
        line.finish()

    def apply(self, event: ev.Event) -> None:
        """Apply one event."""
        self.state = step(self.state, event)


def check(what: str, line: Line, state: State) -> None:
    """Check one expectation.

    Raises:
        ScenarioError: if it does not hold, or nothing of this name can be expected.
    """
    if what in _VALUES:
        found, read = _VALUES[what]
        _equal(found(state), read(line))
    elif what in _CHECKS:
        _CHECKS[what](line, state)
    else:
        raise ScenarioError(f"no such expectation: {what}")


def _equal(found: object, expected: object) -> None:
    if found != expected:
        raise ScenarioError(f"found {found!r}, expected {expected!r}")


def _number(line: Line) -> int:
    return int(line.take())


def _numbers(line: Line) -> list[int]:
    return [*map(int, line.rest())]


def _number_or_none(line: Line) -> int | None:
    return number_or_none(line.take())


_VALUES: dict[str, tuple[Callable[[State], object], Callable[[Line], object]]] = {
    "phase": (lambda state: state.phase, lambda line: Phase(line.take())),
    "generation": (lambda state: state.generation, _number),
    "epoch": (lambda state: state.checkpoints.epoch, _number),
    "log-since": (lambda state: state.checkpoints.log_since, _number),
    "members": (lambda state: [m or "-" for m in state.members], Line.rest),
    "spares": (lambda state: state.membership.waiting(), Line.rest),
    "missing": (lambda state: list(state.missing()), Line.rest),
    "awaiting": (lambda state: sorted(state.round.awaiting), _numbers),
    "finished": (lambda state: sorted(state.round.finished), _numbers),
    "machine-patience": (lambda state: state.machine_patience, _number),
    "patience": (lambda state: state.patience, _number),
    "injected": (lambda state: sorted(state.injected), Line.rest),
    "differed": (
        lambda state: [f"{_listed(one.ranks)}@{one.iteration}" for one in state.differed],
        Line.rest,
    ),
    "marks": (
        lambda state: [
            str(mark.until) if mark.whole else f"{mark.until}:{_listed(mark.clean)}"
            for mark in state.audits.marks
        ],
        Line.rest,
    ),
    "judged": (
        lambda state: [f"{one.wrong}:{one.slot}@{one.iteration}" for one in state.audits.judged],
        Line.rest,
    ),
    "clean": (lambda state: sorted(state.audits.clean), _numbers),
    "logs-needed": (logs_needed_since, _number_or_none),
    "committed": (lambda state: state.checkpoints.committed, _number_or_none),
    "earlier": (lambda state: list(state.checkpoints.earlier), _numbers),
    "asked": (lambda state: sorted(state.membership.requested), _numbers),
    "requested": (lambda state: state.checkpoints.requested, _number_or_none),
    "saves-again": (
        lambda state: [rank for rank in range(state.world_size) if saves_again(state, rank)],
        _numbers,
    ),
    "checkpoint-needed": (lambda state: list(leaves_after_checkpoint(state)), Line.rest),
    "commit-due": (lambda state: commit_due(state, 0), _number_or_none),
    "parts-from": (lambda state: state.plan and state.plan.parts_from, _number_or_none),
    "layout": (lambda state: list(state.layouts.current), _numbers),
    "shares": (
        lambda state: [f"{since}:{_listed(samples)}" for since, samples in state.layouts.shares],
        Line.rest,
    ),
    "slow": (
        lambda state: [f"{device}:{pace}" for device, pace in sorted(state.membership.pace.items())],
        Line.rest,
    ),
    "layers": (
        lambda state: [*map(len, (layers for _, layers in sorted(state.layouts.placed.items())))],
        _numbers,
    ),
    "new-layout": (lambda state: list((state.plan and state.plan.new_layout) or ()), _numbers),
    "stops-at": (lambda state: state.layouts.pending and state.layouts.pending.iteration, _number_or_none),
    "world": (lambda state: state.worlds.present.number, _number),
    "change": (lambda state: state.worlds.change and state.worlds.change.world.number, _number_or_none),
    "mode": (lambda state: state.plan.mode.value if state.plan else NOTHING, Line.take),
    "resume": (lambda state: state.plan and state.plan.resume, _number),
    "smaller": (lambda state: list(answer_of(state).machines), Line.rest),
    "pipelines": (lambda state: list(answer_of(state).pipelines), _numbers),
    "grows": (lambda state: _growth(state)[0], Line.rest),
    "grown-pipelines": (lambda state: _growth(state)[1], _numbers),
    "full": (lambda state: state.worlds.full and len(state.worlds.full.machines), _number_or_none),
    "to-ask": (lambda state: list(slots_to_ask(state)), _numbers),
    "guests": (
        lambda state: [f"{host}:{_listed(slots)}" for host, slots in sorted(guests_wanted(state).items())],
        lambda line: [word for word in line.rest() if word != NOTHING],
    ),
}
"""The facts that can be compared: a reader of the state, and one of the expected value, for each."""


def _growth(state: State) -> tuple[list[str], list[int]]:
    growth = growth_of(state)
    return ([], []) if growth is None else ([*growth.machines], [*growth.pipelines])


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _check_reason(line: Line, state: State) -> None:
    """An empty line expects an empty reason."""
    _check_text(line, state.plan.reason if state.plan else None)


def _check_given_up(line: Line, state: State) -> None:
    _check_text(line, state.worlds.given_up)


def _check_why_guests(line: Line, state: State) -> None:
    _check_text(line, answer_of(state).why_guests)


def _check_text(line: Line, reason: str | None) -> None:
    expected = line.text()
    if reason is None or (expected not in reason if expected else reason):
        raise ScenarioError(f"the reason is {reason!r}")


def _check_worker(line: Line, state: State) -> None:
    word, machine, started_in = line.take(), None, None
    if line.flag("next"):
        _check_next_worker(word, line, state)
        return
    ranks = ranks_of(state, word)
    if line.flag("of"):
        machine = line.take()
    if line.flag("started_in"):
        started_in = int(line.take())
    world = line.number("world", state.worlds.present.number)
    expected = line.take()
    for rank in ranks:
        member = machine or state.members[rank // state.shape.workers_per_machine] or "-"
        generation = started_in_of(state, member) if started_in is None else started_in
        order = worker_order(state, machine=member, rank=rank, started_in=generation, world=world)
        _equal(order.value, expected)


def _check_next_worker(word: str, line: Line, state: State) -> None:
    """Of the last world that was planned."""
    change, world, expected = state.worlds.change, state.worlds.planned, line.take()
    for rank in next_ranks_of(state, word):
        machine, started_in = "-", state.generation + 1
        if change is not None:
            machine = change.world.machines[rank // state.shape.workers_per_machine]
            started_in = change.started_in
        order = worker_order(state, machine=machine, rank=rank, started_in=started_in, world=world)
        _equal(order.value, expected)


def _check_next(line: Line, state: State) -> None:
    started, machine = line.option("started"), line.take()
    todo = next_todo(state.worlds, machine, None if started is None else int(started))
    _equal(todo.value, line.take())


def _check_agent(line: Line, state: State) -> None:
    machine, started_in = line.take(), None
    if line.flag("started_in"):
        started_in = int(line.take())
    expected = line.take()
    _equal(agent_order(state, machine=machine, started_in=started_in).todo.value, expected)


def _check_audit(line: Line, state: State) -> None:
    machine, words = line.take(), line.rest()
    order, found = next_audit(state, machine), [NOTHING]
    if order is not None:
        found = [str(order.slot), f"{order.interval.begin}..{order.interval.until}"]
    _equal(found, words)


def _check_act(line: Line, state: State) -> None:
    act = next_act(state, line.take())
    _equal(NOTHING if act is None else type(act).__name__, line.take())


def _check_task(line: Line, state: State) -> None:
    ranks, idle, expected = ranks_of(state, line.take()), False, dict[str, object]()
    while line:
        match line.take():
            case "load":
                expected["load"] = int(line.take())
            case "from":
                expected["from"] = int(line.take())
            case "replay":
                expected["replay"] = tuple(map(int, line.take().split("..")))
            case "with":
                expected["with"] = numbers(line.take())
            case "resend":
                expected["resend"] = True
            case "idle":
                idle = True
            case other:
                raise ScenarioError(f"no such task: {other}")
    for rank in ranks:
        task = _plan_of(state).tasks[rank]
        _equal(_describe(task), expected)
        if idle:
            _equal(task.idle, True)


def _describe(task: Task) -> dict[str, object]:
    """A task in the words of a line, without what it does not ask for."""
    words = {
        "load": task.load,
        "from": task.holder,
        "replay": (task.begin, task.replay_until) if task.begin < task.replay_until else None,
        "resend": task.resend_from_log or None,
        "with": task.replay_group or None,
    }
    return {word: value for word, value in words.items() if value is not None}


def _check_undo(line: Line, state: State) -> None:
    ranks, word = ranks_of(state, line.take()), line.take()
    for rank in ranks:
        _equal(_plan_of(state).tasks[rank].undo, () if word == NOTHING else numbers(word))


def _check_back(line: Line, state: State) -> None:
    """Workers that take back an iteration which they have completed."""
    ranks = numbers(word) if (word := line.take()) != NOTHING else ()
    _equal(tuple(rank for rank, task in sorted(_plan_of(state).tasks.items()) if task.back), ranks)


def _check_transfers(line: Line, state: State) -> None:
    """``0>2,3`` is a whole state; ``1>0:4,5`` are two parameters, and ``1>0/4,5`` two layers."""
    words = line.rest()
    _equal([_route(t) for t in _plan_of(state).transfers], [w for w in words if w != NOTHING])


def _route(transfer: Transfer) -> str:
    targets = ",".join(map(str, transfer.targets))
    parameters = "" if transfer.parameters is None else ":" + _listed(transfer.parameters)
    layers = f"/{_listed(transfer.layers)}" if transfer.layers else ""
    return f"{transfer.source}>{targets}{parameters}{layers}"


def _check_verdict(line: Line, state: State) -> None:
    word, code = line.take(), line.option("code")
    verdict = state.verdict
    if word == NOTHING:
        _equal(verdict, None)
        return
    if verdict is None:
        raise ScenarioError("there is no verdict")
    _equal(verdict.ok, word == "ok")
    if (expected := line.text()) not in verdict.reason:
        raise ScenarioError(f"the verdict is {verdict.reason!r}, without {expected!r}")
    if code is not None:
        _equal(verdict.exit_code, int(code))


def _plan_of(state: State) -> Plan:
    if state.plan is None:
        raise ScenarioError(f"there is no plan in phase {state.phase}")
    return state.plan


_CHECKS: dict[str, Callable[[Line, State], None]] = {
    "reason": _check_reason,
    "worker": _check_worker,
    "next": _check_next,
    "given-up": _check_given_up,
    "why-guests": _check_why_guests,
    "agent": _check_agent,
    "audit": _check_audit,
    "act": _check_act,
    "task": _check_task,
    "undo": _check_undo,
    "back": _check_back,
    "transfers": _check_transfers,
    "verdict": _check_verdict,
}
