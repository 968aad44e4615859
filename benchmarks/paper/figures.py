"""Redraws the paper's figures 9 to 11 and its table 3 for this machine, from measured runs.

  figure 9   failure-free throughput and recovery time: replication against global checkpoints in data
             parallelism, logging by groups against global checkpoints in a pipeline
  figure 10  throughput over time around the failure
  figure 11  recovery time against the log's size, by number of groups, with the forecast of session.plan()
  table 3    bytes logged per iteration, from the sessions' counters and from §5.4's formula

All variants meet the same failure, in turns; PNG and JSON go to --out. The report also has the numbers that
the paper states (paper/published.py). CheckFreq, Elastic Horovod and synchronous logging are not measured. A
repetition takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib.results import (
    BENCHMARKS,
    Summary,
    Target,
    argument_parser,
    finish,
    machine,
    of_repetitions,
    run_benchmark,
    table,
    target_table,
)
from benchmarks.paper import published
from benchmarks.paper.draw import Bar, Marker, figure_9, figure_10, figure_11
from benchmarks.paper.variants import CHECKPOINT, PIPELINES, Run, Variant
from benchmarks.peers.runs import DCP, OURS, PLAIN, Contender, Outcome, Setting, run
from examples.disturbed import Failure
from swift_ft.planning.advisor import boundary_bytes
from swift_ft.planning.grouping.groups import evaluate_groups
from swift_ft.planning.presets import preset_profile

MICROBATCHES, MICROBATCH_SIZE, SEQUENCE, WIDTH = 8, 2, 128, 192  # of the example
SIZE = ("--microbatch-size", str(MICROBATCH_SIZE))
BATCH = MICROBATCHES * MICROBATCH_SIZE
REPLICAS = (PLAIN, DCP, OURS)
PAPER_MACHINES = 16
_PICTURE = "[Figure {0}](figures/figure-{0}.png)."


@dataclass
class Samples:
    """All runs, by name, in the order of the repetitions."""

    pipelines: dict[str, list[Run]] = field(default_factory=dict)
    replicas: dict[str, list[Outcome]] = field(default_factory=dict)


def main() -> int:
    """Measures, draws the figures and prints the report."""
    args = parse_arguments()
    failure = Failure(2 * args.distance + 1, args.distance + 1, options=SIZE)
    setting = Setting(failure.kill_iteration, 50, args.distance, SIZE, warm_up=5, deadline_s=300.0)
    samples = Samples()
    for repetition in range(args.repetitions):
        measure(repetition, failure, setting, samples)
    args.out.mkdir(parents=True, exist_ok=True)
    markers = draw(samples, failure, args.out)
    targets = judge(samples)
    results = as_json(samples, failure, markers, targets, args.note)
    (args.out / "figures.json").write_text(json.dumps(results, indent=1) + "\n")
    body = report(samples, failure, markers, targets, args.note)
    return finish("paper", body, results, args)


def parse_arguments() -> argparse.Namespace:
    """The command line, with its limits checked."""
    parser = argument_parser(__doc__, repetitions=2)
    add = parser.add_argument
    add("--distance", type=int, default=8, help="iterations from checkpoint to kill, default: %(default)s")
    add("--out", type=Path, default=BENCHMARKS / "figures", help="folder, default: %(default)s")
    add("--note", default="", help="a sentence about the circumstances, for the results")
    args = parser.parse_args()
    if args.distance < 7 or args.repetitions < 1:
        parser.error("--distance must be at least 7, since a profile takes a few iterations; --repetitions 1")
    if args.distance > 49:
        parser.error("--distance must be at most 49: DDP's checkpoints are 50 apart")
    return args


# ------------------------------------------------------------------------------------------------ measuring


def measure(repetition: int, failure: Failure, setting: Setting, samples: Samples) -> None:
    """All variants once, beginning with another one in each repetition."""
    for variant in _turned(PIPELINES, repetition):
        found = _in_a_folder(partial(variant.build, failure))
        samples.pipelines.setdefault(variant.name, []).append(found)
        print(
            f"# {repetition + 1}, {variant.name}: {found.mode}, iteration {found.iteration_s:.3f} s, joined "
            f"after {found.joined_s:.2f} s, recovery {found.recovery_s:.2f} s, {found.logged_bytes} bytes",
            file=sys.stderr,
            flush=True,
        )
    for contender in _turned(REPLICAS, repetition):
        outcome = _in_a_folder(partial(run, contender, setting))
        samples.replicas.setdefault(contender.name, []).append(outcome)
        times = ", ".join(f"{name} {value:.2f} s" for name, value in outcome.after_kill.items())
        text = f"step {median(outcome.step_s):.3f} s; {times}"
        print(f"# {repetition + 1}, {contender.name}: {text}", file=sys.stderr, flush=True)


def _turned(variants: Sequence[Any], repetition: int) -> Sequence[Any]:
    turn = repetition % len(variants)
    return [*variants[turn:], *variants[:turn]]


def _in_a_folder(build: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as name:
        return build(Path(name) / "run")


# ------------------------------------------------------------------------------------------------- figures


def draw(samples: Samples, failure: Failure, folder: Path) -> list[Marker]:
    """All figures; returns the markers of figure 11."""
    panels = {
        "data parallelism: DDP on 2 machines": _replica_bars(samples),
        "pipeline of 4 machines": _pipeline_bars(samples),
    }
    figure_9(panels, folder / "figure-9.png")
    figure_10({v.name: samples.pipelines[v.name][0] for v in PIPELINES}, BATCH, folder / "figure-10.png")
    markers = [_marker(v, samples.pipelines[v.name], failure) for v in PIPELINES if v.groups is not None]
    figure_11(markers, folder / "figure-11.png")
    return markers


def _replica_bars(samples: Samples) -> tuple[list[Bar], list[Bar]]:
    # Both workers' halves of a batch together.
    throughput = [
        Bar(
            contender.name,
            Summary.of([BATCH / median(one.step_s) for one in samples.replicas[contender.name]]),
        )
        for contender in REPLICAS
    ]
    recovery = [
        Bar(DCP.name, Summary.of(_replica_recoveries(samples, DCP))),
        Bar(OURS.name, Summary.of(_replica_recoveries(samples, OURS)), _shorter(*replica_shares(samples))),
    ]
    return throughput, recovery


def _replica_recoveries(samples: Samples, contender: Contender) -> list[float]:
    found = [outcome.recovery_s for outcome in samples.replicas[contender.name]]
    return [seconds for seconds in found if seconds is not None]


def _pipeline_bars(samples: Samples) -> tuple[list[Bar], list[Bar]]:
    throughput, recovery = [], []
    for variant in PIPELINES:
        runs = samples.pipelines[variant.name]
        words = "" if variant == CHECKPOINT else _shorter(*pipeline_shares(samples, variant))
        throughput.append(Bar(variant.name, Summary.of([BATCH / one.iteration_s for one in runs])))
        recovery.append(Bar(variant.name, Summary.of([one.recovery_s for one in runs]), words))
    return throughput, recovery


def replica_shares(samples: Samples) -> tuple[Summary, dict[str, float]]:
    """By how many percent recovery was shorter within each repetition, and the paper's numbers."""
    pairs = zip(_replica_recoveries(samples, OURS), _replica_recoveries(samples, DCP), strict=True)
    return _percents(pairs), published.SHORTER_PERCENT["replication"]


