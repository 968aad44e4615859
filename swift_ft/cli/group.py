"""``swift-group``: groups of machines under a storage budget, and whether logging is worth it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from swift_ft.cli.common import OneLineParser, at_most, pyplot, save_plot, unit
from swift_ft.cli.first_help import add_version
from swift_ft.cli.verb import ended
from swift_ft.costs.chain_profile import ChainProfile, read_profile
from swift_ft.errors import UsageError
from swift_ft.planning.advisor import Advice, LoggingQuestion, advise, bubble_ratio
from swift_ft.planning.grouping.groups import (
    METHODS,
    GroupPlan,
    SweepPoint,
    plan_groups,
    sweep_budgets,
    write_groups,
)
from swift_ft.planning.presets import PROFILE_PRESETS, preset_profile
from swift_ft.units import format_bytes, format_seconds, parse_bandwidth, parse_bytes, parse_seconds

_MOST_ITERATIONS = 1_000_000_000
_MOST_POINTS = 10_000
_MOST_STAGES = 65_536
"""And microbatches."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return ended("swift-group", partial(_run, argv))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = OneLineParser(
        prog="swift-group", description="Choose which machines recover together under a storage budget."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--profile", type=Path, help="profile.json, as swift-run --profile-out writes it")
    source.add_argument("--preset", choices=PROFILE_PRESETS, help="shapes of the paper's models")
    parser.add_argument(
        "--budget", type=unit(parse_bytes), help="storage budget of the log: 400GB, 400GiB, 4e11"
    )
    parser.add_argument(
        "--checkpoint-interval",
        type=at_most(_MOST_ITERATIONS),
        required=True,
        help="iterations between checkpoints",
    )
    parser.add_argument(
        "--bandwidth", type=unit(parse_bandwidth), required=True, help="between machines: 5GB/s"
    )
    parser.add_argument(
        "--method", choices=METHODS, default="optimal", help="how to choose (default optimal)"
    )
    parser.add_argument(
        "--parallel-recovery", action="store_true", help="divide replay time by floor(N / |G|)"
    )
    parser.add_argument("--sweep", action="store_true", help="print recovery time for a range of budgets")
    parser.add_argument(
        "--points", type=at_most(_MOST_POINTS), default=32, help="points of the curve (default 32)"
    )
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, help="write groups.json for the session")
    advice = parser.add_argument_group("is logging worth it?", "give all but --bubble to get advice")
    advice.add_argument("--model-bytes", type=unit(parse_bytes), help="parameters and optimizer state")
    advice.add_argument("--iteration-time", type=unit(parse_seconds), help="time of an iteration: 1.5s")
    advice.add_argument("--copy-bandwidth", type=unit(parse_bandwidth), help="device to host, per device")
    advice.add_argument("--stages", type=at_most(_MOST_STAGES), help="stages of the pipeline")
    advice.add_argument("--microbatches", type=at_most(_MOST_STAGES), help="microbatches of an iteration")
    advice.add_argument(
        "--bubble", type=float, help="measured idle share, for schedules other than GPipe and 1F1B"
    )
    add_version(parser)
    return parser


def _run(argv: Sequence[str] | None) -> None:
    args = parser().parse_args(argv)
    if args.budget is None and not (args.sweep or args.plot):
        raise UsageError("give --budget, or --sweep for the whole curve")
    if args.budget is None and args.out:
        raise UsageError("--out needs a --budget")
    profile = read_profile(args.profile) if args.profile else preset_profile(args.preset)
    common = {
        "checkpoint_interval": args.checkpoint_interval,
        "bandwidth": args.bandwidth,
        "method": args.method,
        "parallel_recovery": args.parallel_recovery,
    }
    answer: dict[str, Any] = {}
    console = Console()
    if args.budget is not None:
        plan = plan_groups(profile, budget_bytes=args.budget, **common)
        advice = _advice(args, profile, plan)
        answer = {**plan.to_dict(), **({"advice": advice.to_dict()} if advice else {})}
        if args.out:
            write_groups(plan, args.out)
        if not args.json:
            _print_plan(console, plan)
            _print_advice(console, advice)
    if args.sweep or args.plot:
        curve = sweep_budgets(profile, points=args.points, **common)
        answer["sweep"] = [vars(point) for point in curve]
        if args.plot:
            _plot(curve, args.method, args.plot)
        if args.sweep and not args.json:
            _print_sweep(console, curve)
    if args.json:
        print(json.dumps(answer))


