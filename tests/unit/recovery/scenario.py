"""Scenarios of the recovery protocol as text: events, and what everybody has to do after them.

One line each, words as in a shell, ``#`` begins a comment. ``R`` is a rank, a list (``0,2``) or ``all``;
``M`` is a machine. An event is of the current generation (epoch, launch), unless ``gen=`` (``epoch=``,
``launched=``) says otherwise.

    open 4 [workers=2] [restarts=1] [max-failures=3] [checkpoint=20]
    join M ... [slot=1]                    lost M ["why"]                 bare M
    report R at 47 | replaying at 25 | nothing   [dirty="why"] [stages=1,5] [unknown]
                                                 [holds=model] [pipeline=1]
                                                 [updated=0,1] [undoable=0,1] [keeps-nothing]
    ready R                                cannot-replay R "why"          interrupted R "why"
    durable R at 20 [path=p]               committed 20                   want R at 22 ["why"]
    finished R                             exited M ...
    failed M "why" [code=3] [usage]        timed-out M ... ["why"] [phase=agreeing]
    closed "why" [code=130]

    expect phase live                      expect generation 2            expect epoch 1
    expect members A E - D                 expect spares F                expect committed 20 | nothing
    expect way replay | nothing            expect resume 47               expect reason "part of the text"
    expect worker R run                    expect worker R of M launched 1 die
    expect agent M launch | wait | rejoin | stop       expect agent M launched 1 launch
    expect task R idle | serve | load 20 | replay 20..47 | load 20 replay 20..47 [with 1,2]
    expect undo R 0,1 | nothing            expect transfers 0>2,3 1>0:4,5 | nothing
    expect commit-due 20 | nothing         expect missing M ...           expect log-since 4
    expect finished 0 1                    expect wanted 22 | nothing
    expect verdict ok | failed ["part of the text"] [code=1] | nothing
"""

from __future__ import annotations

import shlex
from pathlib import Path

from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.ladder import Transfer
from swift_ft.recovery.orders import agent_order, commit_due, worker_order
from swift_ft.recovery.plan import Task
from swift_ft.recovery.protocol import step

__all__ = ["Scenario", "ScenarioError"]

_NOTHING = "nothing"


class ScenarioError(AssertionError):
    """A line that does not hold, or that cannot be read."""


class _Line:
    """The words of a line: in order, and by name."""

    def __init__(self, text: str) -> None:
        lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
        lexer.whitespace_split, lexer.commenters = True, "#"
        words = list(lexer)
        self.options = dict(w.split("=", 1) for w in words if "=" in w and " " not in w.split("=", 1)[0])
        self.words = [w for w in words if w not in {f"{k}={v}" for k, v in self.options.items()}]

    def __bool__(self) -> bool:
        return bool(self.words)

    def take(self) -> str:
        if not self.words:
            raise ScenarioError("the line ends too early")
        return self.words.pop(0)

    def rest(self, default: str = "") -> str:
        words, self.words = self.words, []
        return " ".join(words) or default

    def number(self, name: str, default: int) -> int:
        return int(self.options.pop(name, default))

    def flag(self, name: str) -> bool:
        found = name in self.words
        if found:
            self.words.remove(name)
        return found

    def finish(self) -> None:
        if self.words or self.options:
            raise ScenarioError(f"not understood: {self.words} {self.options}")


