"""Measures pipelines that are replicas: what they cost without a failure, and what is left after losses.

    python -m benchmarks.elastic.replicas

1. Two pipelines of the GPT of the examples, of two workers each: DDP around plain stages under torchrun,
   without any protection, against a LayerStack whose second pipeline is cut otherwise, and with exact=True.
2. Two pipelines of three machines each, of layers that take their time without computing
   (scripts/slept_layers.py), so that two cores can stand for six devices. One machine gets SIGKILL, and no
   other one comes. Microbatches go to the other pipeline, then layers move. 5/6 of the speed would be ideal.
3. The same pipelines, cut alike, as two replica groups of torchft's (scripts/slept_torchft.py), in turn with
   2. A pipeline that lacks a machine cannot be formed, so the other one goes on alone.

``--losses-only`` leaves the first part out.
Speed is samples per second.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    finish,
    run_benchmark,
    table,
    target_table,
)
from benchmarks.peers.runs import TORCHFT_VERSION, lighthouse, why_no_torchft
from examples.commands import CommandError, check, finished, started, swift_run, torchrun

SCRIPTS = Path(__file__).parent / "scripts"
STEPS, SLEPT = SCRIPTS / "replicated_steps.py", SCRIPTS / "slept_layers.py"
TORCHFT, PIPELINES = SCRIPTS / "slept_torchft.py", 2
WORKERS, ITERATIONS, WARM_UP = 4, 40, 15
WAYS = ("ddp", "unlike", "exact")
AT_MOST = {"unlike": 1.02, "exact": 1.05}
MACHINES, LOST_AT, LONG, COUNTED = 6, 16, 60, 20
TORCHFT_TIMEOUT_S = 1.0
STATES = {
    "hosted": ("at once: a machine does the work of two", "kept"),
    "rerouted": ("microbatches go to the other pipeline", "kept"),
    "recut": ("layers have moved, too", "kept"),
    "torchft": (f"torchft {TORCHFT_VERSION}", "halved"),
}
"""Our states in the order in which they come, and torchft's."""
ABOUT_TORCHFT = (
    f"torchft {TORCHFT_VERSION} has the same pipelines as its two replica groups, and its Manager averages "
    "all gradients. The two machines that are left of the second pipeline do nothing there, and the global "
    "batch is half as large from then on."
)
IDEAL = (MACHINES - 1) / MACHINES
WITHIN_S = 300.0


