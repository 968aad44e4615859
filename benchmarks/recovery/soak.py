"""What grows in an hour with a failure each half minute, and how much of the time is training.

Half of the campaign's topologies train in turn, one for each way back; ``--only`` names others. A machine is
killed again and again, never machine 0, whose processes live through all recoveries. Meanwhile memory,
descriptors and threads of the processes that live on are sampled, how many processes there are, files and
bytes of the store, and the time of each iteration. A straight line through the samples says what grows
(``held.py``). Afterwards the same training runs undisturbed: the last checkpoints are compared bit for bit.

The history that a run keeps of each recovery, for ``swift-recover timeline``, and the journal's archive
grow by their nature. They are told apart: a recovery has a size that it may add, and later ones add no more
than earlier ones.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path

from benchmarks.lib.results import Target, argument_parser, record, table, target_table
from benchmarks.recovery.campaign import TOPOLOGIES, Topology
from benchmarks.recovery.held import HeldOverTime, Trend, trend
from examples.commands import CommandError, check, finished, started, swift_run
from swift_ft.testing.chaos.comparison import last_state
from swift_ft.testing.chaos.leftovers import MARK
from swift_ft.units import format_bytes

TURNS = ("replicas 2x1", "pipeline 4x1", "hybrid 4x1", "sharded 2x1, copies", "interleaved 4x1")
_POINTS = ("between", "optimizer")
_CALIBRATION = 300
"""Iterations of the run that says how long one takes, which its start and checkpoints are no part of."""
_CALIBRATION_SAMPLE_S = 0.1
_CHECKPOINTS = 40
"""In one training. Logs and old checkpoints are deleted with each."""
_SKIPPED = 0.3
"""The part of the samples that does not count: threads, connections and buffers that a run needs once."""
_SAMPLE_S = 2.0
_FEWEST_RECOVERIES = 4
"""Of which halves can be compared."""
_SPARES = 2
_ITERATION = re.compile(r"iteration (\d+): ")
_TOLERATED = {
    "memory": 0.03,
    "descriptors": 0.0,
    "threads": 0.0,
    "processes": 0.0,
    "files": 0.03,
    "bytes": 0.03,
    "step time": 0.03,
}
"""The growth that is allowed over a training, as a part of the median: events are kept until a checkpoint."""
_HISTORY = 128 * 1024
"""Bytes that one recovery, and the checkpoints until the next one, may add to the history."""
_LATER_HISTORY = 1.5
"""What later recoveries may add to the history, relative to earlier ones: a journal is archived in pieces."""
_SETTLES_S = 1.0
"""Before a loss is known and after training goes on: iterations take longer there."""


@dataclass(frozen=True)
class Soaked:
    """One training with its failures.

    Attributes:
        recoveries: how many there were.
        asked: how many failures were injected.
        identical: its last checkpoint is that of the undisturbed run.
        goodput: iterations in a second, disturbed / undisturbed.
        seconds: how long it took.
        lost_s: from each loss until training went on, together.
        history: files that each recovery has left for the timeline.
        history_bytes: bytes that were added to them for each recovery.
        later_history: bytes that the last half of the recoveries has added, relative to the first half.
        trends: by what was sampled.
    """

    recoveries: int
    asked: int
    identical: bool
    goodput: float
    seconds: float
    lost_s: float
    history: float
    history_bytes: float
    later_history: float
    trends: dict[str, Trend]

    def grows(self) -> list[str]:
        """What grows by more than is tolerated."""
        grown = [name for name, found in self.trends.items() if not found.is_flat(_TOLERATED[name])]
        keeps = self.history_bytes > _HISTORY or self.later_history > _LATER_HISTORY
        return [*grown, *["history"] * keeps]


class Clock:
    """The time of each iteration, from the lines that a run prints.

    Args:
        output: the file that it writes to.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._at = 0
        self.times: dict[int, float] = {}

    def read(self) -> None:
        """Note which iterations have come since the last call."""
        with self._output.open(errors="replace") as file:
            file.seek(self._at)
            text = file.read()
        complete = text.rfind("\n") + 1
        self._at += len(text[:complete].encode(errors="replace"))
        now = time.time()
        for number in _ITERATION.findall(text[:complete]):
            self.times.setdefault(int(number), now)

    def per_iteration(self, recoveries: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
        """Times of looks, and seconds per iteration since the look before, without those with a recovery.

        Args:
            recoveries: when each loss was known, and when training went on, in Unix seconds.
        """
        newest: dict[float, int] = {}
        for number, at in self.times.items():
            newest[at] = max(newest.get(at, 0), number)
        kept = [
            (at, (at - before) / (number - earlier))
            for (before, earlier), (at, number) in itertools.pairwise(sorted(newest.items()))
            if number > earlier
            and not any(lost - _SETTLES_S < at and before < live + _SETTLES_S for lost, live in recoveries)
        ]
        return [at for at, _ in kept], [step_s for _, step_s in kept]


def main() -> int:
    """Soak, and print the report. Returns 1 if a training was wrong or something grew."""
    parser = argument_parser(__doc__, repetitions=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="with failures, default: %(default)g")
    parser.add_argument(
        "--every", type=float, default=30.0, help="seconds between failures, default: %(default)g"
    )
    parser.add_argument("--only", choices=[*TOPOLOGIES], nargs="+", default=TURNS, metavar="TOPOLOGY")
    parser.add_argument("--keep", type=Path, help="file of results, with which another run goes on")
    args = parser.parse_args()
    each_s = 60 * args.minutes / len(args.only)
    found = _earlier(args.keep, each_s, args.every)
    with tempfile.TemporaryDirectory(prefix="swift-soak-") as folder:
        for number, name in enumerate(args.only):
            if name in found:
                continue
            found[name] = soak(TOPOLOGIES[name], Path(folder) / str(number), each_s, args.every)
            print(f"# {name}: {_in_words(found[name])}", file=sys.stderr, flush=True)
            _keep(args.keep, name, found[name], each_s, args.every)
    found = {name: found[name] for name in args.only}
    body = report(found, args.every)
    print(json.dumps({name: _facts(one) for name, one in found.items()}) if args.json else body)
    if args.record:
        record("soak", body, args)
    return int(any(not one.identical or one.grows() for one in found.values()))


def _keep(file: Path | None, name: str, one: Soaked, each_s: float, every_s: float) -> None:
    if file is not None:
        with file.open("a") as kept:
            kept.write(json.dumps({"name": name, "asked": [each_s, every_s], "soaked": asdict(one)}) + "\n")


def _earlier(file: Path | None, each_s: float, every_s: float) -> dict[str, Soaked]:
    """The trainings of an earlier run that was asked for as much."""
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    found: dict[str, Soaked] = {}
    for line in (json.loads(line) for line in lines):
        if line["asked"] == [each_s, every_s] and line["soaked"].keys() == {
            one.name for one in fields(Soaked)
        }:
            trends = {kind: Trend(**facts) for kind, facts in line["soaked"]["trends"].items()}
            found[line["name"]] = Soaked(**{**line["soaked"], "trends": trends})
    return found


def soak(its: Topology, folder: Path, seconds: float, every_s: float) -> Soaked:
    """Train for about so long, with failures, then as many iterations without."""
    folder.mkdir(parents=True)
    step_s = _usual_step(its, folder / "calibration")
    iterations = max(_CALIBRATION, int(seconds / step_s))
    apart = max(2, int(every_s / step_s))
    faults = _faults(its.machines, range(apart, iterations - 1, apart))
    place, held = folder / "soaked", HeldOverTime()
    place.mkdir()
    clock = Clock(output := place / "output")
    report_at = place / "events.json"
    flags = ["--inject", "; ".join(faults), "--events-out", str(report_at)]
    began = time.monotonic()
    with started(_command(its, place, iterations, flags), output, **{MARK: str(place)}) as process:
        over = threading.Event()
        while process.poll() is None:
            clock.read()
            held.sample(process.pid, place / "store", place)
            over.wait(_SAMPLE_S)
    took_s = time.monotonic() - began
    check(process, output)
    recoveries = json.loads(report_at.read_text())["recoveries"]
    alone_s = _undisturbed(its, folder / "undisturbed", iterations)
    times = [(one["detected"], one["live"] or one["detected"]) for one in recoveries]
    states = [last_state(str(folder / name / "store")) for name in ("soaked", "undisturbed")]
    return Soaked(
        len(recoveries),
        len(faults),
        states[0] == states[1] and bool(states[0]),
        alone_s / took_s,
        took_s,
        sum(live - lost for lost, live in times),
        held.history[-1].count / max(1, len(recoveries)),
        *of_history(held, [live for _, live in times]),
        _trends(held, clock.per_iteration(times)),
    )


def of_history(held: HeldOverTime, recovered: Sequence[float]) -> tuple[float, float]:
    """Bytes of the history for each recovery, and what the last half added relative to the first half.

    Args:
        held: the samples.
        recovered: when training went on, each time.
    """
    if len(recovered) < _FEWEST_RECOVERIES:
        return held.history[-1].size / max(1, len(recovered)), 1.0
    middle = recovered[len(recovered) // 2]

    def size_at(time_s: float) -> int:
        return max(
            (one.size for at, one in zip(held.times, held.history, strict=True) if at <= time_s), default=0
        )

    first, last = size_at(recovered[0]), held.history[-1].size
    earlier = (size_at(middle) - first) / (len(recovered) // 2)
    later = (last - size_at(middle)) / (len(recovered) - len(recovered) // 2)
    return (last - first) / len(recovered), later / max(1.0, earlier)


def _faults(machines: int, iterations: Sequence[int]) -> list[str]:
    """A kill in each of these iterations: never of machine 0, and the same in each run."""
    draw = random.Random(0)
    return [
        f"kill machine={draw.randrange(1, machines)} iteration={iteration} point={draw.choice(_POINTS)}"
        for iteration in iterations
    ]


def _usual_step(its: Topology, place: Path) -> float:
    """Seconds from one iteration of a short training without failures to the next."""
    place.mkdir()
    clock = Clock(output := place / "output")
    command = _command(its, place, _CALIBRATION, [], checkpoints=1)  # as rare as in the long ones
    with started(command, output) as process:
        while process.poll() is None:
            clock.read()
            time.sleep(_CALIBRATION_SAMPLE_S)
    check(process, output)
    clock.read()
    (first, began), *_, (last, ended) = sorted(clock.times.items())
    return (ended - began) / (last - first)


def _undisturbed(its: Topology, place: Path, iterations: int) -> float:
    """Seconds of a training without failures."""
    place.mkdir()
    began = time.monotonic()
    finished(_command(its, place, iterations, []), place / "output")
    return time.monotonic() - began


def _command(
    its: Topology, place: Path, iterations: int, flags: Sequence[str], checkpoints: int = _CHECKPOINTS
) -> list[str]:
    script = [word.format(folder=place) for word in its.script]
    _replace(script, "--iterations", str(iterations))
    _replace(script, "--checkpoint-every", str(max(4, iterations // checkpoints)))
    return swift_run(*its.launch(_SPARES), *flags, *script)


def _replace(words: list[str], option: str, value: str) -> None:
    if option not in words:
        raise CommandError(f"the script has no {option}: {words}")
    words[words.index(option) + 1] = value


def _trends(held: HeldOverTime, steps: tuple[list[float], list[float]]) -> dict[str, Trend]:
    skipped = int(len(held.times) * _SKIPPED)
    late, (at, step_s) = held.times[skipped:], steps
    counted = {
        "memory": held.of_survivors(attrgetter("kib"), _SKIPPED),
        "descriptors": held.of_survivors(attrgetter("descriptors"), _SKIPPED),
        "threads": held.of_survivors(attrgetter("threads"), _SKIPPED),
        "processes": (late, [float(count) for count in held.processes[skipped:]]),
        "files": (late, [float(one.count) for one in held.stored[skipped:]]),
        "bytes": (late, [float(one.size) for one in held.stored[skipped:]]),
        "step time": (at[int(len(at) * _SKIPPED) :], step_s[int(len(at) * _SKIPPED) :]),
    }
    return {name: trend(times, values) for name, (times, values) in counted.items()}


def report(found: dict[str, Soaked], every_s: float) -> str:
    """The tables."""
    head = [
        *("topology", "minutes", "recoveries", "lost", "goodput"),
        *_TOLERATED,
        *("history, files per recovery", "history, bytes per recovery", "of later / of earlier ones"),
    ]
    rows = [
        [
            name,
            f"{one.seconds / 60:.1f}",
            str(one.recoveries),
            f"{one.lost_s:.1f} s",
            f"{one.goodput:.3f}",
            *(_growth(kind, one.trends[kind]) for kind in _TOLERATED),
            f"{one.history:.1f}",
            format_bytes(round(one.history_bytes)),
            f"{one.later_history:.2f}",
        ]
        for name, one in found.items()
    ]
    different = sum(not one.identical for one in found.values())
    missed = sum(one.asked - one.recoveries for one in found.values())
    grown = [f"{kind} of {name}" for name, one in found.items() for kind in one.grows()]
    minutes = sum(one.seconds for one in found.values()) / 60
    targets = [
        Target("minutes with failures", ">= 60", f"{minutes:.1f}", minutes >= 60),
        Target("trainings that end with other bits", "0", str(different), different == 0),
        Target("failures without a recovery of their own", "0", str(missed), missed == 0),
        Target("counts that grow", "0", f"{len(grown)}", not grown),
        Target(
            "bytes of history for each recovery",
            f"<= {format_bytes(_HISTORY)}",
            format_bytes(round(most := max(one.history_bytes for one in found.values()))),
            most <= _HISTORY,
        ),
    ]
    about = (
        f"A machine is killed about every {every_s:g} s of training. Growth is that of a straight line over "
        f"the last {1 - _SKIPPED:.0%} of each training, of all processes together that live through it. "
        "Goodput is the time of the undisturbed run / that of the disturbed one."
    )
    notes = [f"- grows: {what}" for what in grown]
    return "\n\n".join(
        [about, table(head, rows), *(["\n".join(notes)] if notes else []), target_table(targets)]
    )


def _growth(kind: str, found: Trend) -> str:
    match kind:
        case "memory":
            return f"{format_bytes(found.median * 1024)} {found.growth / found.median:+.1%}"
        case "bytes":
            return f"{format_bytes(found.median)} {found.growth / found.median:+.1%}"
        case "step time":
            return f"{1e3 * found.median:.1f} ms {found.growth / found.median:+.1%}"
    return f"{found.median:.0f} {found.growth:+.1f}"


def _in_words(one: Soaked) -> str:
    same = "identical" if one.identical else "OTHER BITS"
    grows = ", ".join(one.grows()) or "nothing"
    return f"{same}, {one.recoveries} recoveries, goodput {one.goodput:.3f}; grows: {grows}"


def _facts(one: Soaked) -> dict[str, object]:
    return {
        "identical": one.identical,
        "recoveries": one.recoveries,
        "goodput": one.goodput,
        "grows": one.grows(),
    }


if __name__ == "__main__":
    sys.exit(main())
