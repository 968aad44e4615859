"""The main job: a pipeline loses a machine to SIGKILL, rebuilds it from the log, and nothing else changes.

1. Four machines train a GPT; machine 1 dies in the middle of iteration 47, and is replaced.
2. The same training runs undisturbed; the final weights of both are compared bit for bit.
3. The same failure under torchrun with DCP checkpoints; the demo prints both times side by side.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from examples.commands import CommandError  # before torch: it sets how much torch logs

# isort: split
import torch
from rich.console import Console
from rich.table import Table

from examples.disturbed import Failure, SwiftOutcome, TorchrunOutcome, plain, swift
from swift_ft.cli.live import show
from swift_ft.cli.watch import Watch
from swift_ft.units import format_bytes, format_seconds

ITERATIONS = 60


def main() -> int:
    """Runs the demo and prints its results. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print only JSON to stdout, and the progress to stderr"
    )
    args = parser.parse_args()

    def demo(folder: Path, console: Console) -> int:
        began = time.monotonic()
        report = run(Failure(), folder, console)
        report["demo_s"] = round(time.monotonic() - began, 1)
        if args.json:
            print(json.dumps(report, indent=1))
        else:
            print_report(report, console)
        return 0 if report["ok"] else 1

    return run_demo(demo, Console(stderr=args.json))