def pipeline_shares(samples: Samples, variant: Variant) -> tuple[Summary, dict[str, float]]:
    """The same, of a variant against the global checkpoint."""
    pairs = zip(samples.pipelines[variant.name], samples.pipelines[CHECKPOINT.name], strict=True)
    found = _percents((ours.recovery_s, theirs.recovery_s) for ours, theirs in pairs)
    return found, published.SHORTER_PERCENT.get(variant.published, {})


def _percents(pairs: Any) -> Summary:
    return Summary.of([100 * (1 - ours / theirs) for ours, theirs in pairs])


def _shorter(found: Summary, paper: dict[str, float]) -> str:
    beside = " / ".join(f"-{percent:g}" for percent in paper.values())
    return f"{-found.median:+.1f} %" + (f"\n(paper: {beside} %)" if beside else "")


def _marker(variant: Variant, runs: Sequence[Run], failure: Failure) -> Marker:
    assert variant.groups is not None
    return Marker(
        groups=variant.groups,
        log_bytes=runs[0].logged_bytes * failure.checkpoint_every,
        measured=Summary.of([one.recovery_s for one in runs]),
        planned=Summary.of([_planned_s(one, failure) for one in runs]),
    )


def _planned_s(one: Run, failure: Failure) -> float:
    """What the session's plan forecasts for this machine, scaled to the iterations that were lost."""
    forecast = one.plan["machines"][failure.machine]
    return float(forecast["load_s"] + forecast["again_s"] * one.again / (failure.checkpoint_every / 2))


