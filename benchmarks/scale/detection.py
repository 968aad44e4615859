"""Measures how soon silent machines are seen, and that those which only stand still for a moment are not.

    python -m benchmarks.scale.detection

One after the other, three machines of a job get SIGSTOP, by default settings: how long until the loss is in
the journal. Then agents of a job on a loaded host are stopped for half a second each, again and again: none
of them may count as lost. At last the sentinels of many machines, without training, of which a rack is
stopped at the same instant: how long until the last one was found, and how many reports that took. Their
silence is longer, since all their heartbeats have to share this host's processors.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    finish,
    run_benchmark,
    table,
    target_table,
)
from benchmarks.scale.swarm import Rack, lose_rack
from examples.commands import EXAMPLES, CommandError, finished, swift_run

STALLS_AGENTS = Path(__file__).parent / "scripts" / "stalls_agents.py"
SMALL = ("--layers=8", "--width=32", "--heads=2", "--sequence=32", "--microbatch-size=1", "--microbatches=8")
STOPPED_AT = (10, 60, 110)
ITERATIONS = 160
SEEN_S, WINDOW = 1.0, 0.2
STALL_S, PAUSE_S = 0.5, 0.5
MACHINES = 4


def main() -> int:
    """Measure, print, and keep."""
    parser = argument_parser(__doc__, repetitions=5)
    parser.add_argument("--minutes", type=float, default=10.0, help="of stalls, default: %(default)s")
    parser.add_argument(
        "--busy", type=int, default=2, help="processes that compute beside each worker, default: %(default)s"
    )
    parser.add_argument("--machines", type=int, default=1024, help="of sentinels alone, default: %(default)s")
    parser.add_argument("--silence", type=float, default=5.0, help="that they allow, default: %(default)s")
    args = parser.parse_args()
    seen = [seconds for _ in range(args.repetitions) for seconds in stops_s()]
    stalls = round(args.minutes * 60 / (STALL_S + PAUSE_S))
    alarms = false_alarms(stalls, args.busy)
    rack = lose_rack(args.machines, args.machines // 16, args.silence)
    body = report(Summary.of(seen), len(seen), stalls, alarms, args.busy, rack, args.silence)
    facts = {"seen_s": seen, "stalls": stalls, "false_alarms": alarms, "rack": rack}
    return finish("silent-machines", body, facts, args)


def stops_s() -> list[float]:
    """By machine of one job: seconds from its SIGSTOP to its loss in the journal."""
    faults = [f"stop machine={i} iteration={at} point=optimizer" for i, at in enumerate(STOPPED_AT, 1)]
    with tempfile.TemporaryDirectory(prefix="swift-detection-") as name:
        events = run(
            Path(name),
            EXAMPLES / "train_swift.py",
            ITERATIONS,
            "--spares",
            "3",
            "--inject",
            "; ".join(faults),
        )
    stopped = [event["at"] for event in events if event["event"] == "FaultInjected"]
    lost = [event["at"] for event in events if event["event"] == "MachineLost"]
    if len(stopped) != len(lost):
        raise CommandError(f"{len(stopped)} machines were stopped, and {len(lost)} reports followed")
    return [found - at for at, found in zip(stopped, lost, strict=True)]


def false_alarms(stalls: int, busy: int) -> int:
    """How many machines count as lost while so many stalls of half a second hit their agents."""
    with tempfile.TemporaryDirectory(prefix="swift-stalls-") as name:
        facts = {"times": stalls, "seconds": STALL_S, "busy": busy, "folder": name}
        events = run(Path(name), STALLS_AGENTS, 8, "--spares", "3", stalls=json.dumps(facts))
    return sum(event["event"] == "MachineLost" for event in events)


def run(folder: Path, script: Path, iterations: int, *flags: str, stalls: str = "") -> list[dict[str, Any]]:
    """The events of a run of four machines."""
    journal = folder / "events.json"
    command = swift_run("--machines", str(MACHINES), "--helpers", "0", "--events-out", str(journal), *flags)
    command += [str(script), *SMALL, "--iterations", str(iterations), "--checkpoint-every", "10"]
    command += ["--store", str(folder / "store")]
    finished(command, folder / "output.txt", OMP_NUM_THREADS="1", STALLS=stalls)
    return list(json.loads(journal.read_text())["events"])


def report(
    seen: Summary, stops: int, stalls: int, alarms: int, busy: int, rack: Rack, silence_s: float
) -> str:
    """The table and the targets."""
    window = (rack.all_s - rack.first_s) / silence_s
    rows = [
        [f"SIGSTOP to the loss in the journal, {stops} machines", seen.text()],
        [f"stalls of {STALL_S} s, {1 + busy} busy processes for each of {MACHINES} machines", str(stalls)],
        ["of these taken for losses", str(alarms)],
        [
            f"{rack.lost} of {rack.machines} stopped at once (silence {silence_s:g} s): first, last seen",
            f"{rack.first_s:.2f} s, {rack.all_s:.2f} s",
        ],
        ["reports of these losses; of other machines", f"{rack.reports - rack.wrong}; {rack.wrong}"],
        [f"processors that the sentinels of {rack.machines} machines take", f"{rack.cpu:.2f}"],
    ]
    targets = [
        Target(
            "a silent machine is seen, by default settings",
            f"<= {SEEN_S:g} s",
            seen.text(),
            seen.high <= SEEN_S,
        ),
        Target("stalls taken for losses", "0", str(alarms + rack.wrong), alarms + rack.wrong == 0),
        Target("window of the losses of a rack / silence", f"<= {WINDOW}", f"{window:.2f}", window <= WINDOW),
    ]
    return f"{table(['what', 'measured'], rows)}\n\n{target_table(targets)}"


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