def run_demo(demo: Callable[[Path, Console], int], console: Console) -> int:
    """Runs a demo in a temporary folder, which is removed whatever happens. Returns the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="swift-demo-") as name:
            return demo(Path(name), console)
    except CommandError as error:
        console.print(str(error), markup=False, style="red")
        return 1
    except KeyboardInterrupt:
        console.print("stopped", style="red")
        return 130


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def run(failure: Failure, folder: Path, console: Console) -> dict[str, Any]:
    """The three runs, one after the other. Returns all results, JSON-ready."""

    def live_view(watch: Watch, running: Callable[[], bool]) -> None:
        show(watch, console, running)

    def head(text: str) -> None:
        console.rule(f"[bold]{text}", align="left")

    head(f"1 of 3: four machines train; machine {failure.machine} dies in iteration {failure.kill_iteration}")
    outcome = swift(failure, ITERATIONS, folder / "killed", show=live_view)
    head("2 of 3: the same training, undisturbed")
    swift(failure, ITERATIONS, folder / "undisturbed", kill=False, show=live_view)
    head("3 of 3: the same failure under torchrun with DCP checkpoints")
    with console.status("all workers restart from the checkpoint ..."):
        ordinary = plain(failure, folder / "torchrun")
    compared, different = compare_weights(folder / "killed" / "weights", folder / "undisturbed" / "weights")
    return build_report(failure, outcome, ordinary, compared, different)


def compare_weights(one: Path, other: Path) -> tuple[int, list[str]]:
    """Compares the final weights of all ranks, bit for bit.

    Returns:
        How many tensors there are, and the names of those that differ or exist only once.
    """
    compared, different = 0, []
    names = {path.name for folder in (one, other) for path in folder.glob("rank*.pt")}
    for name in sorted(names):
        if not (one / name).exists() or not (other / name).exists():
            different.append(name)
            continue
        a, b = (torch.load(folder / name, weights_only=True) for folder in (one, other))
        compared += len(a)
        for key in sorted(a.keys() | b.keys()):
            if key not in a or key not in b or not same_bits(a[key], b[key]):
                different.append(f"{name}:{key}")
    return compared, different


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes; unlike ``==`` also where they are NaN."""
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def build_report(
    failure: Failure, outcome: SwiftOutcome, ordinary: TorchrunOutcome, compared: int, different: list[str]
) -> dict[str, Any]:
    """All that the demo prints, as JSON."""
    recovery = outcome.recoveries[0] if outcome.recoveries else {}
    timeline = outcome.timeline()
    back_s = timeline.get("live")
    ordinary_s = ordinary.timeline()["back"]
    identical = compared > 0 and not different
    return {
        "ok": identical and outcome.replayed,
        "weights_identical": identical,
        "tensors_compared": compared,
        "tensors_different": different,
        "killed_machine": failure.machine,
        "killed_iteration": failure.kill_iteration,
        "recovery": {
            "mode": recovery.get("mode", "none"),
            "reason": recovery.get("reason", ""),
            "detected_by": recovery.get("reasons", []),
            "seconds_after_kill": {name: round(at, 3) for name, at in timeline.items()},
            "replayed_iterations": sum(recovery.get("replayed_iterations", {}).values()),
            "helpers": recovery.get("helpers", []),
            "iterations_lost": recovery.get("iterations_lost", {}),
        },
        "bytes_logged": {
            "total": sum(outcome.bytes_logged.values()),
            "by_rank": {str(rank): count for rank, count in sorted(outcome.bytes_logged.items())},
        },
        "torchrun": {
            "seconds_after_kill": {name: round(at, 3) for name, at in ordinary.timeline().items()},
            "iterations_lost": ordinary.iterations_lost,
        },
        "back_s": {"swift_ft": back_s, "torchrun": ordinary_s},
        "ratio": ordinary_s / back_s if back_s else None,
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """The results, for people."""
    recovery, machine = report["recovery"], report["killed_machine"]
    console.rule("[bold]What happened", align="left")
    _print_timeline(recovery, machine, console)
    console.print()
    facts = Table.grid(padding=(0, 2))
    lost = ", ".join(f"machine {rank}: {n}" for rank, n in sorted(recovery["iterations_lost"].items()))
    facts.add_row("completed iterations lost", lost or "-")
    by_rank = report["bytes_logged"]["by_rank"]
    total = format_bytes(report["bytes_logged"]["total"])
    each = ", ".join(format_bytes(n) for n in by_rank.values())
    facts.add_row("bytes logged by the final workers", f"{total} ({each})")
    verdict = "[bold green]yes" if report["weights_identical"] else "[bold red]no"
    facts.add_row("weights identical", f"{verdict}[/] ({report['tensors_compared']} tensors, bit for bit)")
    console.print(facts)
    for name in report["tensors_different"][:5]:
        console.print(f"  differs: {name}", style="red")
    console.print()
    _print_side_by_side(report, console)
    console.print(f"\nweights identical: {'yes' if report['weights_identical'] else 'no'}", highlight=False)
    if recovery["mode"] != "replay":
        console.print(f"the recovery was no replay: {recovery['mode']} {recovery['reason']}", style="red")


def _print_timeline(recovery: dict[str, Any], machine: int, console: Console) -> None:
    at = recovery["seconds_after_kill"]
    steps = [
        ("detected", f"the death is known: {'; '.join(recovery['detected_by'])}"),
        ("joined", "a replacement has joined"),
        ("reported", "all groups are torn down, all workers have reported their status"),
        ("loaded", "the replacement has loaded its part of the checkpoint"),
        ("replayed", f"{recovery['replayed_iterations']} iterations are replayed"),
        ("live", "all are live again, in the interrupted iteration"),
        ("done", "the interrupted iteration is done"),
    ]
    console.print(f"Recovery of machine {machine}, seconds after its SIGKILL")
    for name, words in steps:
        if name in at:
            console.print(f"{at[name]:8.3f}  {words}", highlight=False)
    if not at:
        console.print("  there was none, or it was no replay", style="red")


def _print_side_by_side(report: dict[str, Any], console: Console) -> None:
    times = report["back_s"]
    console.print(f"From the kill until training is back in iteration {report['killed_iteration']}")
    table = Table.grid(padding=(0, 2))
    longest = max(t for t in times.values() if t)
    lost = report["torchrun"]["iterations_lost"]
    helpers = len(report["recovery"]["helpers"])
    for name, words in (
        ("swift_ft", f"one machine replays, {helpers} help{'s' * (helpers == 1)}"),
        ("torchrun", f"all repeat {lost} iterations"),
    ):
        if times[name]:
            bar = "█" * max(1, round(24 * times[name] / longest))
            table.add_row(f"  {name}", format_seconds(times[name]), bar, words)
    console.print(table)
    if report["ratio"]:
        console.print(f"  {report['ratio']:.1f} times faster", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