# -------------------------------------------------------------------------------------------------- table 3


def paper_log_bytes(model: str, groups: int) -> int:
    """§5.4's formula with the shapes of one of the paper's models, and groups of equal size (§5.3)."""
    profile = preset_profile(published.TABLE_3_PRESETS[model])
    size = PAPER_MACHINES // groups
    members = [range(first, first + size) for first in range(0, PAPER_MACHINES, size)]
    return evaluate_groups(profile, members, checkpoint_interval=1, bandwidth=1.0).log_bytes


def own_log_bytes(groups: int) -> int:
    """The same for the example."""
    return (groups - 1) * boundary_bytes(
        microbatches=MICROBATCHES, microbatch_size=MICROBATCH_SIZE, sequence=SEQUENCE, hidden=WIDTH
    )


def judge(samples: Samples) -> list[Target]:
    """The bytes must match the formula exactly."""
    targets = [
        Target(
            f"{model}, {groups} groups: §5.4's formula", f"{gb} GB", f"{size:.2f} GB", round(size, 2) == gb
        )
        for model, rows in published.TABLE_3.items()
        for groups, (gb, _) in rows.items()
        for size in [paper_log_bytes(model, groups) / 1e9]
    ]
    for variant in PIPELINES:
        if variant.groups is not None:
            formula = own_log_bytes(variant.groups)
            counted = {one.logged_bytes for one in samples.pipelines[variant.name]}
            words = ", ".join(f"{size} bytes" for size in sorted(counted))
            name = f"the example, {variant.name}: counted in the run"
            targets.append(Target(name, f"{formula} bytes", words, counted == {formula}))
    return targets


# ------------------------------------------------------------------------------------------------ reporting


def report(
    samples: Samples, failure: Failure, markers: Sequence[Marker], targets: Sequence[Target], note: str
) -> str:
    """All results as Markdown."""
    count = len(samples.pipelines[CHECKPOINT.name])
    intro = (
        f"The GPT of `examples/` ({' '.join(SIZE)}; gloo, AdamW) on machines of one host, a checkpoint every "
        f"{failure.checkpoint_every} iterations; machine {failure.machine} gets SIGKILL "
        f"{failure.distance} iterations after one. {of_repetitions(count)}, "
        "ratios within each. Recovery time is the paper's: from the replacement's joining until all are back "
        "in the interrupted iteration. For swift_ft the machine joins, so that the start of its script is in "
        "the recovery time; for torchrun the workers do, and starting Python again is not. "
        f"In the paper: {published.SCHEDULE}, on {published.TESTBED}. {note}"
    )
    forecast = (
        f"{_PICTURE.format(11)} {published.FIGURE_11_WORDS} *Forecast* is what `session.plan()` said in "
        "the same run, for as many iterations as were lost."
    )
    bandwidth = (
        "Table 3. The bandwidth is bytes over the bubbles of the workers that log; the paper "
        "does not say how it counts it."
    )
    parts = (
        *(intro.strip(), _PICTURE.format(9), _figure_9_table(samples), published.FIGURE_9_WORDS),
        f"{_PICTURE.format(10)} {published.FIGURE_10_WORDS}",
        *(_figure_11_table(markers), forecast),
        *(bandwidth, _table_3(samples), target_table(list(targets))),
    )
    return "\n\n".join(parts)


