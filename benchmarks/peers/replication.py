"""One of two DDP workers dies: ours against torchft and against torchrun with DCP checkpoints.

The same GPT, data and optimizer under each, in turns:
  plain DDP       torchrun without a failure: the cost of a step without protection
  swift_ft        swift-run; the machine of worker 1 dies, a spare takes its place
  torchft         0.2 with its defaults, and with all timeouts at 1 s; a torchrun for each replica
  torchrun + DCP  all workers restart from a checkpoint

The worker kills itself in the middle of a backward, and notes the time just before. Every process notes when
each of its steps began and ended; the first steps of a run are not timed. A repetition takes about three
minutes on two cores. Run it on an idle machine (see overhead.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    machine,
    of_repetitions,
    record,
    table,
    target_table,
)
from benchmarks.peers.runs import (
    DCP,
    OURS,
    PLAIN,
    TORCHFT_DEFAULT,
    TORCHFT_FAST,
    TORCHFT_STOCK,
    TORCHFT_VERSION,
    Contender,
    Outcome,
    Setting,
    run,
    survivor_crashes,
    why_no_torchft,
)
from examples.commands import CommandError

TORCHFT = (TORCHFT_DEFAULT, TORCHFT_FAST)
Repetition = dict[str, Outcome]
"""By the contender's name."""

ROWS: dict[str, Callable[[Outcome], float | None]] = {
    "failure-free step": lambda outcome: median(outcome.step_s),
    "CPU time of worker 0 in it": lambda outcome: median(outcome.cpu_s),
    "a checkpoint takes": lambda outcome: median(outcome.saves_s) if outcome.saves_s else None,
    "kill to replacement joined": lambda outcome: outcome.after_kill.get("joined"),
    "kill to all back in the interrupted iteration": lambda outcome: outcome.after_kill.get("back"),
    "kill to the survivor's next completed step": lambda outcome: outcome.after_kill.get("survivor"),
    "kill to the replacement's first completed step": lambda outcome: outcome.after_kill.get("replacement"),
    "recovery as the paper counts it: joined to all back": lambda outcome: paper_recovery_s(outcome),
    "completed steps lost": lambda outcome: outcome.lost,
    "steps of the survivor alone, with half a batch": lambda outcome: outcome.alone,
}
STEP_ROWS = ("failure-free step", "CPU time of worker 0 in it")
COUNTS = ("completed steps lost", "steps of the survivor alone, with half a batch")
SHORTER = 0.989
OVERHEAD = 1.01
BACK_S = 0.15
NEXT_S = 0.2
"""Until the survivor has completed its next step, less the time of one step."""
OF_TUNED = 0.6


def main() -> int:
    """Runs the contenders in turns and prints the report."""
    args = parse_arguments()
    setting = Setting(
        kill_iteration=args.kill_iteration,
        checkpoint_every=50,
        lost=args.lost,
        options=("--microbatch-size", str(args.microbatch_size)),
        warm_up=args.warm_up,
        deadline_s=args.deadline,
    )
    no_torchft = why_no_torchft()
    contenders = [PLAIN, OURS, *(() if no_torchft else TORCHFT), DCP]
    repetitions: list[Repetition] = []
    try:
        stock = None if no_torchft else measure_stock_hook(setting)
        for number in range(args.repetitions):
            turn = number % len(contenders)
            repetitions.append(measure(contenders[turn:] + contenders[:turn], setting, number + 1))
    except CommandError as error:
        print(f"replication.py: {error}", file=sys.stderr)
        return 1
    targets = judge(repetitions, no_torchft)
    body = report(contenders, setting, repetitions, targets, torchft_in_words(no_torchft, stock))
    if args.json:
        print(json.dumps(as_json(setting, repetitions, targets, no_torchft, stock), indent=1))
    else:
        print(body)
    if args.record:
        record("replication", body, args)
    return 0


def parse_arguments() -> argparse.Namespace:
    """The command line, with its limits checked."""
    parser = argument_parser(__doc__, repetitions=3)
    add = parser.add_argument
    add("--kill-iteration", type=int, default=54, metavar="N", help="default: %(default)s")
    add("--lost", type=int, default=49, help="iterations since the DCP checkpoint, default: %(default)s")
    add("--warm-up", type=int, default=5, help="first steps that are not timed, default: %(default)s")
    add("--microbatch-size", type=int, default=2, help="8 of them are a batch, default: %(default)s")
    add("--deadline", type=float, default=300.0, metavar="S", help="for one run, default: %(default)s")
    args = parser.parse_args()
    if not 0 < args.lost <= args.kill_iteration or args.lost >= 50:
        parser.error("--lost must be between 1 and 49, and not more than --kill-iteration")
    if args.warm_up + 2 > args.kill_iteration:
        parser.error("--kill-iteration leaves no step to time: make it larger than --warm-up + 1")
    if args.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    return args


