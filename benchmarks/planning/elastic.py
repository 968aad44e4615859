"""Oobleck's Tables 2 and 4 (SOSP '23): 30 nodes become 15, one lost after each interval.

For two models the throughput by number of nodes is known, and the seconds of a change. There swift-sim says
what pipelines formed anew yield, beside the paper's numbers, and the other ways to go on. For the others
neither is published. Two cells of a row then give both: the mean throughput, and the time that a loss costs,
with the samples that are done again. The third cell is predicted from them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from swift_ft.planning.elastic_jobs import ELASTIC_PRESETS, losing_every
from swift_ft.planning.simulation.elastic import WAYS, ElasticJob, simulate_elastic
from swift_ft.units import counted, format_seconds

PUBLISHED = {
    "oobleck-bert-large": {6 * 3600.0: 287.10, 3600.0: 286.28, 600.0: 282.11},
    "oobleck-gpt3-2.7b": {6 * 3600.0: 7.29, 3600.0: 7.23, 600.0: 6.89},
}
LIMIT, SHORT_LIMIT = 0.012, 0.036
NODES, LAST = 30, 15
LONG_S, MIDDLE_S, SHORT_S = 6 * 3600.0, 3600.0, 600.0
TABLES = {
    "Oobleck": {
        "BERT-Large": (287.10, 286.28, 282.11),
        "GPT-2": (85.59, 85.42, 84.80),
        "GPT-3 Medium": (29.30, 29.21, 28.70),
        "GPT-3 2.7b": (7.29, 7.23, 6.89),
        "GPT-3 6.7b": (4.33, 4.22, 3.55),
    },
    "Varuna": {
        "BERT-Large": (260.11, 246.03, 173.52),
        "GPT-2": (86.51, 85.17, 76.39),
        "GPT-3 Medium": (29.50, 28.49, 20.19),
        "GPT-3 2.7b": (7.27, 6.53, 1.76),
        "GPT-3 6.7b": (4.14, 2.69, 0.26),
    },
    "Varuna without checkpointing": {"GPT-3 6.7b": (4.61, 4.29, 1.98)},
}
"""Samples per second with one loss in 6 h, 1 h and 10 min: Table 2, and the last row of Table 4.