def main() -> int:
    """Measure, print, and keep."""
    parser = argument_parser(__doc__, repetitions=6)
    parser.add_argument("--losses-only", action="store_true", help="measure only what losses leave")
    args = parser.parse_args()
    wall: dict[str, list[float]] = {way: [] for way in AT_MOST}
    cpu: dict[str, list[float]] = {way: [] for way in AT_MOST}
    left: list[dict[str, float]] = []
    no_torchft = why_no_torchft()
    for number in range(args.repetitions):
        if not args.losses_only:
            found = {way: steps(way) for way in (WAYS if number % 2 else WAYS[::-1])}
            for way in AT_MOST:
                wall[way].append(found[way][0] / found["ddp"][0])
                cpu[way].append(found[way][1] / found["ddp"][1])
        left.append(after_loss(number % MACHINES))
        if no_torchft is None:
            left[-1]["torchft"] = torchft_after_loss(number % (MACHINES // PIPELINES))
        print(f"# {number + 1}: {[r[-1:] for r in wall.values()]}, {left[-1]}", file=sys.stderr)
    targets = [
        Target(
            f"a step with {'exact=True' if way == 'exact' else 'unlike cuts'} / with DDP, {what}",
            f"<= {AT_MOST[way]}",
            Summary.of(ratios[way]).text(""),
            Summary.of(ratios[way]).median <= AT_MOST[way],
        )
        for way in AT_MOST
        for what, ratios in (("wall time", wall), ("CPU time of all workers", cpu))
        if ratios[way]
    ]
    about = f"torchft was not measured: {no_torchft}." if no_torchft else ABOUT_TORCHFT
    body = (
        f"Two pipelines, 1F1B, {args.repetitions} repetitions in turn. Samples per second after the loss of "
        f"one machine of six, as a share of those before; {IDEAL:.3f} would be ideal. {about}\n\n"
        f"{losses(left)}" + (f"\n\n{target_table(targets)}" if targets else "")
    )
    facts = {"wall": wall, "cpu": cpu, "left": left}
    return finish("loss-beside-torchft" if args.losses_only else "layer-replicas", body, facts, args)


def losses(left: Sequence[dict[str, float]]) -> str:
    """What losses leave, as a table."""
    rows = []
    for key, (name, batch) in STATES.items():
        if values := [one[key] for one in left if key in one]:
            summary = Summary.of(values)
            rows.append([name, summary.text(""), f"{summary.median / IDEAL:.3f}", batch])
    return table(["", "speed left", "of the ideal", "global batch"], rows)


def steps(way: str) -> tuple[float, float]:
    """Seconds of a step, and of the CPU time of all workers' steps."""
    with tempfile.TemporaryDirectory(prefix="swift-replicas-") as name:
        folder = Path(name)
        script = [str(STEPS), "--way", way, "--out", str(folder / "steps.json")]
        script += ["--iterations", str(ITERATIONS)]
        if way == "ddp":
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, "--nproc-per-node", str(WORKERS), *script]
        else:
            flags = ["--machines", str(WORKERS), "--spares", "0", "--helpers", "0"]
            command = swift_run(*flags, *script, "--store", str(folder / "store"))
        finished(command, folder / "output.txt", within_s=WITHIN_S, OMP_NUM_THREADS="1")
        times = [json.loads((folder / f"steps{rank}.json").read_text()) for rank in range(WORKERS)]
    wall = statistics.median(step[0] for step in times[0][WARM_UP:])
    return wall, sum(statistics.median(step[1] for step in own[WARM_UP:]) for own in times)


def after_loss(lost: int) -> dict[str, float]:
    """The speed after a loss, as a share of that before: hosted, with other shares, with other cuts."""
    with tempfile.TemporaryDirectory(prefix="swift-replicas-") as name:
        folder = Path(name)
        flags = ["--machines", str(MACHINES), "--no-replacement", "--elastic-wait", "0", "--spares", "0"]
        flags += ["--events-out", str(folder / "events.json")]
        flags += ["--inject", f"kill machine={lost} iteration={LOST_AT} point=forward"]
        script = [str(SLEPT), "--store", str(folder / "store"), "--out", str(folder / "steps.json")]
        script += ["--iterations", str(LONG), "--pipelines", "2"]
        finished(swift_run(*flags, *script), folder / "output.txt", within_s=WITHIN_S, OMP_NUM_THREADS="1")
        times = json.loads((folder / f"steps{int(lost == 0)}.json").read_text())["times"]
        report = json.loads((folder / "events.json").read_text())
    shared = [e["iteration"] for e in report["events"] if e["event"] == "SharesRequested"]
    moved = [change["iteration"] for change in report["layouts"]]
    before = statistics.median(s for index, s in times if 8 <= index < LOST_AT)
    spans = {
        "hosted": range(LOST_AT + 1, min([*shared, *moved])),
        "rerouted": range(min(shared) + 1, min(moved)),
        "recut": range(LONG - COUNTED, LONG),
    }
    return {
        key: before / statistics.median(found)
        for key, span in spans.items()
        if (found := [s for index, s in times if index in span])
    }


def torchft_after_loss(lost: int) -> float:
    """Samples per second of torchft's after a stage's machine is lost, as a share of those before."""
    stages = MACHINES // PIPELINES
    with tempfile.TemporaryDirectory(prefix="swift-replicas-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        address = stack.enter_context(lighthouse(TORCHFT_TIMEOUT_S, folder))
        env = {
            "OMP_NUM_THREADS": "1",
            "TORCHFT_LIGHTHOUSE": address,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        outputs = [folder / f"output{pipeline}.txt" for pipeline in range(PIPELINES)]
        running = []
        for pipeline, output in enumerate(outputs):
            script = [str(TORCHFT), "--out", str(folder / "steps.json"), "--iterations", str(LONG)]
            script += ["--pipeline", str(pipeline), "--lost", str(lost), "--lost-at", str(LOST_AT)]
            command = torchrun("--nproc-per-node", str(stages), "--max-restarts", "0", *script)
            running.append(stack.enter_context(started(command, output, **env)))
        try:
            running[0].wait(WITHIN_S)
        except subprocess.TimeoutExpired as error:
            end = outputs[0].read_text(errors="replace")[-1500:]
            raise CommandError(f"torchft has not ended within {WITHIN_S} s\n{end}") from error
        check(running[0], outputs[0])
        times = json.loads((folder / "torchft00.json").read_text())
    both = [s for index, s, pipelines in times if pipelines == PIPELINES and 8 <= index < LOST_AT]
    alone = [s for index, s, pipelines in times if pipelines == 1 and index >= LONG - COUNTED]
    if not both or not alone:
        raise CommandError(f"torchft: {len(both)} steps of two pipelines, {len(alone)} of one")
    ratio: float = statistics.median(both) / statistics.median(alone) / PIPELINES
    return ratio


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