# ------------------------------------------------------------------------------------------------ measuring


def measure(contenders: Sequence[Contender], setting: Setting, number: int) -> Repetition:
    """All contenders in this order, once. Failed runs of torchft are printed and skipped."""
    found: Repetition = {}
    for contender in contenders:
        with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
            try:
                found[contender.name] = outcome = run(contender, setting, Path(name) / "run")
            except CommandError as error:
                if contender not in TORCHFT:
                    raise
                print(f"# {number}, {contender.name} failed: {error}", file=sys.stderr, flush=True)
                continue
        times = ", ".join(f"{name} {value:.2f} s" for name, value in outcome.after_kill.items())
        text = f"step {median(outcome.step_s):.4f} s; {times}"
        print(f"# {number}, {contender.name}: {text}", file=sys.stderr, flush=True)
    return found


def measure_stock_hook(setting: Setting) -> bool:
    """Whether the survivor dies too with torchft's unchanged DDP."""
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        early = replace(setting, kill_iteration=setting.warm_up + 2)
        crashes = survivor_crashes(TORCHFT_STOCK, early, Path(name) / "run")
    print(
        f"# {TORCHFT_STOCK.name}: the survivor {'dies' if crashes else 'lives'}", file=sys.stderr, flush=True
    )
    return crashes


def paper_recovery_s(outcome: Outcome) -> float | None:
    """The paper's recovery time: from the replacement's joining to the iteration of the failure."""
    times = outcome.after_kill
    return times["back"] - times["joined"] if "back" in times else None


# -------------------------------------------------------------------------------------------------- judging


def summaries(repetitions: Sequence[Repetition], contender: Contender) -> dict[str, Summary]:
    """One contender's rows; those that it has no numbers for are left out."""
    runs = [repetition[contender.name] for repetition in repetitions if contender.name in repetition]
    values = {row: [value for one in runs if (value := read(one)) is not None] for row, read in ROWS.items()}
    return {row: Summary.of(found) for row, found in values.items() if found}


def ratio(
    repetitions: Sequence[Repetition],
    above: Contender,
    below: Contender,
    read: Callable[[Outcome], float | None],
) -> Summary | None:
    """The ratio within each repetition; None where none has both."""
    pairs = [
        (read(r[above.name]), read(r[below.name]))
        for r in repetitions
        if {above.name, below.name} <= r.keys()
    ]
    found = [a / b for a, b in pairs if a is not None and b is not None]
    return Summary.of(found) if found else None


def judge(repetitions: Sequence[Repetition], no_torchft: str | None) -> list[Target]:
    """What was asked for, against the medians of ratios."""
    step, back = ROWS["failure-free step"], ROWS["kill to all back in the interrupted iteration"]
    targets = [
        at_most("failure-free step, ours / plain DDP", ratio(repetitions, OURS, PLAIN, step), OVERHEAD)
    ]
    for contender in () if no_torchft else TORCHFT:
        targets.append(
            below_one(
                f"failure-free step, ours / {contender.name}", ratio(repetitions, OURS, contender, step)
            )
        )
    targets += [
        shorter("from the kill until all are back", ratio(repetitions, OURS, DCP, back)),
        shorter("as the paper counts it", ratio(repetitions, OURS, DCP, paper_recovery_s)),
    ]
    ours = [repetition[OURS.name] for repetition in repetitions]
    targets += [
        at_most_s("kill to all back", [back(one) for one in ours], BACK_S),
        at_most_s(
            "kill to the survivor's next completed step, less one step", map(_beyond_a_step, ours), NEXT_S
        ),
    ]
    if not no_torchft:
        survivor = ROWS["kill to the survivor's next completed step"]
        targets.append(
            at_most(
                f"kill to the survivor's next completed step, ours / {TORCHFT_FAST.name}",
                ratio(repetitions, OURS, TORCHFT_FAST, survivor),
                OF_TUNED,
            )
        )
    for row in (row for row in ROWS if row.endswith("completed step")):
        for contender in () if no_torchft else TORCHFT:
            targets.append(
                below_one(f"{row}, ours / {contender.name}", ratio(repetitions, OURS, contender, ROWS[row]))
            )
    return targets


def at_most(name: str, found: Summary | None, limit: float) -> Target:
    """A ratio's target."""
    return Target(name, f"<= {limit}", in_words(found), found is not None and found.median <= limit)


