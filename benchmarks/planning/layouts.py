"""How long planning takes: every cell of Oobleck's Table 3, and pipelines of 1,000 nodes after a change.

A cell is one template: so many layers on so many nodes of so many devices, with 4 microbatches per stage, as
in the paper. Here its cost is the exact time under 1F1B, and each answer says whether it is proven best. CPU
time of one process with one thread. ``--json`` for programs, ``--record`` for a file in benchmarks/results.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.costs.schedule_orders import Schedule
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.instantiate import best_instantiation
from swift_ft.planning.layout.pipeline_time import PipelineTime
from swift_ft.planning.layout.templates import best_template
from swift_ft.recovery.layout.losses import Pipelines, reconfigure, reform

LAYERS, NODES, DEVICES = (24, 32, 64, 96), (8, 16, 24), (1, 4, 8)
SPREADS = (0.0, 0.05, 0.5)
"""By which part layers differ from each other: alike, as measured, and not at all alike."""

PAPER = {
    (8, 1): (0.28, 0.71, 9.65, 68.50),
    (8, 4): (0.41, 1.15, 11.58, 74.56),
    (8, 8): (0.54, 1.50, 20.98, 109.76),
    (16, 1): (3.37, 7.45, 66.35, 540.36),
    (16, 4): (4.56, 10.41, 108.10, 649.67),
    (16, 8): (4.90, 11.78, 176.04, 1213.63),
    (24, 1): (11.35, 30.11, 262.47, 1477.54),
    (24, 4): (14.78, 45.80, 472.53, 2153.84),
    (24, 8): (15.59, 49.25, 520.08, 3297.92),
}
"""Oobleck's Table 3: seconds by nodes and devices per node, for each number of layers."""


@dataclass(frozen=True)
class Row:
    """One template: its cell, CPU seconds, and by how much another can be better at most."""

    layers: int
    nodes: int
    devices: int
    spread: float
    seconds: float
    gap: float
    stages: int


def model(layers: int, spread: float, seed: int) -> list[LayerProfile]:
    """Made-up layers of about 10 ms forward and 20 ms backward."""
    rng = random.Random(seed)

    def around(nanoseconds: int) -> int:
        return round(nanoseconds * (1 + spread * rng.uniform(-1, 1)))

    return [LayerProfile(around(10_000_000), around(20_000_000), 200_000_000) for _ in range(layers)]


def measure(layers: int, nodes: int, devices: int, spread: float, seed: int) -> Row:
    """Plan one template."""
    profile = model(layers, spread, seed)
    begin = time.process_time()
    found = best_template(StageCosts(profile, devices), nodes)
    seconds = time.process_time() - begin
    return Row(layers, nodes, devices, spread, seconds, found.gap, len(found.stages))


def pipelines_of(nodes: int, rng: random.Random) -> Pipelines:
    """Pipelines of 4 to 12 nodes."""
    pipelines: list[tuple[int, ...]] = []
    while (first := sum(map(len, pipelines))) < nodes:
        size = rng.randint(4, 12)
        size = size if nodes - first - size >= 4 else nodes - first
        pipelines.append(tuple(range(first, first + size)))
    return tuple(pipelines)


def loss_s(nodes: int, lost: int, seed: int) -> float:
    """CPU seconds to form pipelines after a loss."""
    rng = random.Random(seed)
    pipelines = pipelines_of(nodes, rng)
    gone = frozenset(rng.sample(range(nodes), lost))
    begin = time.process_time()
    reconfigure(pipelines, gone, min_nodes=4, tolerate=3)
    return time.process_time() - begin


def growth_s(nodes: int, added: int, seed: int) -> float:
    """CPU seconds to choose pipelines of the present and of new nodes, and to say which nodes form them.

    What is prepared before: the templates of 4 to 12 nodes, and the time of a pipeline of each.
    """
    costs = StageCosts(model(32, 0.05, seed), 1)
    templates = [best_template(costs, count) for count in range(4, 13)]
    times = {one.nodes: PipelineTime.of(costs, one, Schedule.ONE_F_ONE_B) for one in templates}
    pipelines = pipelines_of(nodes, random.Random(seed))
    begin = time.process_time()
    best = best_instantiation(times, nodes + added, 4, 16 * (nodes + added))
    reform(pipelines, best.nodes, range(nodes, nodes + added))
    return time.process_time() - begin


