"""Measures a change of the layout: what it takes, against torchrun, and what a LayerStack costs without one.

    python -m benchmarks.elastic.change

Four machines train the GPT of the examples, and one gets SIGKILL in the iteration after a checkpoint. No
other one comes.

swift_ft: another machine runs the lost worker, too, and then the layers are shared anew. A change lasts from
the first worker's stop until all can train on. torchrun (``--nnodes 3:4``): the three agents that are left
meet again and start their workers, and these load the checkpoint, re-sharded by DCP. That lasts from the
SIGKILL until all three have loaded it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.lib.ports import free_port
from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    finish,
    run_benchmark,
    table,
    target_table,
)
from examples.commands import ROOT, CommandError, descendants, finished, started, swift_run

ELASTIC, PLAIN = ROOT / "examples" / "train_elastic.py", ROOT / "examples" / "train_plain.py"
STEPS = Path(__file__).parent / "scripts" / "steps.py"
MACHINES, CHECKPOINT_EVERY, ITERATIONS = 4, 20, 44
STEP_ITERATIONS, WARM_UP = 40, 10
AT_MOST_S, FASTER, STEP = 1.0, 10.0, 1.0
NOISE = 0.01
WITHIN_S = 300.0
TORCHRUN_WITHIN_S = 60.0
"""Where it is not back by then it counts as back then: in some runs it never is."""
# Short: torchrun's own are 30 s for further nodes, and 15 s without a sign of life. With less than 5 s for
# further nodes, agents that notice the loss at different times often never agree on a round.
RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2"


def main() -> int:
    """Measure, print, and keep."""
    parser = argument_parser(__doc__, repetitions=5)
    args = parser.parse_args()
    changes, back, theirs, wall, cpu = [], [], [], [], []
    moved = 0
    for number in range(args.repetitions):
        change_s, back_s, moved = change()
        changes.append(change_s)
        back.append(back_s)
        theirs.append(of_torchrun_s())
        ratios = stack_over_plain(reverse=bool(number % 2))
        wall.append(ratios[0])
        cpu.append(ratios[1])
        print(f"# {number + 1}: {changes[-1]:.3f} s, {theirs[-1]:.2f} s, {wall[-1]:.3f}", file=sys.stderr)
    faster = Summary.of([their / our for our, their in zip(changes, theirs, strict=True)])
    targets = (
        Target("a change", f"<= {AT_MOST_S} s", Summary.of(changes).text(), max(changes) <= AT_MOST_S),
        Target("torchrun / a change", f">= {FASTER}", faster.text("", 1), faster.median >= FASTER),
        Target(
            "a step with a LayerStack / with plain stages, wall time",
            f"{STEP:.2f}",
            Summary.of(wall).text(""),
            Summary.of(wall).median <= STEP + NOISE,
        ),
        Target(
            "the same, CPU time of all workers",
            f"{STEP:.2f}",
            Summary.of(cpu).text(""),
            Summary.of(cpu).median <= STEP + NOISE,
        ),
    )
    hung = sum(seconds >= TORCHRUN_WITHIN_S for seconds in theirs)
    rows = [
        ["a change of the layout", Summary.of(changes).text()],
        ["before it: the loss, until all train again (one iteration is replayed)", Summary.of(back).text()],
        ["torchrun with DCP, until all train again", Summary.of(theirs).text()],
    ]
    body = (
        f"Four machines with one worker each, then three. {moved / 1e6:.1f} MB of layers move, as few as can "
        f"be (tests/cluster/test_layouts.py). torchrun with {RENDEZVOUS}; in {hung} of {args.repetitions} "
        f"repetitions it was not back after {TORCHRUN_WITHIN_S:g} s, which count as these. A change comes "
        f"after the loss is repaired. The repetitions were in turn.\n\n{table(['', 'takes'], rows)}\n\n"
        f"{target_table(targets)}"
    )
    samples = {"change_s": changes, "back_s": back, "torchrun_s": theirs, "wall": wall, "cpu": cpu}
    return finish("layout-change", body, samples, args)


def change() -> tuple[float, float, int]:
    """Seconds of the change, seconds from the loss until all train again, and the bytes that moved."""
    with tempfile.TemporaryDirectory(prefix="swift-elastic-") as name:
        folder = Path(name)
        flags = ["--machines", str(MACHINES), "--no-replacement", "--elastic-wait", "0", "--spares", "0"]
        flags += ["--events-out", str(folder / "events.json"), "--helpers", "0"]
        flags += ["--inject", f"kill machine=1 iteration={CHECKPOINT_EVERY + 1} point=forward"]
        options = ["--iterations", str(ITERATIONS), "--checkpoint-every", str(CHECKPOINT_EVERY)]
        script = [str(ELASTIC), *options, "--store", str(folder / "store")]
        finished(swift_run(*flags, *script), folder / "output.txt", within_s=WITHIN_S, OMP_NUM_THREADS="1")
        report = json.loads((folder / "events.json").read_text())
    if len(report["layouts"]) != 1 or len(report["recoveries"]) != 1:
        raise CommandError(f"one change was expected, and one loss: {report['layouts']}")
    (moved,), (lost,) = report["layouts"], report["recoveries"]
    return moved["live"] - moved["stopped"], lost["live"] - lost["detected"], sum(moved["received"].values())


def of_torchrun_s() -> float:
    """Seconds from the SIGKILL until three workers have loaded the checkpoint into their larger stages."""
    with tempfile.TemporaryDirectory(prefix="swift-elastic-") as name, ExitStack() as stack:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        options = ["--iterations", "100000", "--checkpoint-every", str(CHECKPOINT_EVERY)]
        script = [str(PLAIN), *options, "--checkpoint-dir", str(folder / "dcp"), "--trace", str(trace)]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        rendezvous += ["--rdzv-id", "elastic", "--max-restarts", "3"]
        agents = []
        for number in range(MACHINES):  # the first one has the rendezvous store, and is not the one that dies
            conf = f"{RENDEZVOUS},is_host={int(number == 0)}"
            flags = ["--nnodes", f"{MACHINES - 1}:{MACHINES}", "--nproc-per-node", "1", *rendezvous]
            full = [sys.executable, "-m", "torch.distributed.run", *flags, "--rdzv-conf", conf, *script]
            output = folder / f"agent{number}.txt"
            agents.append(stack.enter_context(started(full, output, OMP_NUM_THREADS="1")))
        _wait_for(trace, "checkpoint", 1, 0.0)
        died = time.time()
        for pid in (agents[-1].pid, *descendants(agents[-1].pid)):
            os.kill(pid, signal.SIGKILL)
        return _wait_for(trace, "loaded", MACHINES - 1, died) - died


def _wait_for(trace: Path, event: str, count: int, after: float) -> float:
    """When an event had happened so often, after a moment; or the end of the time that is given to it."""
    deadline = time.monotonic() + TORCHRUN_WITHIN_S
    while time.monotonic() < deadline:
        lines = trace.read_text().splitlines() if trace.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        found = sorted(e["at"] for e in events if e["event"] == event and e["at"] > after)
        if len(found) >= count:
            return float(found[count - 1])
        time.sleep(0.05)
    return after + TORCHRUN_WITHIN_S


def stack_over_plain(*, reverse: bool) -> tuple[float, float]:
    """The median step of worker 0 with a LayerStack over that without; and the CPU time of all workers."""
    order = ("plain", "stack") if reverse else ("stack", "plain")
    found = {way: steps(stack=way == "stack") for way in order}
    return found["stack"][0] / found["plain"][0], found["stack"][1] / found["plain"][1]


def steps(*, stack: bool) -> tuple[float, float]:
    """Seconds of a step, and of the CPU time of all workers' steps."""
    with tempfile.TemporaryDirectory(prefix="swift-elastic-") as name:
        folder = Path(name)
        flags = ["--machines", str(MACHINES), "--spares", "0"]
        script = [str(STEPS), "--store", str(folder / "store"), "--out", str(folder / "steps.json")]
        script += ["--iterations", str(STEP_ITERATIONS), *["--stack"] * stack]
        finished(swift_run(*flags, *script), folder / "output.txt", within_s=WITHIN_S, OMP_NUM_THREADS="1")
        times = [json.loads((folder / f"steps{rank}.json").read_text()) for rank in range(MACHINES)]
    wall = statistics.median(step[0] for step in times[0][WARM_UP:])
    return wall, sum(statistics.median(step[1] for step in own[WARM_UP:]) for own in times)


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