def _figure_9_table(samples: Samples) -> str:
    head = ["", "sequences / s", "kill to joined", "recovery", "shorter by", "in the paper"]
    rows = []
    for contender in REPLICAS:
        runs = samples.replicas[contender.name]
        cells = [Summary.of([BATCH / median(one.step_s) for one in runs]).text("", 2)]
        if contender != PLAIN:
            cells.append(Summary.of([one.after_kill["joined"] for one in runs]).text(digits=2))
            cells.append(Summary.of(_replica_recoveries(samples, contender)).text(digits=2))
        rows.append(
            _padded(
                [f"DDP: {contender.name}", *cells, *_share_cells(contender == OURS, replica_shares, samples)]
            )
        )
    for variant in PIPELINES:
        replays = samples.pipelines[variant.name]
        cells = [
            Summary.of([BATCH / one.iteration_s for one in replays]).text("", 2),
            Summary.of([one.joined_s for one in replays]).text(digits=2),
            Summary.of([one.recovery_s for one in replays]).text(digits=2),
        ]
        shares = _share_cells(variant != CHECKPOINT, pipeline_shares, samples, variant)
        rows.append(_padded([f"pipeline: {variant.name}", *cells, *shares]))
    return table(head, rows)


def _share_cells(
    compared: bool, read: Callable[..., tuple[Summary, dict[str, float]]], *of: Any
) -> list[str]:
    if not compared:
        return []
    found, paper = read(*of)
    return [found.text(" %", 1), ", ".join(f"{model} {percent:g} %" for model, percent in paper.items())]


def _padded(cells: list[str]) -> list[str]:
    return cells + [""] * (6 - len(cells))


def _figure_11_table(markers: Sequence[Marker]) -> str:
    rows = [
        [str(m.groups), f"{m.log_bytes / 1e6:.1f} MB", m.measured.text(digits=2), m.planned.text(digits=2)]
        for m in markers
    ]
    return table(["groups", "log over an interval", "recovery, measured", "forecast"], rows)


def _table_3(samples: Samples) -> str:
    rows = [
        [model, str(groups), f"{paper_log_bytes(model, groups) / 1e9:.2f} GB", f"{gb} GB", f"{rate} GB/s"]
        for model, found in published.TABLE_3.items()
        for groups, (gb, rate) in found.items()
    ]
    for variant in (v for v in PIPELINES if v.groups and v.groups > 1):
        runs = samples.pipelines[variant.name]
        rate = Summary.of([one.logged_bytes / one.logging_bubble_s / 1e6 for one in runs])
        formula = f"{own_log_bytes(variant.groups or 0)} bytes"
        counted = f"{runs[0].logged_bytes} bytes (counted here)"
        rows.append(["the example", str(variant.groups), formula, counted, rate.text(" MB/s (here)", 1)])
    return table(["model", "groups", "formula", "table 3", "bandwidth in bubbles"], rows)


def as_json(
    samples: Samples, failure: Failure, markers: Sequence[Marker], targets: Sequence[Target], note: str
) -> dict[str, Any]:
    """All results as JSON."""
    shares = {v.name: pipeline_shares(samples, v) for v in PIPELINES if v != CHECKPOINT}
    shares[OURS.name] = replica_shares(samples)
    return {
        "machine": machine(),
        "note": note,
        "failure": {**asdict(failure), "script": failure.script.name},
        "pipelines": {name: [asdict(one) for one in runs] for name, runs in samples.pipelines.items()},
        "replicas": {name: [asdict(one) for one in runs] for name, runs in samples.replicas.items()},
        "shorter_percent": {
            name: {"measured": found.to_dict(), "paper": paper} for name, (found, paper) in shares.items()
        },
        "figure_11": [asdict(marker) for marker in markers],
        "targets": [target.to_dict() for target in targets],
        "paper": {"table_3": published.TABLE_3, "shorter_percent": published.SHORTER_PERCENT},
    }


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