class Scenario:
    """Runs the lines of a scenario.

    Attributes:
        state: after the lines so far.
        expectations: lines that expected something.
    """

    def __init__(self) -> None:
        self.state = State()
        self.expectations = 0

    def run(self, path: Path) -> None:
        """Run a file.

        Raises:
            ScenarioError: naming the line.
        """
        for number, text in enumerate(path.read_text().splitlines(), 1):
            try:
                self.line(text)
            except Exception as error:
                raise ScenarioError(f"{path.name}:{number}: {text.strip()}\n  {error}") from error

    def line(self, text: str) -> None:
        """Run one line."""
        line = _Line(text)
        if not line:
            return
        name = line.take().replace("-", "_")
        if name == "expect":
            self.expectations += 1
            what = line.take()
            getattr(self, f"_expect_{what.replace('-', '_')}")(line)
        else:
            for event in getattr(self, f"_{name}")(line):
                self.state = step(self.state, event)
        line.finish()

    # -------------------------------------------------------------------------------------------- events

    def _open(self, line: _Line) -> list[ev.Event]:
        machines = int(line.take())
        limit, checkpoint = line.options.pop("max-failures", None), line.options.pop("checkpoint", None)
        return [
            ev.Opened(
                machines,
                line.number("workers", 1),
                line.number("restarts", 0),
                None if limit is None else int(limit),
                None if checkpoint is None else int(checkpoint),
            )
        ]

    def _join(self, line: _Line) -> list[ev.Event]:
        slot = line.options.pop("slot", None)
        preferred = None if slot is None else int(slot)
        return [ev.Joined(m, preferred, f"{m}:1") for m in line.rest().split()]

    def _lost(self, line: _Line) -> list[ev.Event]:
        reporter = line.options.pop("by", "")
        return [ev.Lost(line.take(), line.rest("was killed"), reporter)]

    def _bare(self, line: _Line) -> list[ev.Event]:
        return [ev.Bare(line.take(), self._generation(line))]

    def _report(self, line: _Line) -> list[ev.Event]:
        ranks, generation = self._ranks(line.take()), self._generation(line)
        dirty, known = line.options.pop("dirty", None), not line.flag("unknown")
        stages, holds = _numbers(line.options.pop("stages", None)), line.options.pop("holds", None)
        updated = _numbers(line.options.pop("updated", None)) or ()
        undoable = _numbers(line.options.pop("undoable", None)) or ()
        pipeline = line.number("pipeline", 0)
        live, serves = not line.flag("replaying"), not line.flag("keeps-nothing")
        word = line.take()
        at = None if word == _NOTHING else int(line.take())
        live, parts = at is not None and live, () if holds is None else (holds,)
        return [
            ev.Reported(
                r,
                generation,
                at,
                live,
                stages or (() if parts else (r,)),
                known,
                dirty,
                parts,
                pipeline,
                undoable,
                updated,
                serves,
            )
            for r in ranks
        ]

    def _ready(self, line: _Line) -> list[ev.Event]:
        generation = self._generation(line)
        return [ev.Ready(r, generation) for r in self._ranks(line.take())]

    def _cannot_replay(self, line: _Line) -> list[ev.Event]:
        generation, rank = self._generation(line), int(line.take())
        return [ev.CannotReplay(rank, generation, line.rest("its log is torn"))]

    def _interrupted(self, line: _Line) -> list[ev.Event]:
        generation, rank = self._generation(line), int(line.take())
        return [ev.Interrupted(rank, generation, line.rest("connection reset"))]

    def _durable(self, line: _Line) -> list[ev.Event]:
        ranks, epoch = self._ranks(line.take()), line.number("epoch", self.state.epoch)
        generation, path = self._generation(line), line.options.pop("path", "part")
        self._word(line, "at")
        iteration = int(line.take())
        return [ev.Durable(r, iteration, epoch, generation, path) for r in ranks]

    def _committed(self, line: _Line) -> list[ev.Event]:
        return [ev.Committed(int(line.take()), line.number("epoch", self.state.epoch))]

    def _want(self, line: _Line) -> list[ev.Event]:
        rank, generation = int(line.take()), self._generation(line)
        self._word(line, "at")
        return [ev.CheckpointWanted(rank, int(line.take()), generation, line.rest("its log is nearly full"))]

    def _finished(self, line: _Line) -> list[ev.Event]:
        generation = self._generation(line)
        return [ev.Finished(r, generation) for r in self._ranks(line.take())]

    def _exited(self, line: _Line) -> list[ev.Event]:
        launched = line.options.pop("launched", None)
        return [
            ev.Exited(m, self._launched(m) if launched is None else int(launched))
            for m in line.rest().split()
        ]

    def _failed(self, line: _Line) -> list[ev.Event]:
        machine, code, usage = line.take(), line.number("code", 1), line.flag("usage")
        launched = line.number("launched", self._launched(machine))
        return [ev.Failed(machine, launched, line.rest("ValueError"), code, usage)]

    def _timed_out(self, line: _Line) -> list[ev.Event]:
        generation, phase = self._generation(line), line.options.pop("phase", self.state.phase.value)
        machines = tuple(w for w in line.words if " " not in w)
        why = [w for w in line.words if " " in w]
        line.words = []
        return [ev.TimedOut(generation, phase, machines, why[0] if why else "no answer")]

    def _closed(self, line: _Line) -> list[ev.Event]:
        code = line.number("code", 1)
        return [ev.Closed(line.rest("Ctrl-C"), code)]

    # -------------------------------------------------------------------------------------- expectations

    def _expect_phase(self, line: _Line) -> None:
        self._same(self.state.phase, Phase(line.take()))

    def _expect_generation(self, line: _Line) -> None:
        self._same(self.state.generation, int(line.take()))

    def _expect_epoch(self, line: _Line) -> None:
        self._same(self.state.epoch, int(line.take()))

    def _expect_log_since(self, line: _Line) -> None:
        self._same(self.state.log_since, int(line.take()))

    def _expect_members(self, line: _Line) -> None:
        self._same([m or "-" for m in self.state.members], line.rest().split())

    def _expect_spares(self, line: _Line) -> None:
        self._same([m for m, _ in self.state.spares], line.rest().split())

    def _expect_missing(self, line: _Line) -> None:
        self._same(list(self.state.missing()), line.rest().split())

    def _expect_finished(self, line: _Line) -> None:
        self._same(sorted(self.state.finished), [int(rank) for rank in line.rest().split()])

    def _expect_committed(self, line: _Line) -> None:
        self._same(self.state.committed, _number(line.take()))

    def _expect_wanted(self, line: _Line) -> None:
        self._same(self.state.wanted, _number(line.take()))

    def _expect_commit_due(self, line: _Line) -> None:
        self._same(commit_due(self.state, 0), _number(line.take()))

    def _expect_way(self, line: _Line) -> None:
        self._same(self.state.plan.way.value if self.state.plan else _NOTHING, line.take())

    def _expect_resume(self, line: _Line) -> None:
        self._same(self.state.plan and self.state.plan.resume, int(line.take()))

    def _expect_reason(self, line: _Line) -> None:
        reason, wanted = self.state.plan.reason if self.state.plan else None, line.rest()
        if reason is None or (wanted not in reason if wanted else reason):
            raise ScenarioError(f"the reason is {reason!r}")

    def _expect_worker(self, line: _Line) -> None:
        ranks, machine, launched = self._ranks(line.take()), None, None
        if line.flag("of"):
            machine = line.take()
        if line.flag("launched"):
            launched = int(line.take())
        wanted = line.take()
        for rank in ranks:
            member = machine or self.state.members[rank // self.state.workers] or "-"
            at = self._launched(member) if launched is None else launched
            self._same(worker_order(self.state, machine=member, rank=rank, launched=at).value, wanted)

    def _expect_agent(self, line: _Line) -> None:
        machine, launched = line.take(), None
        if line.flag("launched"):
            launched = int(line.take())
        wanted = line.take()
        self._same(agent_order(self.state, machine=machine, launched=launched).todo.value, wanted)

    def _expect_task(self, line: _Line) -> None:
        ranks, load, span, serve, idle = self._ranks(line.take()), None, None, False, False
        portion: tuple[int, ...] | None = ()
        while line:
            match line.take():
                case "load":
                    load = int(line.take())
                case "replay":
                    span = tuple(map(int, line.take().split("..")))
                case "with":
                    portion = _numbers(line.take())
                case "serve":
                    serve = True
                case "idle":
                    idle = True
                case other:
                    raise ScenarioError(f"no such task: {other}")
        assert self.state.plan is not None
        for rank in ranks:
            task = self.state.plan.tasks[rank]
            self._same((task.load, _span(task), task.serve, task.portion), (load, span, serve, portion))
            if idle:
                self._same(task.idle, True)

    def _expect_undo(self, line: _Line) -> None:
        ranks, word = self._ranks(line.take()), line.take()
        assert self.state.plan is not None
        for rank in ranks:
            self._same(self.state.plan.tasks[rank].undo, () if word == _NOTHING else _numbers(word))

    def _expect_transfers(self, line: _Line) -> None:
        """``0>2,3`` is a whole state; ``1>0:4,5`` are two parameters."""
        assert self.state.plan is not None
        words = line.rest().split()
        self._same([_route(t) for t in self.state.plan.transfers], [w for w in words if w != _NOTHING])

    def _expect_verdict(self, line: _Line) -> None:
        word, code = line.take(), line.options.pop("code", None)
        verdict = self.state.verdict
        if word == _NOTHING:
            self._same(verdict, None)
            return
        assert verdict is not None, "there is no verdict"
        self._same(verdict.ok, word == "ok")
        if (wanted := line.rest()) not in verdict.reason:
            raise ScenarioError(f"the verdict is {verdict.reason!r}, without {wanted!r}")
        if code is not None:
            self._same(verdict.exit_code, int(code))

    # -------------------------------------------------------------------------------------------- words

    def _ranks(self, word: str) -> list[int]:
        return list(range(self.state.world)) if word == "all" else [int(r) for r in word.split(",")]

    def _generation(self, line: _Line) -> int:
        return line.number("gen", self.state.generation)

    def _launched(self, machine: str) -> int:
        slot = self.state.slot_of(machine)
        return -1 if slot is None else self.state.launched[slot]

    def _word(self, line: _Line, wanted: str) -> None:
        if (word := line.take()) != wanted:
            raise ScenarioError(f"{word!r} instead of {wanted!r}")

    def _same(self, found: object, wanted: object) -> None:
        if found != wanted:
            raise ScenarioError(f"found {found!r}, expected {wanted!r}")


def _number(word: str) -> int | None:
    return None if word == _NOTHING else int(word)


def _numbers(word: str | None) -> tuple[int, ...] | None:
    return None if word is None else tuple(map(int, word.split(",")))


def _route(transfer: Transfer) -> str:
    targets = ",".join(map(str, transfer.targets))
    parameters = "" if transfer.parameters is None else ":" + ",".join(map(str, transfer.parameters))
    return f"{transfer.source}>{targets}{parameters}"


def _span(task: Task) -> tuple[int, int] | None:
    return (task.begin, task.replay_until) if task.begin < task.replay_until else None
