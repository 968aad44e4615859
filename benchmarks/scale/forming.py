"""What it costs to form a job, by its size: wall, CPU, and what the store is asked.

As in `control_plane.py` all machines are on this host, many in one process, and do not train. Measured is the
time from when they are told to join until all agents and workers have their first order to go live.

``--json`` for programs, ``--record`` for a file in benchmarks/results.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass

from benchmarks.lib.results import argument_parser, finish, table
from benchmarks.scale.control_plane import cpu_of, summed
from benchmarks.scale.host import Host
from benchmarks.scale.machine import Job
from swift_ft.launch.rendezvous.store_service import StoreService
from swift_ft.network import JobSecret

SIZES = (64, 128, 256, 512)
_FORMING_S = 600.0


@dataclass(frozen=True)
class Row:
    """One job that forms.

    Attributes:
        machines: of one worker each.
        wall_s: until the last order to go live.
        cpu_s: of all processes but the store.
        store_cpu_s: of the store.
        operations: that the store was asked.
        bytes: of their keys and values.
        alone_cpu_s: of an ordinary machine that has a process of its own and shares nothing.
        blocks: of the journal.
    """

    machines: int
    wall_s: float
    cpu_s: float
    store_cpu_s: float
    operations: int
    bytes: int
    alone_cpu_s: float
    blocks: int


def measure(machines: int, processes: int) -> Row:
    """Form a job of this size."""
    store = StoreService("127.0.0.1", 0)
    job = Job(store.address, f"forming-{machines}", machines, JobSecret.generated())
    gc.freeze()  # as agents and standbys do
    alone = machines // 2 + 1
    rest = [at for at in range(machines) if at != alone]
    hosts = [Host(job, [alone])]
    hosts += [Host(job, part, shares=True) for n in range(processes) if (part := rest[n::processes])]
    try:
        before, before_store, began = [host.costs() for host in hosts], cpu_of(store.pid), time.monotonic()
        for host in hosts:
            host.begin()
        lives = [host.live(1, _FORMING_S) for host in hosts]
        used = [host.costs().since(was) for host, was in zip(hosts, before, strict=True)]
        total = summed(used)
        return Row(
            machines=machines,
            wall_s=max(max(live.values()) for live in lives) - began,
            cpu_s=total.cpu_s,
            store_cpu_s=cpu_of(store.pid) - before_store,
            operations=total.operations,
            bytes=total.bytes,
            alone_cpu_s=used[0].cpu_s,
            blocks=hosts[0].journal(-1).blocks,
        )
    finally:
        for host in hosts:
            host.close()
        store.close()


HEAD = (
    "machines",
    "to the last order",
    "CPU, all",
    "of it the store",
    "store operations",
    "per machine",
    "kB",
    "CPU of one machine alone",
    "blocks",
)


def _cells(row: Row) -> list[str]:
    return [
        f"{row.machines:,}",
        f"{row.wall_s:.2f} s",
        f"{row.cpu_s + row.store_cpu_s:.2f} s",
        f"{row.store_cpu_s:.3f} s",
        f"{row.operations:,}",
        f"{row.operations / row.machines:.1f}",
        f"{row.bytes / 1e3:,.0f}",
        f"{row.alone_cpu_s * 1e3:.0f} ms",
        f"{row.blocks:,}",
    ]


def main() -> int:
    """Measure every size, print, and keep."""
    parser = argument_parser(__doc__)
    parser.add_argument("--machines", type=int, nargs="+", default=list(SIZES), metavar="N")
    parser.add_argument("--processes", type=int, default=16, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    rows = []
    for machines in sorted(args.machines):
        rows.append(measure(machines, args.processes))
        print(f"{machines:,} machines: {rows[-1].wall_s:.2f} s", file=sys.stderr)
    return finish("forming", table(HEAD, [_cells(row) for row in rows]), {"rows": rows}, args)


if __name__ == "__main__":
    sys.exit(main())
