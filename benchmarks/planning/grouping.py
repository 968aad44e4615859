"""How long grouping takes by number of machines, how much memory, and how far greedy is from the optimum.

Prints what it measured on this machine: CPU time of one process with one thread, so that other load does not
count. ``--json`` for programs, ``--record`` for a file in benchmarks/results.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from swift_ft.costs.chain_profile import ChainProfile
from swift_ft.planning.grouping.groups import plan_groups

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
    """Plans one chain with both methods.

    Args:
        n: number of machines.
        shape: computation and boundaries, from ``SHAPES``.
        parallel: whether survivors help with the replay.
        part: the budget, as a share of a full log.
        seed: of the chain's random numbers.
    """
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
    """Prints the rows as a table, and how many of the largest chains missed a limit."""
    shown = Table(title="grouping, one core")
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
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
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
    Console(width=130).print(shown)
    large = [row for row in rows if row.machines == 10_000]
    if large:
        late = sum(row.optimal_s > row.optimal_limit_s or row.greedy_s > LIMITS_S["greedy"] for row in large)
        unproven = sum(row.gap > 0 for row in large)
        print(
            f"10,000 machines: {len(large)} chains, {late} over a time limit, {unproven} not proven optimal"
        )


def summary(rows: Sequence[Row]) -> str:
    """The rows of all budgets, with and without parallel recovery, together, as Markdown."""
    kinds: dict[tuple[int, str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row.machines, row.compute, row.boundaries), []).append(row)
    cells = [
        [
            *map(str, kind),
            f"{max(row.greedy_s for row in found):.3f} s",
            f"{min(row.optimal_s for row in found):.2f}-{max(row.optimal_s for row in found):.2f} s",
            f"{max(row.greedy_above_optimal for row in found):.1%}",
            f"{sum(row.gap == 0 for row in found)} of {len(found)}",
        ]
        for kind, found in kinds.items()
    ]
    head = ["machines", "computation", "boundaries", "greedy", "optimal", "greedy above it", "proven"]
    intro = (
        "CPU time of one process with one thread; budgets of "
        f"{', '.join(f'{share:.0%}' for share in dict.fromkeys(row.budget_share for row in rows))} of a full "
        "log, with and without parallel recovery. Targets are for 10,000 machines; what is not proven is "
        f"within {max(row.gap for row in rows):.1e} of the optimum."
    )
    return f"{intro}\n\n{table(head, cells)}\n\n{target_table(_targets(rows))}"


def _targets(rows: Sequence[Row]) -> list[Target]:
    large = [row for row in rows if row.machines == 10_000]
    seconds = {
        "greedy": [row.greedy_s for row in large],
        **{kind: [r.optimal_s for r in large if r.boundaries == kind] for kind in ("uniform", "random")},
    }
    names = {kind: kind if kind == "greedy" else f"optimal, {kind} boundaries" for kind in seconds}
    memory_gb = max(row.peak_mb for row in rows) / 1000
    return [
        *(
            Target(
                names[kind], f"<= {LIMITS_S[kind]:g} s", f"{max(found):.2f} s", max(found) <= LIMITS_S[kind]
            )
            for kind, found in seconds.items()
            if found
        ),
        Target("memory, of all chains", "<= 2 GB", f"{memory_gb:.2f} GB", memory_gb <= 2.0),
    ]


def main() -> int:
    """Plans every chain with every budget and prints the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--machines", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[0.9, 0.7, 0.3, 0.01], help="shares of a full log"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [
        measure(n, shape, parallel, part, args.seed)
        for n in args.machines
        for shape in SHAPES
        for parallel in (False, True)
        for part in args.budgets
    ]
    if not args.json:
        show(rows)
    return finish("grouping", summary(rows), {"rows": rows}, args)


if __name__ == "__main__":
    main()
