"""How long grouping takes by number of machines, how much memory, and how far greedy is from the optimum.

Prints what it measured on this machine: CPU time of one process with one thread, so that other load does not
count. ``--json`` for programs.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from swift_ft.planning.chain import ChainProfile
from swift_ft.planning.grouping import plan_groups

BANDWIDTH, INTERVAL = 5e9, 100
LIMITS_S = {"greedy": 1.0, "uniform": 10.0, "random": 60.0}  # for 10,000 machines
SHAPES = (  # computation, boundaries
    ("random", "uniform"),
    ("alike", "uniform"),
    ("random", "random"),
    ("within 1 %", "random"),
    ("alike", "random"),
)


@dataclass(frozen=True)
class Row:
    """One chain and budget: CPU seconds of both methods, and what they found."""

    machines: int
    compute: str
    boundaries: str
    parallel_recovery: bool
    budget_share: float
    greedy_s: float
    optimal_s: float
    optimal_limit_s: float
    greedy_above_optimal: float
    gap: float
    peak_mb: float


def pipeline(n: int, compute: str, boundaries: str, seed: int) -> ChainProfile:
    """Made-up chains: computation of 0.5 s, of 0.5 s within 1 %, or of 0.3 to 0.7 s."""
    rng = np.random.default_rng(seed)
    seconds = {
        "alike": np.full(n, 0.5),
        "within 1 %": 0.5 * rng.normal(1.0, 0.01, n),
        "random": rng.uniform(0.3, 0.7, n),
    }[compute]
    sizes = np.full(n - 1, 5 * 10**8) if boundaries == "uniform" else rng.integers(10**8, 10**9, n - 1)
    return ChainProfile(tuple(seconds.tolist()), tuple(sizes.tolist()))


def measure(n: int, shape: tuple[str, str], parallel: bool, part: float, seed: int) -> Row:
    profile = pipeline(n, *shape, seed)
    budget = int(sum(profile.boundary_bytes) * part) * INTERVAL
    plans, seconds = [], []
    for method in ("greedy", "optimal"):
        begin = time.process_time()
        plan = plan_groups(
            profile,
            budget_bytes=budget,
            checkpoint_interval=INTERVAL,
            bandwidth=BANDWIDTH,
            method=method,
            parallel_recovery=parallel,
        )
        seconds.append(time.process_time() - begin)
        plans.append(plan)
    greedy, optimal = plans
    best = optimal.expected_recovery_s
    return Row(
        machines=n,
        compute=shape[0],
        boundaries=shape[1],
        parallel_recovery=parallel,
        budget_share=part,
        greedy_s=seconds[0],
        optimal_s=seconds[1],
        optimal_limit_s=LIMITS_S[shape[1]],
        greedy_above_optimal=greedy.expected_recovery_s / best - 1,
        gap=(optimal.gap_s or 0.0) / best,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def show(rows: list[Row]) -> None:
    table = Table(title="grouping, one core")
    names = (
        "machines",
        "compute",
        "boundaries",
        "parallel",
        "budget",
        "greedy",
        "optimal",
        "greedy is",
        "result",
    )
    for name in (*names, "peak so far"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row.machines),
            row.compute,
            row.boundaries,
            "yes" if row.parallel_recovery else "no",
            f"{row.budget_share:.0%}",
            f"{row.greedy_s:.3f} s",
            f"{row.optimal_s:.2f} s",
            f"{row.greedy_above_optimal:.2%} above",
            f"within {row.gap:.1e}" if row.gap else "proven",
            f"{row.peak_mb:.0f} MB",
        )
    Console(width=130).print(table)
    large = [row for row in rows if row.machines == 10_000]
    if large:
        late = sum(row.optimal_s > row.optimal_limit_s or row.greedy_s > LIMITS_S["greedy"] for row in large)
        unproven = sum(row.gap > 0 for row in large)
        print(
            f"10,000 machines: {len(large)} chains, {late} over a time limit, {unproven} not proven optimal"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[0.9, 0.7, 0.3, 0.01], help="shares of a full log"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [
        measure(n, shape, parallel, part, args.seed)
        for n in args.machines
        for shape in SHAPES
        for parallel in (False, True)
        for part in args.budgets
    ]
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        show(rows)


if __name__ == "__main__":
    main()
