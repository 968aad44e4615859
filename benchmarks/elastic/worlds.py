"""Measures changes of a running job to another world: how long nobody trains, against torchrun.

    python -m benchmarks.elastic.worlds

Three trainings of the GPT of the examples are changed by what swift-recover would ask for: replicas (a
machine's work moves to a spare; the script is loaded again), layers (4 workers, 2, and 4 again) and shards (2
workers become 3). torchrun does the same in the way that it has: all workers save a checkpoint with DCP and
end, and as many as there are to be start at once and load it.

The gap is the time between the last iteration of the old workers and the first one of the new workers that
all have completed; the pause is the gap without that iteration itself. The least number of bytes is what the
new workers need and their machines do not hold.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from examples.commands import (  # before torch: it sets how much torch logs
    EXAMPLES,
    CommandError,
    finished,
    started,
    swift_run,
    torchrun,
)

# isort: split
from gpt import Config, build_layer

from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    finish,
    of_repetitions,
    run_benchmark,
    table,
    target_table,
)
from benchmarks.peers.runs import Process, read
from swift_ft.cli.recover.change import planned, switch
from swift_ft.cli.recover.running import following
from swift_ft.cli.watch import View, Watch
from swift_ft.config.store_address import StoreAddress
from swift_ft.recovery import events as ev
from swift_ft.recovery.history import History
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.layout.stage_layers import even_layout, layers_of
from swift_ft.recovery.next_world import moved, resized, same_machines

SCRIPTS = Path(__file__).parent / "scripts"
NOTED, PLAIN_SIZES = SCRIPTS / "noted.py", SCRIPTS / "plain_sizes.py"
CONFIG = Config(width=384, microbatch_size=1)
MODEL = [f"--width={CONFIG.width}", f"--microbatch-size={CONFIG.microbatch_size}"]
NEVER, WARM_UP, COUNTED = 1_000_000, 4, 12
AT_MOST_S, OF_LOOPBACK, FASTER, STEP = 0.5, 0.7, 20.0, 1.05
SENT = 512 * 2**20
WITHIN_S = 300.0
_LOOK_S = 0.02
_OF_ADAMW = 3 * 4
"""Bytes for each parameter: itself and two moments."""


@dataclass(frozen=True)
class Kind:
    """One kind of change.

    Attributes:
        name: in tables.
        before: workers.
        after: workers.
        ask: the event for it, in the state in which it is asked for.
        least: the bytes that have to come from other machines.
    """

    name: str
    before: int
    after: int
    ask: Callable[[State], ev.ChangePlanned]
    least: int


@dataclass(frozen=True)
class Job:
    """A training that is changed, kind by kind.

    Attributes:
        example: its script.
        machines: at first, with one worker each.
        spares: that wait.
        kinds: the changes, in order.
        plain: script of torchrun, with its arguments.
    """

    example: str
    machines: int
    spares: int
    kinds: tuple[Kind, ...]
    plain: tuple[str, ...]


def _layer_bytes() -> list[int]:
    layers = (build_layer(number, CONFIG) for number in range(CONFIG.layers + 2))
    return [_OF_ADAMW * sum(p.numel() for p in layer.parameters()) for layer in layers]


def least_of_layers(before: int, after: int) -> int:
    """Bytes of layers that workers need which are new to their machine. Worker ``n`` is on machine ``n``."""
    sizes = _layer_bytes()
    old, new = even_layout(len(sizes), before), even_layout(len(sizes), after)
    had = [set(layers_of(old, rank)) if rank < before else set() for rank in range(after)]
    return sum(sizes[layer] for rank in range(after) for layer in {*layers_of(new, rank)} - had[rank])


def least_of_shards(before: int, after: int) -> int:
    """Bytes of rows that workers need which are new to their machine; FSDP2 gives each as many rows."""
    total = 0
    for number in range(CONFIG.layers + 2):
        for parameter in build_layer(number, CONFIG).parameters():
            rows, of_row = parameter.shape[0], parameter[0].numel()
            for rank in range(after):
                need = {*_rows(rows, after, rank)}
                total += len(need - {*_rows(rows, before, rank)}) * of_row * _OF_ADAMW
    return total


def _rows(rows: int, workers: int, rank: int) -> range:
    each = -(-rows // workers)
    return range(min(rows, rank * each), min(rows, (rank + 1) * each))


def _to(workers: int) -> Callable[[State], ev.ChangePlanned]:
    return lambda state: planned(state, resized(state, workers), reason=f"{workers} workers")


REPLICAS = Job(
    "train_ddp",
    2,
    1,
    (
        Kind(
            "DDP: a replica moves to a spare",
            2,
            2,
            lambda state: planned(state, moved(state, state.membership.members[1]), reason="a move"),
            sum(_layer_bytes()),
        ),
        Kind(
            "DDP: the script is loaded again",
            2,
            2,
            lambda state: planned(state, same_machines(state), reason="a reload"),
            0,
        ),
    ),
    (str(PLAIN_SIZES),),
)
LAYERS = Job(
    "train_elastic",
    4,
    0,
    (
        Kind("LayerStack: 4 workers become 2", 4, 2, _to(2), least_of_layers(4, 2)),
        Kind("LayerStack: 2 workers become 4", 2, 4, _to(4), least_of_layers(2, 4)),
    ),
    (str(EXAMPLES / "train_plain.py"),),
)
SHARDS = Job(
    "train_fsdp",
    2,
    1,
    (Kind("FSDP2: 2 workers become 3", 2, 3, _to(3), least_of_shards(2, 3)),),
    (str(PLAIN_SIZES), "--sharded"),
)
JOBS = (REPLICAS, LAYERS, SHARDS)


@dataclass(frozen=True)
class Change:
    """What one change took.

    Attributes:
        gap_s: from the last old iteration to the first new one that all have completed.
        pause_s: without the time of that iteration.
        handover_s: from the first worker's stop until all trained again, as the journal has it.
        prepared_s: from the request until the first worker stopped.
        peers: bytes that came from other machines.
        step: time of a step while the next world was prepared / before.
        step_cpu: the same of the CPU time of all workers' steps.
    """

    gap_s: float
    pause_s: float
    handover_s: float
    prepared_s: float
    peers: int
    step: float
    step_cpu: float


# ------------------------------------------------------------------------------------------------------ ours


@dataclass
class Running:
    """A training that goes on, and what its journal and its workers have told so far."""

    folder: Path
    watch: Watch
    history: History = field(default_factory=History)

    def look(self) -> None:
        """Read what is new in the journal.

        Raises:
            CommandError: if the run has ended.
        """
        seen = self.watch.look()
        self.watch.apply(seen)
        if seen.journal.began is not None:
            self.history.begin(seen.journal.began)
        for entry in seen.journal.entries:
            self.history.apply(entry)
        if self.watch.over:
            end = (self.folder / "output.txt").read_text(errors="replace")[-2000:]
            raise CommandError(f"the run has ended too soon\n{end}")

    def completed(self, iteration: int, workers: int) -> None:
        """Wait until so many workers have completed an iteration."""
        self.until(
            lambda: len(at_of(read(self.notes), iteration)) >= workers, f"iteration {iteration} of {workers}"
        )

    @property
    def notes(self) -> Path:
        """What workers note of their steps."""
        return self.folder / "notes"

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait until something is so.

        Raises:
            CommandError: if it takes too long.
        """
        deadline = time.monotonic() + WITHIN_S
        while not reached():
            self.look()
            if time.monotonic() > deadline:
                raise CommandError(f"{what} took longer than {WITHIN_S:g} s")
            time.sleep(_LOOK_S * 5)


