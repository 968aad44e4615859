"""The cost of the recovery protocol for each participant of a large job: CPU seconds, by job size.

Every agent and every worker applies every event of the journal. Here one participant, a worker, goes through
the start of a job and the loss of one machine that a spare replaces: every machine joins, and every worker
reports and gets ready, twice. After each event it asks for its orders. Nothing else is counted: no
journal, no network. Each job is a hybrid of pipelines and replicas, and a single long pipeline.

``--json`` for programs, ``--record`` for a file in benchmarks/results.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.orders import commit_due, worker_order
from swift_ft.recovery.plan import RecoveryMode
from swift_ft.recovery.protocol import step

SIZES = (1024, 4096, 16384)
LIMIT_S = 2.0
STAGES = 16
COMMITTED, AT = 400, 447


@dataclass(frozen=True)
class Row:
    """One job: CPU seconds of all its events, and of those of one kind.

    Attributes:
        machines: of one worker each.
        job: what the workers compute together.
        mode: how the lost machine's state was restored.
        events: number of events.
        cpu_s: all of them.
        joins_s: of the machines that join.
        reports_s: of the status reports, with the two plans that the last of them bring.
        slowest_ms: the event that took longest, a plan.
    """

    machines: int
    job: str
    mode: str
    events: int
    cpu_s: float
    joins_s: float
    reports_s: float
    slowest_ms: float


Report = Callable[[int, int], ev.StatusReported]
"""A report by rank and generation, of a worker whose state is whole."""


def pipeline(rank: int, generation: int) -> ev.StatusReported:
    """A stage of one long pipeline."""
    return ev.StatusReported(
        rank=rank,
        generation=generation,
        iteration=AT,
        live=True,
        stages=(rank,),
        pipeline_known=True,
        holds=(f"stage {rank}",),
    )


def hybrid(rank: int, generation: int) -> ev.StatusReported:
    """A stage of one of many pipelines of 16 stages, which are replicas of each other."""
    number, stage = divmod(rank, STAGES)
    return replace(pipeline(rank, generation), stages=(stage,), holds=(f"stage {stage}",), pipeline=number)


def events_of(machines: int, report: Report) -> Iterator[ev.Event]:
    """The start of a job with one spare, and the loss of one machine in the middle of it."""
    yield ev.JobOpened(machines=machines, checkpoint=COMMITTED)
    for number in range(machines):
        yield ev.MachineJoined(machine=f"m-{number}", address=f"host-{number}:1")
    for rank in range(machines):
        yield replace(report(rank, 1), iteration=None, live=False)
    for rank in range(machines):
        yield ev.WorkerReady(rank=rank, generation=1)
    lost = machines // 2 + 3
    yield ev.MachineJoined(machine="spare", address="host:1")
    yield ev.MachineLost(machine=f"m-{lost}", reason="killed", reporter="m-0")
    for rank in range(machines):
        status = report(rank, 2)
        yield replace(status, iteration=None, live=False) if rank == lost else status
    yield ev.WorkerReady(rank=lost, generation=2)


def measure(machines: int, name: str, report: Report) -> Row:
    """Apply all events as the worker of the first machine does."""
    events = list(events_of(machines, report))
    state, spent, slowest = State(), Counter[type[ev.Event]](), 0.0
    for event in events:
        began = time.process_time()
        state = step(state, event)
        worker_order(state, machine="m-0", rank=0, started_in=1)
        commit_due(state, 0)
        took = time.process_time() - began
        spent[type(event)] += took  # type: ignore[assignment]  # a Counter may hold seconds
        slowest = max(slowest, took)
    if state.phase != Phase.LIVE or state.generation != 2 or state.plan is None:
        raise RuntimeError(f"the job is not live again, but {state.phase} in generation {state.generation}")
    return Row(
        machines=machines,
        job=name,
        mode=RecoveryMode(state.plan.mode).value,
        events=len(events),
        cpu_s=sum(spent.values()),
        joins_s=spent[ev.MachineJoined],
        reports_s=spent[ev.StatusReported],
        slowest_ms=slowest * 1e3,
    )


def main() -> int:
    """Measure every size, print, and keep."""
    parser = argument_parser(__doc__)
    parser.add_argument("--machines", type=int, nargs="+", default=list(SIZES), metavar="N")
    args = parser.parse_args()
    jobs: dict[str, Report] = {"one pipeline": pipeline, f"pipelines of {STAGES} stages": hybrid}
    rows = [measure(size, name, report) for size in args.machines for name, report in jobs.items()]
    body = f"{table(HEAD, [_cells(row) for row in rows])}\n\n{target_table(_targets(rows))}"
    return finish("protocol", body, {"rows": rows}, args)


HEAD = ("machines", "job", "recovery", "events", "all CPU s", "joins", "reports and plans", "slowest event")


def _cells(row: Row) -> list[str]:
    return [
        f"{row.machines:,}",
        row.job,
        row.mode,
        f"{row.events:,}",
        f"{row.cpu_s:.2f}",
        f"{row.joins_s:.2f}",
        f"{row.reports_s:.2f}",
        f"{row.slowest_ms:.0f} ms",
    ]


def _targets(rows: Sequence[Row]) -> list[Target]:
    largest = max(row.machines for row in rows)
    return [
        Target(
            f"all events of a start and a recovery, {row.machines:,} machines, {row.job}",
            f"<= {LIMIT_S:g} s of CPU",
            f"{row.cpu_s:.2f} s",
            row.cpu_s <= LIMIT_S,
        )
        for row in rows
        if row.machines == largest
    ]


if __name__ == "__main__":
    sys.exit(main())
