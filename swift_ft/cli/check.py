"""The table of ``swift-run --check``: what is protected and how, what a loss costs, and what to change."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.observe.checked import CheckedWorker, CheckFolder, PartFacts
from swift_ft.units import counted, format_bytes, format_seconds, named

_WIDTH = 100
_SHOWN_S = 0.01
_ONE_HOST = ("1", "1:1")
_MACHINES = 2
"""The machines of a check without a number: a single one has no other to get its state from."""

_LARGE = {
    "replication": "from a replica",
    "logging": "replayed from the log",
    "memory": "from another machine's memory",
    "checkpoint": "from the last checkpoint",
}
"""The source of a lost worker's weights, by the protection of its machine."""

_UNPROTECTED = ("batches_of_iterator", "snapshots_off", "no_replay_possible", "copies_in_their_domain")
"""Events of a log that tell of something unprotected. Each line has its remedy in it, or in the table."""

_PAGES = "docs/support.md has a page for each kind of training"


@dataclass(frozen=True, slots=True)
class Unprotected:
    """Something that is not protected.

    Attributes:
        what: and why.
        remedy: what to change; empty where the line itself says so.
    """

    what: str
    remedy: str


class Checked:
    """The outcome of a check.

    Args:
        workers: what each of them has said; none where the script came to no iteration.
        sessions: workers whose scripts have made a session.
    """

    def __init__(self, workers: Sequence[CheckedWorker], *, sessions: int) -> None:
        self._workers = workers
        self._sessions = sessions
        self._count = workers[0].world_size if workers else 0
        forecasts = [worker.forecast for worker in workers if worker.forecast is not None]
        self._machines: list[Mapping[str, Any]] = list(forecasts[0]["machines"]) if forecasts else []
        self._script: list[Mapping[str, Any]] = list(forecasts[0]["script"]) if forecasts else []

    @property
    def complete(self) -> bool:
        """Whether all workers have said what they are."""
        return 0 < len(self._workers) == self._count

    @property
    def has_session(self) -> bool:
        """Whether a script has made one."""
        return self._sessions > 0

    @property
    def refused(self) -> str:
        """The reason why every run refuses it, and a check cannot, which has another store; else empty."""
        stores = sorted({worker.store for worker in self._workers})
        if len(stores) < 2:
            return ""
        return (
            f"The workers name {len(stores)} stores, such as {stores[0]} and {stores[1]}: give all workers "
            "one store, which each machine reaches, in Session(store=...)."
        )

    def findings(self) -> list[Unprotected]:
        """All that is not protected."""
        return [*self._of_script(), *self._of_machines(), *self._of_data(), *self._of_values(), *self._told()]

    def _of_script(self) -> Iterator[Unprotected]:
        if not self.has_session:
            yield Unprotected(
                "Nothing is protected: the script makes no swift_ft.Session. After the loss of any machine "
                "all processes start again, as under torchrun, and what the script has not saved is lost.",
                f"Put a session around the loop: docs/tutorial.md shows the lines, {_PAGES}.",
            )
        elif not self.complete:
            yield Unprotected(
                "The script makes a session, and ended before all workers had completed an iteration in "
                "session.steps(): how it is protected is not known.",
                "Write `for step in session.steps(iterations):` and, in it, `with step:` around the body.",
            )

    def _of_machines(self) -> Iterator[Unprotected]:
        lost = [machine for machine in self._machines if machine["protection"] == "checkpoint"]
        if not lost:
            return
        every, reasons = self._workers[0].checkpoint_every, sorted({machine["why"] for machine in lost})
        if len(self._machines) == 1:
            remedy = "Check with more machines: --machines 2. A single one has none to get its state from."
        else:
            remedy = (
                "Session(snapshot_every=10) keeps a copy of each worker's state in another machine's memory."
            )
        yield Unprotected(
            f"Up to {counted(every, 'iteration')} of all workers, if {named('machine', _slots(lost))} "
            f"{'is' if len(lost) == 1 else 'are'} lost: {'; '.join(reasons)}.",
            remedy,
        )

    def _of_data(self) -> Iterator[Unprotected]:
        if any(event == "batches_of_iterator" for worker in self._workers for event, _ in worker.said):
            return  # the session knows more of it
        blind = [worker for worker in self._workers if not worker.asks_index and worker.loader_goes_on]
        if ranks := [worker.rank for worker in blind if not worker.keeps_position]:
            yield Unprotected(
                f"The position in the data of {named('worker', ranks)}: a DataLoader is iterated, the script "
                "does not ask for step.index, and no part of Session(state) keeps a position. A replacement "
                "would begin with the first batch again, and a repeated step would get another one.",
                "Look batches up, as in `x, y = batches[step.index]`: swift_ft.data.LoaderBatches(loader) "
                "makes that of a DataLoader (docs/how-to/global-batches.md).",
            )

    def _of_values(self) -> Iterator[Unprotected]:
        for name, ranks in _grouped_by_line((name, w.rank) for w in self._workers for name in w.too_large):
            yield Unprotected(
                f"{name} changes in place in a step, and is too large to be put back when the step is "
                f"repeated ({_ranks(ranks, self._count)}).",
                "Give the step a new tensor or array, keep it in a module of Session(state), or compute it "
                "from step.index.",
            )

    def _told(self) -> Iterator[Unprotected]:
        for line, _ in self._lines(unprotected=True):
            yield Unprotected(line, "")

    def _lines(self, *, unprotected: bool) -> list[tuple[str, list[int]]]:
        """The lines that the session has logged, and the workers that did."""
        return _grouped_by_line(
            (line, worker.rank)
            for worker in self._workers
            for event, line in worker.said
            if (event in _UNPROTECTED) == unprotected
        )

    def advice(self) -> list[str]:
        """Changes that may be worth it although all is protected."""
        found = []
        plain = sorted({part.name for w in self._workers for part in w.parts if _is_plain(part)})
        if plain and any(machine["protection"] == "replication" for machine in self._machines):
            found.append(
                f"swift_ft.wrap_optimizer({plain[0]}): without it, a loss at a moment in which all survivors "
                "have updated some of their parameters leads back to the last checkpoint."
            )
        if any(worker.asks_index and worker.loader_goes_on for worker in self._workers):
            found.append(
                "An iterator of a DataLoader goes on from step to step: where the batches of the training "
                "come from it, and not by step.index, a repeated step would get another batch: it is refused."
            )
        return found

    # ------------------------------------------------------------------------------------------ the text

    def __str__(self) -> str:
        """For people, in lines of 100 characters."""
        findings = self.findings()
        sections = [self._parts(), self._ways(), self._losses(), self._habits()]
        sections.append(
            _listed(
                "Not protected",
                [f"{f.what} {f.remedy and f'TO CHANGE: {f.remedy}'}".rstrip() for f in findings],
            )
        )
        sections.append(_listed("May be better", self.advice()))
        return "\n\n".join(section for section in sections if section)

    def _parts(self) -> str:
        if not self._workers:
            return ""
        of = {m["machine"]: m["protection"] for m in self._machines}
        ranks: dict[tuple[PartFacts, str], list[int]] = {}
        for worker in self._workers:
            for part in worker.parts:
                ranks.setdefault((part, of.get(worker.machine, "")), []).append(worker.rank)
        rows = [
            (
                part.name,
                part.kind,
                part.made_of,
                format_bytes(part.nbytes) if part.nbytes else "",
                "all" if len(on) == self._count else ", ".join(map(str, on)),
                _comes_back(part, way),
            )
            for (part, way), on in ranks.items()
        ]
        names = list(dict.fromkeys(row[0] for row in rows))
        rows.sort(key=lambda row: names.index(row[0]))
        return _table(
            "What is protected", ("part", "is", "class", "size", "workers", "a lost one comes"), rows
        )

    def _ways(self) -> str:
        if not self._workers:
            return ""
        rows = []
        for way, texts in (
            ("pipeline", [(w.pipeline, w.rank) for w in self._workers]),
            ("replicas", [(f"{w.replicas} of the model", w.rank) for w in self._workers if w.replicas > 1]),
            ("shards", [(w.shards, w.rank) for w in self._workers]),
        ):
            rows += [(way, text, _ranks(on, self._count)) for text, on in _grouped_by_line(texts) if text]
        first = self._workers[0]
        memory = f"every {counted(first.snapshot_every, 'iteration')}" if first.snapshot_every else "none"
        rows.append(("memory checkpoints", memory, ""))
        rows.append(
            ("checkpoints", f"every {counted(first.checkpoint_every, 'iteration')}, in the store", "")
        )
        rows += [("between steps", name, "") for name in first.between]
        rows += [
            ("the script's group", f"of {named('worker', group['members'])}: {group['way']}", group["why"])
            for group in self._script
        ]
        return _table("What protects it", ("by", "", "on"), rows)

    def _losses(self) -> str:
        if not self._machines:
            return ""
        rows = [
            (str(machine["machine"]), machine["protection"], self._cost(machine), machine["why"])
            for machine in self._machines
        ]
        steps = [worker.step_s for worker in self._workers if worker.step_s is not None]
        took = f" (an iteration took {format_seconds(max(steps))})" if steps else ""
        return _table(
            f"What the loss of a machine costs{took}",
            ("machine", "is recovered by", "at most", "because"),
            rows,
        )

    def _cost(self, machine: Mapping[str, Any]) -> str:
        first, way, again_s = self._workers[0], machine["protection"], machine["again_s"]
        if way == "replication":
            moved_s = machine["transfer_s"] or 0.0
            receive = f", and {format_seconds(moved_s)} to receive the state" if moved_s >= _SHOWN_S else ""
            return f"the iteration in flight{receive}"
        # The forecast is for a loss in the middle between two checkpoints, or two copies.
        span = f" ({format_seconds(2 * again_s)})" if again_s is not None else ""
        if way == "logging":
            replayed = counted(first.checkpoint_every, "iteration")
            return f"the iteration in flight; the lost part replays {replayed}{span}"
        back = first.snapshot_every if way == "memory" else first.checkpoint_every
        return f"{counted(back or 0, 'iteration')} of all machines{span}"

    def _habits(self) -> str:
        lines = [f"{line} ({_ranks(on, self._count)})" for line, on in self._lines(unprotected=False)]
        return _listed("What the script does (docs/step.md says what a step may do)", lines)

    def last_lines(self) -> str:
        """The outcome, and the files that stay."""
        text = "What the script itself has written, sent or printed stays."
        if self._workers:
            done = counted(min(worker.iterations for worker in self._workers), "iteration")
            text = (
                f"A temporary folder stood in for the store {self._workers[0].store} in {done}, and is "
                f"deleted: whether all machines reach that store, and may write there, was not tried. {text}"
            )
        count = len(self.findings())
        verdict = f"Not protected: {counted(count, 'thing')}." if count else "All is protected."
        return f"{fill(text, _WIDTH, break_on_hyphens=False)}\n{verdict}"