@contextmanager
def running(job: Job) -> Iterator[Running]:
    """A training that begins now, and is ended with the block."""
    with tempfile.TemporaryDirectory(prefix="swift-worlds-") as name:
        folder, joined = Path(name), Path(name) / "joined.txt"
        (folder / "notes").mkdir()
        flags = ["--machines", str(job.machines), "--spares", str(job.spares), "--helpers", "0"]
        flags += ["--endpoint-out", str(joined)]
        script = [str(NOTED), str(folder / "notes"), job.example, *MODEL, "--iterations", str(NEVER)]
        script += ["--checkpoint-every", str(NEVER), "--store", str(folder / "store")]
        output = folder / "output.txt"
        with started(swift_run(*flags, *script), output, OMP_NUM_THREADS="1") as process:
            deadline = time.monotonic() + WITHIN_S
            while not joined.exists() or not joined.read_text().endswith("\n"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise CommandError(f"{job.example} has not begun\n{output.read_text()[-2000:]}")
                time.sleep(_LOOK_S)
            address, run_id = joined.read_text().split()
            yield Running(folder, Watch(StoreAddress.parse(address), run_id, View()))


def changes(job: Job) -> Iterator[tuple[Kind, Change]]:
    """Run a training, and change it kind by kind."""
    with running(job) as run:
        address, name = (run.folder / "joined.txt").read_text().split()
        since = 0
        for number, kind in enumerate(job.kinds, start=1):
            run.completed(since + WARM_UP + COUNTED, kind.before)
            run.until(lambda: settled(run.history.state), "a moment for a change")
            with following(address, name) as (_, follower):
                outcome = switch(follower, kind.ask(follower.state), timeout_s=WITHIN_S, tell=False)
            if outcome.reason or outcome.iteration is None:
                raise CommandError(f"{kind.name}: {outcome.reason}")
            since = outcome.iteration
            run.completed(since + WARM_UP, kind.after)
            run.look()
            yield kind, measured(kind, number, since, run)


def settled(state: State) -> bool:
    """Whether all train, and nothing is about to change by itself."""
    return state.phase == Phase.LIVE and state.layouts.pending is None


def measured(kind: Kind, world: int, since: int, run: Running) -> Change:
    """What the change to a world took, from the journal and from what workers noted."""
    processes = read(run.notes)
    told = next(change for change in run.history.worlds if change.world == world)
    if told.stopped is None or told.pause_s is None:
        raise CommandError(f"{kind.name}: the journal tells of no switch")
    asked, stopped = told.planned, told.stopped
    old, new = at_of(processes, since - 1), at_of(processes, since)
    if len(old) != kind.before or len(new) != kind.after:
        raise CommandError(f"{kind.name}: {len(old)} workers have noted the last step, {len(new)} the next")
    after = statistics.median(s for s, _ in _steps(processes, 0, max(new), time.time()))
    before = [_steps(processes, rank, 0.0, asked)[-COUNTED:] for rank in range(kind.before)]
    during = [_steps(processes, rank, asked, stopped) for rank in range(kind.before)]
    gap_s = max(new) - max(old)
    return Change(
        gap_s,
        gap_s - after,
        told.pause_s,
        stopped - asked,
        sum(told.peers.values()),
        _median(during[0], 0) / _median(before[0], 0),
        sum(_median(own, 1) for own in during) / sum(_median(own, 1) for own in before),
    )


def at_of(processes: Iterable[Process], iteration: int) -> list[float]:
    """When each worker had completed an iteration."""
    ends = (event for process in processes for event in process.of("end"))
    return [float(event["at"]) for event in ends if event["iteration"] == iteration]


def _steps(processes: Iterable[Process], rank: int, begin: float, end: float) -> list[tuple[float, float]]:
    """Time and CPU time of a worker's steps between two moments."""
    found = []
    for process in processes:
        if process.rank == rank:
            ends = [event for event in process.of("end") if begin <= event["at"] <= end]
            found += [(b["at"] - a["at"], b["cpu"] - a["cpu"]) for a, b in pairwise(ends)]
    return found


def _median(steps: Sequence[tuple[float, float]], index: int) -> float:
    if not steps:
        raise CommandError("the next world was prepared within one step: train a smaller model")
    return statistics.median(step[index] for step in steps)


# ------------------------------------------------------------------------------------- torchrun, and the wire


def of_torchrun_s(job: Job, kind: Kind) -> float:
    """The gap, where all workers save a checkpoint and end, and others load it."""
    with tempfile.TemporaryDirectory(prefix="swift-worlds-") as name:
        folder, trace = Path(name), Path(name) / "trace.jsonl"
        script = [*job.plain, *MODEL, "--checkpoint-dir", str(folder / "dcp"), "--trace", str(trace)]
        if job is LAYERS:
            script += ["--checkpoint-every", str(WARM_UP)]
        for workers, iterations in ((kind.before, WARM_UP), (kind.after, WARM_UP + 1)):
            command = torchrun("--nproc-per-node", str(workers), *script, "--iterations", str(iterations))
            finished(command, folder / "output.txt", within_s=WITHIN_S, OMP_NUM_THREADS="1")
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
    done = [line for line in lines if line["event"] == "finished"]
    old = [line["at"] for line in done if line["iteration"] == WARM_UP - 1]
    new = [line["at"] for line in done if line["iteration"] == WARM_UP]
    if len(old) != kind.before or len(new) != kind.after:
        raise CommandError(f"torchrun: {len(old)} workers before, {len(new)} after: {kind}")
    return float(max(new) - max(old))


def loopback() -> float:
    """Bytes per second through one TCP connection of this machine."""
    block, left = bytearray(2**20), SENT
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):

        def send() -> None:
            for _ in range(SENT // len(block)):
                sender.sendall(block)

        thread = threading.Thread(target=send)
        began = time.perf_counter()
        thread.start()
        target = bytearray(2**20)
        while left:
            left -= receiver.recv_into(target)
        took_s = time.perf_counter() - began
        thread.join()
    return SENT / took_s


# ------------------------------------------------------------------------------------------------- the report


def main() -> int:
    """Measure, print, and keep."""
    args = argument_parser(__doc__, repetitions=5).parse_args()
    ours: dict[str, list[Change]] = {kind.name: [] for job in JOBS for kind in job.kinds}
    theirs: dict[str, list[float]] = {name: [] for name in ours}
    speeds = []
    for number in range(args.repetitions):
        speeds.append(loopback())
        for job in JOBS:
            for kind, change in changes(job):
                ours[kind.name].append(change)
                print(f"# {number + 1}: {kind.name}: {change}", file=sys.stderr)
            for kind in job.kinds:
                theirs[kind.name].append(of_torchrun_s(job, kind))
                print(f"# {number + 1}: torchrun: {theirs[kind.name][-1]:.2f} s", file=sys.stderr)
    speed = statistics.median(speeds)
    body = report(ours, theirs, speed, args.repetitions)
    return finish("worlds", body, {"ours": ours, "torchrun_s": theirs, "loopback": speeds}, args)


def report(
    ours: Mapping[str, Sequence[Change]],
    theirs: Mapping[str, Sequence[float]],
    speed: float,
    repetitions: int,
) -> str:
    """All figures and targets, as Markdown."""
    kinds = [kind for job in JOBS for kind in job.kinds]
    rows, moves, targets = [], [], []
    for kind in kinds:
        found = ours[kind.name]
        pause = Summary.of([change.pause_s for change in found])
        gap = Summary.of([change.gap_s for change in found])
        peers = statistics.median(change.peers for change in found)
        rows.append(
            [
                kind.name,
                pause.text(),
                gap.text(),
                Summary.of(theirs[kind.name]).text(digits=2),
                Summary.of([change.handover_s for change in found]).text(),
                Summary.of([change.prepared_s for change in found]).text(digits=2),
            ]
        )
        ratio = f"{peers / kind.least:.3f}" if kind.least else "-"
        moves.append([kind.name, _megabytes(peers), _megabytes(kind.least), ratio])
        limit = AT_MOST_S + peers / (OF_LOOPBACK * speed)
        targets.append(
            Target(f"pause, {kind.name}", f"<= {limit:.3f} s", pause.text(), pause.median <= limit)
        )
        pairs = zip(found, theirs[kind.name], strict=True)
        faster = Summary.of([their / change.gap_s for change, their in pairs])
        targets.append(
            Target(
                f"gap of torchrun / ours, {kind.name}",
                f">= {FASTER:g}",
                faster.text("", 1),
                faster.median >= FASTER,
            )
        )
    every = [change for found in ours.values() for change in found]
    for words, ratios in (
        ("wall time", [change.step for change in every]),
        ("CPU time of all workers", [change.step_cpu for change in every]),
    ):
        step = Summary.of(ratios)
        name = f"a step while the next world is prepared / before, {words}"
        targets.append(Target(name, f"<= {STEP}", step.text(""), step.median <= STEP))
    columns = ["", "pause", "gap", "gap, torchrun", "of it the handover", "prepared within"]
    bytes_of = ["", "from other machines", "least", "ratio"]
    return (
        f"{of_repetitions(repetitions)}. The GPT of the examples with a width of {CONFIG.width}: "
        f"{_megabytes(sum(_layer_bytes()))} of parameters and moments. One TCP connection through loopback "
        f"carries {_megabytes(speed)}/s. The pause is the gap without the first iteration. torchrun's "
        f"workers save a checkpoint with DCP and end by themselves.\n\n{table(columns, rows)}\n\n"
        f"{table(bytes_of, moves)}\n\n{target_table(targets)}"
    )


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