def summary(rows: Sequence[Row], reconfigurations: dict[str, float]) -> str:
    """All cells as Markdown: the slowest of the models, and how many are proven."""
    cells: dict[tuple[int, int, int], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.layers, row.nodes, row.devices), []).append(row)
    body = [
        [
            *map(str, cell),
            _of_the_paper(*cell),
            f"{max(row.seconds for row in found):.2f} s",
            f"{sum(row.gap == 0 for row in found)} of {len(found)}",
            f"{max(row.gap for row in found):.2%}",
        ]
        for cell, found in cells.items()
    ]
    head = ["layers", "nodes", "devices per node", "the paper", "slowest model", "proven best", "largest gap"]
    changes = ", ".join(f"{change}: {s * 1000:.1f} ms" for change, s in reconfigurations.items())
    intro = (
        "CPU time of one process with one thread, beside other load. Three models per cell: layers alike, "
        "within 5 %, and within 50 %. The paper's times are for another cost, on another machine. "
        f"1,000 nodes, {changes}."
    )
    return f"{intro}\n\n{table(head, body)}\n\n{target_table(targets(rows, reconfigurations))}"


def _of_the_paper(layers: int, nodes: int, devices: int) -> str:
    return f"{PAPER[nodes, devices][LAYERS.index(layers)]:.2f} s" if layers in LAYERS else ""


def targets(rows: Sequence[Row], reconfigurations: dict[str, float]) -> list[Target]:
    """What was asked for, and what was measured."""
    small = max((row.seconds for row in rows if row.layers <= 32), default=0.0)
    slowest, gap = max(row.seconds for row in rows), max(row.gap for row in rows)
    after_losses = max(s for change, s in reconfigurations.items() if "lost" in change)
    with_more = max(s for change, s in reconfigurations.items() if "added" in change)
    return [
        Target("24 and 32 layers, each cell", "<= 1 s", f"{small:.2f} s", small <= 1),
        Target("all cells", "<= 10 s", f"{slowest:.2f} s", slowest <= 10),
        Target("proven, or a bound", "<= 1 %", f"{gap:.2%}", gap <= 0.01),
        Target("reconfiguration of 1,000 nodes", "<= 0.1 s", f"{after_losses:.4f} s", after_losses <= 0.1),
        Target("1,000 nodes and more, formed anew", "<= 0.1 s", f"{with_more:.4f} s", with_more <= 0.1),
    ]


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    shown = Table(
        "layers", "nodes", "devices", "spread", "time", "stages", "optimal", title="templates, one core"
    )
    for row in rows:
        proof = f"within {row.gap:.2%}" if row.gap else "proven"
        cells = (row.layers, row.nodes, row.devices, f"{row.spread:.0%}", f"{row.seconds:.2f} s", row.stages)
        shown.add_row(*map(str, cells), proof)
    Console(width=100).print(shown)


def main() -> int:
    """Plan all cells and print the results."""
    parser = argument_parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [
        measure(layers, nodes, devices, spread, args.seed)
        for layers in args.layers
        for nodes in NODES
        for devices in DEVICES
        for spread in SPREADS
    ]
    reconfigurations = {f"{lost} lost": loss_s(1000, lost, args.seed) for lost in (1, 50, 500, 900)}
    reconfigurations |= {f"{added} added": growth_s(1000, added, args.seed) for added in (1, 50, 500)}
    if not args.json:
        show(rows)
    facts = {"templates": rows, "reconfiguration_s": reconfigurations}
    return finish("layouts", summary(rows, reconfigurations), facts, args)


if __name__ == "__main__":
    main()