def at_most_s(name: str, seconds: Iterable[float | None], limit: float) -> Target:
    """The same for our own time."""
    found = Summary.of([one for one in seconds if one is not None])
    return Target(name, f"<= {limit} s", found.text(), found.median <= limit)


def _beyond_a_step(outcome: Outcome) -> float | None:
    survivor = outcome.after_kill.get("survivor")
    return None if survivor is None else survivor - median(outcome.step_s)


def below_one(name: str, found: Summary | None) -> Target:
    """Less than the other contender's."""
    return Target(name, "< 1", in_words(found), found is not None and found.median < 1)


def shorter(name: str, found: Summary | None) -> Target:
    """The paper's figure, from the ratio of two recoveries."""
    percents = [100 * (1 - one) for one in (found.median, found.high, found.low)] if found else []
    measured = Summary(*percents).text(" %", 1) if percents else "not measured"
    met = found is not None and 1 - found.median >= SHORTER
    return Target(f"recovery shorter than {DCP.name}'s, {name}", f">= {100 * SHORTER:.1f} %", measured, met)


def in_words(found: Summary | None) -> str:
    """A ratio, where there is one."""
    return "not measured" if found is None else found.text("")


# ------------------------------------------------------------------------------------------------ reporting


def report(
    contenders: Sequence[Contender],
    setting: Setting,
    repetitions: Sequence[Repetition],
    targets: Sequence[Target],
    about_torchft: str,
) -> str:
    """All results as Markdown."""
    columns = [summaries(repetitions, contender) for contender in contenders]
    rows = [[row, *(cell(row, column.get(row)) for column in columns)] for row in ROWS]
    intro = (
        "Two workers with the GPT of `examples/` in DDP (gloo, AdamW), each with half of every batch; worker "
        f"1 gets SIGKILL in the middle of iteration {setting.kill_iteration}'s backward. {DCP.name} has a "
        f"checkpoint every {setting.checkpoint_every} steps, the last one {setting.lost} completed steps "
        "before the kill; no worker survives there (its survivor is worker 0), and the replacement's "
        "first step is one of those that are repeated. Ours loses the whole machine (its agent too) and has "
        "a spare that has torch imported; the others lose the process, and their launchers start Python "
        "again. Only DCP makes "
        f"checkpoints. {of_repetitions(len(repetitions))}; ratios are within each repetition."
    )
    counts = {contender.name: sum(contender.name in one for one in repetitions) for contender in contenders}
    for name, count in counts.items():
        if count < len(repetitions):
            about_torchft += f" {name}: {len(repetitions) - count} of {len(repetitions)} runs failed."
    figures = table(["", *(contender.name for contender in contenders)], rows)
    return f"{intro}\n\n{about_torchft}\n\n{figures}\n\n{target_table(list(targets))}"


def cell(row: str, found: Summary | None) -> str:
    """One figure of the table."""
    if found is None:
        return ""
    if row in COUNTS:
        return found.text("", 0)
    return found.text(" s", 4 if row in STEP_ROWS else 3)


def torchft_in_words(no_torchft: str | None, stock_crashes: bool | None) -> str:
    """What a reader must know about torchft's figures."""
    if no_torchft:
        return f"torchft was not measured: {no_torchft}."
    too = "died too" if stock_crashes else "lived"
    return (
        f"torchft {TORCHFT_VERSION} with a lighthouse, a Manager with `min_replica_size=1`, its DDP and its "
        "Optimizer. Its DDP's communication hook is patched: with gloo, `wait()` raises when the peer is "
        "killed, before the future that the hook returns is set, and the hook fails. Tried here with the "
        f"stock hook, the survivor {too}. *timeouts 1 s*: those of Manager, process group, heartbeats and "
        "joining; all else is torchft's default. The survivor discards the interrupted step and continues "
        "alone, with half of each batch, until the replacement is there. In the step in which the "
        "replacement gets the state its own gradients do not count yet; it is taken here as its first."
    )


def as_json(
    setting: Setting,
    repetitions: Sequence[Repetition],
    targets: Sequence[Target],
    no_torchft: str | None,
    stock_crashes: bool | None,
) -> dict[str, Any]:
    """All results as JSON."""
    names = [contender.name for contender in (PLAIN, OURS, *TORCHFT, DCP)]
    return {
        "machine": machine(),
        "setting": asdict(setting),
        "torchft": {"not_measured": no_torchft, "stock_hook_survivor_dies": stock_crashes},
        "repetitions": [{name: asdict(run) for name, run in one.items()} for one in repetitions],
        "runs": {name: sum(name in one for one in repetitions) for name in names},
        "targets": [target.to_dict() for target in targets],
    }


if __name__ == "__main__":
    sys.exit(main())
