"""Sixteen thousand machines by a model: how long a recovery takes, and what a checkpoint asks of the store.

The model (`model.py`) gets the costs of single steps, measured here (`calibrate.py`). It is held against real
control planes: give ``--measured`` what `control_plane.py --out` has written.

``--json`` for programs, ``--record`` for a file in benchmarks/results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from immutables import Map

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from benchmarks.scale.calibrate import calibrated
from benchmarks.scale.etcd_rate import LARGE, EtcdRate, measure
from benchmarks.scale.model import Costs, Tree, checkpoint, recovery
from swift_ft.recovery.heads import FANOUT, upstream_of
from swift_ft.recovery.job_state import JobShape, State
from swift_ft.recovery.membership import Membership

LARGEST = 16_384
SIZES = (1024, 4096, LARGEST)
WALL_LIMIT_S = 10.0
CHECKPOINT_EVERY_S = 300.0
SPREAD_S = 30.0
"""From the first part of a checkpoint that is durable to the last."""
SHARE_LIMIT = 0.1

SILENT_S = 1.0
"""A machine without power is noticed after the default of --machine-silence."""
START_S = 0.3
"""The order to start a newcomer's workers until its session reports: of a run of four machines."""
REPORT_S = (0.005, 0.1)
"""The order to report until a survivor has left its groups and flushed its log."""
SNAPSHOT_S = 20e-6
"""For each machine of the job: a newcomer decodes and takes over the state."""

_OF_MEMO_S = 0.4e-6
"""To look up what another participant of the process has computed."""


def tree_of(machines: int, fanout: int = FANOUT) -> Tree:
    """The project's own tree of relays, for a job whose slots are all filled."""
    members = {slot: f"m-{slot}.0" for slot in range(machines)}
    slots = {machine: slot for slot, machine in members.items()}
    membership = Membership(
        members=Map(members), slots=Map(slots), addresses=Map(dict.fromkeys(slots, "host:1"))
    )
    state = State(shape=JobShape(machines), membership=membership)
    heads = (upstream_of(state, machine, fanout=fanout) for machine in members.values())
    return Tree.of(tuple(None if head is None else slots[head] for head in heads))


def on_cluster(costs: Costs) -> Costs:
    """The costs on machines of their own, with what only a real training has. The loss is a silent one."""
    return replace(costs, seen_s=SILENT_S, report_s=REPORT_S, start_s=START_S, snapshot_s=SNAPSHOT_S)


def on_host(costs: Costs) -> Costs:
    """The costs where participants share a host, and those of a process what they would compute alike."""
    return replace(
        costs, decode_s=_OF_MEMO_S, apply_s=2 * _OF_MEMO_S, plan_s=0.0, snapshot_s=0.0, start_s=0.0
    )


@dataclass(frozen=True)
class Row:
    """A job of this size.

    Attributes:
        machines: of one worker each.
        wall_s: from the loss to the last order to go live.
        noticed_s: of it, until the loss was noticed.
        operations: of the store, for the recovery.
        machine_cpu_s: of an average participant.
        head_cpu_s: of the busiest one.
        puts: blocks that a checkpoint writes.
        puts_per_s: on average, with a checkpoint every five minutes.
        bytes_per_s: the same.
    """

    machines: int
    wall_s: float
    noticed_s: float
    operations: int
    machine_cpu_s: float
    head_cpu_s: float
    puts: int
    puts_per_s: float
    bytes_per_s: float


def simulate(machines: int, costs: Costs) -> Row:
    """One recovery and one checkpoint."""
    tree = tree_of(machines)
    lost, saved = recovery(tree, costs), checkpoint(tree, costs, spread_s=SPREAD_S)
    written = saved.blocks * costs.block_bytes + machines * costs.event_bytes
    return Row(
        machines=machines,
        wall_s=lost.wall_s,
        noticed_s=costs.seen_s,
        operations=lost.operations,
        machine_cpu_s=lost.cpu_s / (2 * machines),
        head_cpu_s=lost.most_cpu_s,
        puts=saved.blocks,
        puts_per_s=saved.blocks / CHECKPOINT_EVERY_S,
        bytes_per_s=written / CHECKPOINT_EVERY_S,
    )


@dataclass(frozen=True)
class Check:
    """The model against real control planes of one size."""

    machines: int
    predicted_s: float
    measured_s: float
    predicted_cpu_s: float
    measured_cpu_s: float
    predicted_operations: int
    measured_operations: int