Bamboo's row is left out: it hardly depends on losses, and there is none for GPT-3.
"""

WITHIN = {"Oobleck": 0.001, "Varuna": 0.012, "Varuna without checkpointing": 0.015}
NO_PREDICTION = ("Varuna", "GPT-3 6.7b")
"""Its restarts take longer than the ten minutes between two losses, so the cells say nothing of them."""


@dataclass(frozen=True)
class Row:
    """One cell of the table: samples per second."""

    job: str
    interval_s: float
    published: float
    ways: dict[str, float]

    @property
    def error(self) -> float:
        """Of pipelines formed anew, relative to the paper."""
        return abs(self.ways["elastic"] / self.published - 1)


def measure(job: str, interval_s: float, published: float) -> Row:
    """Simulates one cell."""
    changes = losing_every(interval_s, 30, 15)
    ways = {
        way: simulate_elastic(ELASTIC_PRESETS[job], changes, 15 * interval_s, way).throughput for way in WAYS
    }
    return Row(job, interval_s, published, ways)


@dataclass(frozen=True)
class Inferred:
    """A row of a table, by what two of its cells say.

    Attributes:
        system: which trains.
        model: what it trains.
        published: samples per second with a loss in 6 h, 1 h and 10 min.
        throughput: mean of those on 30 to 16 nodes.
        loss_s: time that a loss costs.
        predicted: the cell of 1 h.
    """

    system: str
    model: str
    published: tuple[float, float, float]
    throughput: float
    loss_s: float
    predicted: float

    @property
    def error(self) -> float:
        """How far the prediction is off."""
        return self.predicted / self.published[1] - 1


def infer(system: str, model: str) -> Inferred:
    """Solves two cells for two numbers, and simulates the third.

    Of 15 intervals 14 begin with a loss, so a cell is ``throughput * (1 - 14 / 15 * loss_s / interval_s)``.
    """
    cells = TABLES[system][model]
    ratio = cells[2] / cells[0]
    loss_s = (1 - ratio) / (1 / SHORT_S - ratio / LONG_S) * (NODES - LAST) / (NODES - LAST - 1)
    throughput = cells[0] / (1 - (NODES - LAST - 1) / (NODES - LAST) * loss_s / LONG_S)
    job = ElasticJob({LAST: throughput}, NODES, change_s=loss_s)
    changes = losing_every(MIDDLE_S, NODES, LAST)
    predicted = simulate_elastic(job, changes, (NODES - LAST) * MIDDLE_S, "elastic").throughput
    return Inferred(system, model, cells, throughput, loss_s, predicted)


def inferred_table(rows: Sequence[Inferred]) -> str:
    """What the cells say of each system and model."""
    head = ["model", "system", "6 h", "1 h", "10 min", "mean", "a loss costs", "1 h, predicted", "off by"]
    return table(
        head,
        [
            [
                row.model,
                row.system,
                *(f"{cell:.2f}" for cell in row.published),
                *(("",) * 4 if (row.system, row.model) == NO_PREDICTION else _said(row)),
            ]
            for row in sorted(rows, key=lambda row: list(TABLES["Oobleck"]).index(row.model))
        ],
    )


def _said(row: Inferred) -> tuple[str, ...]:
    loss = format_seconds(round(row.loss_s, 1))
    return f"{row.throughput:.2f}", loss, f"{row.predicted:.2f}", f"{row.error:+.2%}"


def main() -> int:
    """Simulates all cells and prints the report. Returns 1 if one is too far off."""
    args = argument_parser(__doc__, repetitions=1).parse_args()
    rows = [measure(job, *cell) for job, cells in PUBLISHED.items() for cell in cells.items()]
    long, short = (max(row.error for row in rows if (row.interval_s <= 600) == few) for few in (False, True))
    targets = [
        Target("one loss in 6 h or 1 h", f"<= {LIMIT:.1%}", f"{long:.2%}", long <= LIMIT),
        Target("one loss in 10 min", f"<= {SHORT_LIMIT:.1%}", f"{short:.2%}", short <= SHORT_LIMIT),
    ]
    inferred = [infer(system, model) for system, models in TABLES.items() for model in models]
    for system, limit in WITHIN.items():
        known = [row for row in inferred if row.system == system and (system, row.model) != NO_PREDICTION]
        off = max(abs(row.error) for row in known)
        name = f"{system}: one loss in 1 h, from the other two cells, {counted(len(known), 'model')}"
        targets.append(Target(name, f"<= {limit:.1%}", f"{off:.2%}", off <= limit))
    head = ["job", "a loss every", "paper", *WAYS]
    cells = [
        [
            row.job,
            format_seconds(row.interval_s),
            f"{row.published:g}",
            *(f"{rate:.2f}" for rate in row.ways.values()),
        ]
        for row in rows
    ]
    intro = (
        "Samples per second while 30 nodes become 15. The paper's column is Oobleck itself; a restart takes "
        "60 s and checkpoints are 600 s apart, which is an assumption."
    )
    further = (
        "All five models, with Varuna's row, and Varuna without the cost of checkpointing from Table 4 (for "
        "BERT-Large one cell of three was not at hand). Throughput by number of nodes and seconds per change "
        "are not in the paper: the mean and the cost of a loss, with what is computed again, follow from the "
        "cells of 6 h and 10 min, and that of 1 h is predicted. GPT-3 6.7b's restarts take Varuna "
        "longer than ten minutes, so its cells say nothing of them."
    )
    parts = (intro, table(head, cells), further, inferred_table(inferred), target_table(targets))
    body = "\n\n".join(parts)
    facts = {"rows": rows, "inferred": inferred}
    return finish("oobleck", body, facts, args, well=all(target.met for target in targets))


if __name__ == "__main__":
    sys.exit(main())