def _advice(args: argparse.Namespace, profile: ChainProfile, plan: GroupPlan) -> Advice | None:
    needed = (args.model_bytes, args.iteration_time, args.copy_bandwidth)
    if all(value is None for value in needed):
        return None
    if any(value is None for value in needed):
        raise UsageError("advice needs --model-bytes, --iteration-time and --copy-bandwidth together")
    if args.bubble is None and (args.stages is None or args.microbatches is None):
        raise UsageError("advice needs --stages and --microbatches, or a measured --bubble")
    bubble = args.bubble if args.bubble is not None else bubble_ratio(args.stages, args.microbatches)
    starts = [group[0] for group in plan.groups[1:]]
    return advise(
        LoggingQuestion(
            log_bytes_per_iteration=plan.log_bytes / plan.checkpoint_interval,
            busiest_sender_bytes=max(
                (profile.boundary_bytes[start - 1] / 2 for start in starts), default=0.0
            ),
            model_bytes=args.model_bytes,
            checkpoint_interval=plan.checkpoint_interval,
            iteration_s=args.iteration_time,
            copy_bandwidth=args.copy_bandwidth,
            bubble=bubble,
            replay_s=plan.expected_recovery_s / (plan.checkpoint_interval / 2),
        )
    )


def _print_plan(console: Console, plan: GroupPlan) -> None:
    table = Table(title=f"{len(plan.groups)} groups, {plan.method}")
    for column in ("group", "machines", "recovery"):
        table.add_column(column, justify="right")
    shown = plan.groups if len(plan.groups) <= 40 else plan.groups[:40]
    for number, group in enumerate(shown):
        machines = str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}"
        table.add_row(str(number), machines, format_seconds(plan.per_machine_recovery_s[group[0]]))
    console.print(table)
    if len(shown) < len(plan.groups):
        console.print(f"... and {len(plan.groups) - len(shown)} more: use --json or --out to get all")
    console.print(f"log: {format_bytes(plan.log_bytes)} of {format_bytes(plan.budget_bytes)}")
    console.print(
        f"expected recovery: {format_seconds(plan.expected_recovery_s)} (half an interval replayed)"
    )
    if plan.gap_s:
        share = plan.gap_s / plan.expected_recovery_s
        console.print(
            f"not proven optimal: another partition could be faster by {100 * share:.2g} % at most "
            f"({plan.gap_s:.3g} s)",
            soft_wrap=True,
        )


def _print_advice(console: Console, advice: Advice | None) -> None:
    if advice is None:
        return
    for reason in advice.reasons:
        console.print(f"- {reason}")
    console.print("Logging is worth it." if advice.worth_it else "Logging is not worth it.")


def _print_sweep(console: Console, curve: Sequence[SweepPoint]) -> None:
    table = Table(title="recovery time against storage")
    for column in ("budget", "log", "groups", "expected recovery"):
        table.add_column(column, justify="right")
    for point in curve:
        cells = (format_bytes(point.budget_bytes), format_bytes(point.log_bytes), str(point.n_groups))
        table.add_row(*cells, format_seconds(point.expected_recovery_s))
    console.print(table)


def _plot(curve: Sequence[SweepPoint], method: str, path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(5, 3.5))
    axes.step(
        [p.budget_bytes / 1e9 for p in curve],
        [p.expected_recovery_s for p in curve],
        where="post",
        marker="o",
    )
    axes.set_xlabel("storage limit [GB]")
    axes.set_ylabel("expected recovery [s]")
    axes.set_title(method)
    save_plot(figure, path)
    plt.close(figure)