def check(rows: Sequence[dict[str, Any]], costs: Costs, cores: int) -> list[Check]:
    """Predict what was measured on a host of so many cores."""
    found = []
    for row in rows:
        machines = int(row["machines"])
        outcome = recovery(tree_of(machines), on_host(costs), cores=cores)
        found.append(
            Check(
                machines,
                outcome.wall_s,
                float(row["wall_s"]),
                outcome.cpu_s,
                float(row["cpu_s"]),
                outcome.operations,
                int(row["operations"]),
            )
        )
    return found


def targets(rows: Sequence[Row], etcd: EtcdRate | None) -> list[Target]:
    """The targets, met or missed."""
    largest = max(rows, key=lambda row: row.machines)
    found = [
        Target(
            f"{largest.machines:,} machines, from a silent loss to the last order, without the replay",
            f"< {WALL_LIMIT_S:g} s",
            f"{largest.wall_s:.2f} s",
            largest.wall_s < WALL_LIMIT_S,
        )
    ]
    if etcd is None:
        return found
    share = max(largest.puts_per_s / etcd.puts_per_s, largest.bytes_per_s / etcd.bytes_per_s)
    asked = (
        f"{largest.machines:,} machines, a checkpoint every {CHECKPOINT_EVERY_S:g} s: "
        "load against what etcd takes here"
    )
    return [*found, Target(asked, f"< {SHARE_LIMIT:g}", f"{share:.4f}", share < SHARE_LIMIT)]


HEAD = (
    "machines",
    "loss to live",
    "noticed after",
    "store operations",
    "CPU of a participant",
    "of the busiest",
)
HEAD_SAVED = ("machines", "blocks of a checkpoint", "puts/s", "kB/s")
HEAD_CHECK = (
    "machines",
    "wall: model",
    "measured",
    "CPU: model",
    "measured",
    "operations: model",
    "measured",
)


def _cells(row: Row) -> list[str]:
    return [
        f"{row.machines:,}",
        f"{row.wall_s:.2f} s",
        f"{row.noticed_s:.2f} s",
        f"{row.operations:,}",
        f"{row.machine_cpu_s * 1e3:.0f} ms",
        f"{row.head_cpu_s * 1e3:.0f} ms",
    ]


def _saved_cells(row: Row) -> list[str]:
    return [f"{row.machines:,}", f"{row.puts:,}", f"{row.puts_per_s:.2f}", f"{row.bytes_per_s / 1e3:.1f}"]


def _check_cells(c: Check) -> list[str]:
    return [
        f"{c.machines:,}",
        f"{c.predicted_s:.2f} s",
        f"{c.measured_s:.2f} s",
        f"{c.predicted_cpu_s:.2f} s",
        f"{c.measured_cpu_s:.2f} s",
        f"{c.predicted_operations:,}",
        f"{c.measured_operations:,}",
    ]


def main() -> int:
    """Calibrate, simulate, compare, print, and keep."""
    parser = argument_parser(__doc__)
    parser.add_argument("--machines", type=int, nargs="+", default=list(SIZES), metavar="N")
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="what control_plane.py --out has written"
    )
    parser.add_argument("--cores", type=int, default=2, help="of the host that measured (default: 2)")
    parser.add_argument("--no-etcd", action="store_true", help="do not measure etcd")
    args = parser.parse_args()
    costs = calibrated()
    rows = [simulate(machines, on_cluster(costs)) for machines in args.machines]
    etcd = None if args.no_etcd else measure(LARGE)
    measured = json.loads(args.measured.read_text()) if args.measured else []
    checks = check(measured, costs, args.cores)
    parts: list[tuple[tuple[str, ...], list[list[str]]]] = [
        (HEAD, [_cells(row) for row in rows]),
        (HEAD_SAVED, [_saved_cells(row) for row in rows]),
    ]
    if checks:
        parts.append((HEAD_CHECK, [_check_cells(c) for c in checks]))
    tables = "\n\n".join(table(head, cells) for head, cells in parts)
    steps = f"One step of each: `{costs}`. etcd: `{etcd}`."
    body = f"{tables}\n\n{steps}\n\n{target_table(targets(rows, etcd))}"
    facts = {"costs": costs, "rows": rows, "checks": checks, "etcd": etcd}
    return finish("scale-simulated", body, facts, args)


if __name__ == "__main__":
    sys.exit(main())