def _is_plain(part: PartFacts) -> bool:
    return part.kind == "optimizer" and not part.undoable


def _comes_back(part: PartFacts, way: str) -> str:
    back = _LARGE.get(way, "")
    if part.kind == "weights":
        return back
    if part.kind == "optimizer":
        return f"{back}; a step can be undone" if part.undoable else back
    return f"{back}; put back when a step is repeated"


def _slots(machines: Iterable[Mapping[str, Any]]) -> list[int]:
    return [machine["machine"] for machine in machines]


def _grouped_by_line(lines: Iterable[tuple[str, int]]) -> list[tuple[str, list[int]]]:
    """Lines, and the ranks that have each."""
    found: dict[str, list[int]] = {}
    for line, rank in lines:
        found.setdefault(line, []).append(rank)
    return [*found.items()]


def _ranks(ranks: Sequence[int], count: int) -> str:
    return "all workers" if len(ranks) == count else named("worker", ranks)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join([title, *lines])


def _listed(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return "\n".join(
        [
            title,
            *(
                fill(line, _WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False)
                for line in lines
            ),
        ]
    )


def adjust(args: argparse.Namespace) -> None:
    """Make a check of what the user wants to run: on this host, undisturbed, and without a word.

    Args:
        args: of ``swift-run``; changed.

    Raises:
        UsageError: that cannot be checked.
    """
    on_one_host = args.nnodes in _ONE_HOST
    if not (on_one_host or args.standalone):
        raise UsageError(
            f"--check runs all machines as processes of this host: give --machines N in place of --nnodes "
            f"{args.nnodes}."
        )
    if args.no_python:
        raise UsageError("--check looks into a script of Python: leave out --no-python.")
    if on_one_host and args.machines is None and args.nproc_per_node == "1":
        args.machines = _MACHINES
    args.standalone, args.quiet, args.no_replacement = True, True, True
    args.spares = args.max_restarts = 0
    args.rdzv_backend, args.rdzv_endpoint = "static", ""


class CheckRun:
    """The temporary folder of a check, while it runs. Use it in a ``with`` statement.

    Attributes:
        path: the folder.
    """

    def __enter__(self) -> CheckRun:
        """Make the folder."""
        # Not a TemporaryDirectory: a worker, which is forked from here, would delete it at its end.
        self.path = tempfile.mkdtemp(prefix="swift-check-")
        return self

    def __exit__(self, *_: object) -> None:
        """Delete it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def logs(self) -> str:
        """The folder for the output of workers."""
        return str(CheckFolder(self.path).logs)

    def conclude(self, code: int) -> tuple[str, int]:
        """The text to print, and the exit code.

        Args:
            code: with which the run has ended.
        """
        folder = CheckFolder(self.path)
        checked = Checked(folder.read(), sessions=folder.sessions)
        if code == 0 and checked.refused:
            return f"swift-run: {checked.refused}", 2
        # A refusal, or a script that fails: its line says why, and there is nothing to show.
        if code and (checked.has_session or code != 1):
            return "", code
        return f"{checked}\n\n{checked.last_lines()}", 1 if checked.findings() else code
