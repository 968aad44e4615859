"""What a recovery costs the control plane, by job size: wall, CPU, and what the store is asked.

All machines of a job are on this host, many in one process, with real sockets and a real store process. They
do not train. One machine is killed by a signal, and a waiting spare takes its slot. Measured is the time from
the signal to the last order to go live, of all agents and all workers, and what all processes use until then.

In a job of ``--of`` machines ``--lost`` are killed at once, too. Their losses are found one after the other.
A new worker then takes half a second to start, as a real one does: until then all losses are known.

``--json`` for programs, ``--record`` for a file in benchmarks/results.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from benchmarks.scale.fit import fit
from benchmarks.scale.host import Costs, Host
from benchmarks.scale.machine import Job
from swift_ft.launch.rendezvous.store_service import StoreService
from swift_ft.network import JobSecret

SIZES = (64, 128, 256, 512, 1024)
WALL_LIMIT_S = 3.0
EXPONENT_LIMIT = 1.2
_FORMING_S, _RECOVERY_S = 600.0, 300.0
_IDLE_S = 2.0
_CALM, _SETTLE_S = 0.7, 180.0
"""Processors that a thousand idle control planes take at most, and how long to wait for that."""
_START_S = 0.5
_NOISE = 1.05


@dataclass(frozen=True)
class Row:
    """One recovery.

    Attributes:
        machines: of one worker each.
        lost: machines, at once.
        wall_s: from the loss to the last order to go live.
        agents_s: to the last agent's.
        cpu_s: of all processes but the store.
        store_cpu_s: of the store.
        operations: that the store was asked.
        bytes: of their keys and values.
        head_cpu_s: of the machine in the first slot, which has a process of its own and shares nothing.
        alone_cpu_s: of an ordinary machine that has a process of its own and shares nothing.
        spare_cpu_s: of the machine that takes the slot, which has one, too.
        idle_cpu: CPU seconds per second of all processes, the store's included, before the loss.
        forming_s: until all were live for the first time.
        events: in the journal, from the loss on.
        reports: of workers' status among them.
        blocks: in which they were written.
    """

    machines: int
    lost: int
    wall_s: float
    agents_s: float
    cpu_s: float
    store_cpu_s: float
    operations: int
    bytes: int
    head_cpu_s: float
    alone_cpu_s: float
    spare_cpu_s: float
    idle_cpu: float
    forming_s: float
    events: int
    reports: int
    blocks: int

    @property
    def total_cpu_s(self) -> float:
        """Of all processes, the store's included."""
        return self.cpu_s + self.store_cpu_s


def measure(machines: int, processes: int, lost: int = 1) -> Row:
    """Form a job of this size, kill some machines at once, and wait until all are live again.

    Before that, one machine is killed, which does not count: the first time a forked process does something,
    it copies the memory that this touches.
    """
    store = StoreService("127.0.0.1", 0)
    start_s = _START_S if lost > 1 else 0.0
    job = Job(store.address, f"scale-{machines}-{lost}", machines, JobSecret.generated(), start_s)
    gc.freeze()  # as agents and standbys do: to look through all modules takes a forked process 0.2 s
    head, alone, first = 0, machines // 2 + 1, machines // 2 + 3
    victims = range(first, first + 1 + lost)
    rest = sorted({*range(machines)} - {head, alone, *victims})
    parts = [rest[number::processes] for number in range(processes)]
    doomed = [Host(job, [at]) for at in victims]
    spares = [Host(job, [None]) for _ in victims]
    survivors = [Host(job, [head]), Host(job, [alone])]
    survivors += [Host(job, part, shares=True) for part in parts if part]
    try:
        began = time.monotonic()
        for host in [*survivors, *doomed]:
            host.begin()
        for host in [*survivors, *doomed]:
            host.live(1, _FORMING_S)
        forming_s = time.monotonic() - began
        _lose(doomed[:1], spares[:1], [*survivors, *doomed[1:]], 2, store.pid)
        seen = _lose(doomed[1:], spares[1:], [*survivors, spares[0]], 2 + lost, store.pid)
        total, written = summed(seen.used), survivors[0].journal(1)
        return Row(
            machines=machines,
            lost=lost,
            wall_s=seen.workers_s,
            agents_s=seen.agents_s,
            cpu_s=total.cpu_s,
            store_cpu_s=seen.store_cpu_s,
            operations=total.operations,
            bytes=total.bytes,
            head_cpu_s=seen.used[0].cpu_s,
            alone_cpu_s=seen.used[1].cpu_s,
            spare_cpu_s=seen.used[-1].cpu_s,
            idle_cpu=seen.idle_cpu,
            forming_s=forming_s,
            events=written.all,
            reports=written.reports,
            blocks=written.blocks,
        )
    finally:
        for host in [*survivors, *spares, *doomed]:
            host.close()
        store.close()


@dataclass(frozen=True)
class _Seen:
    """One recovery: when the last ones were live, and what all used until then."""

    agents_s: float
    workers_s: float
    used: list[Costs]
    store_cpu_s: float
    idle_cpu: float


def _lose(
    victims: Sequence[Host], spares: Sequence[Host], others: Sequence[Host], generation: int, store: int
) -> _Seen:
    """Kill machines whose slots spares take, which wait already. Each loss opens a generation."""
    for spare in spares:
        spare.begin()
    hosts = [*others, *spares]
    before, before_store, idle_cpu = _settled(hosts, store)
    killed = min([victim.kill() for victim in victims])
    lives = [host.live(generation, _RECOVERY_S) for host in hosts]
    return _Seen(
        agents_s=max(live["agent"] for live in lives) - killed,
        workers_s=max(max(live.values()) for live in lives) - killed,
        used=[h.costs().since(a) for h, a in zip(hosts, before, strict=True)],
        store_cpu_s=cpu_of(store) - before_store,
        idle_cpu=idle_cpu,
    )


def _settled(hosts: Sequence[Host], store: int) -> tuple[list[Costs], float, float]:
    """Wait until next to nothing happens: many spares join one after the other, and all learn of each.

    Returns:
        What the hosts have used, and the store; and what all use in a second while nothing happens.
    """
    deadline = time.monotonic() + _SETTLE_S
    time.sleep(_IDLE_S)
    costs, store_s, at = [h.costs() for h in hosts], cpu_of(store), time.monotonic()
    while at < deadline:
        before, before_s, began = costs, store_s, at
        time.sleep(_IDLE_S)
        costs, store_s, at = [h.costs() for h in hosts], cpu_of(store), time.monotonic()
        used_s = summed(b.since(a) for a, b in zip(before, costs, strict=True)).cpu_s + store_s - before_s
        if (idle_cpu := used_s / (at - began)) < _CALM:
            return costs, store_s, idle_cpu
    raise TimeoutError(f"the machines still work {_SETTLE_S:g} s after the last one has joined")


def summed(costs: Iterable[Costs]) -> Costs:
    """What several processes have used together."""
    listed = list(costs)
    return Costs(
        sum(c.cpu_s for c in listed), sum(c.operations for c in listed), sum(c.bytes for c in listed)
    )


def cpu_of(pid: int) -> float:
    """CPU seconds of a process, of its threads that have ended, too, by Linux's clock of that process."""
    return time.clock_gettime((~pid << 3) | 2)


# ------------------------------------------------------------------------------------------------- results


HEAD = (
    "machines",
    "loss to the last order",
    "CPU, all",
    "of it the store",
    "store operations",
    "per machine",
    "kB",
    "CPU of one machine alone",
    "of a head",
    "of the spare",
    "idle CPU/s",
)
HEAD_AT_ONCE = (
    "lost at once",
    "of machines",
    "loss to the last order",
    "CPU, all",
    "store operations",
    "kB",
    "events",
    "reports",
    "blocks",
)


def _cells(row: Row) -> list[str]:
    return [
        f"{row.machines:,}",
        f"{row.wall_s:.2f} s",
        f"{row.total_cpu_s:.2f} s",
        f"{row.store_cpu_s:.3f} s",
        f"{row.operations:,}",
        f"{row.operations / row.machines:.1f}",
        f"{row.bytes / 1e3:,.0f}",
        f"{row.alone_cpu_s * 1e3:.0f} ms",
        f"{row.head_cpu_s * 1e3:.0f} ms",
        f"{row.spare_cpu_s * 1e3:.0f} ms",
        f"{row.idle_cpu:.3f}",
    ]


def _cells_at_once(row: Row) -> list[str]:
    return [
        f"{row.lost:,}",
        f"{row.machines:,}",
        f"{row.wall_s:.2f} s",
        f"{row.total_cpu_s:.2f} s",
        f"{row.operations:,}",
        f"{row.bytes / 1e3:,.0f}",
        f"{row.events:,}",
        f"{row.reports:,}",
        f"{row.blocks:,}",
    ]


def _tables(rows: Sequence[Row]) -> list[tuple[tuple[str, ...], list[list[str]]]]:
    """By job size; and by how many were lost, beside one loss in a job of the same size."""
    several = {row.machines for row in rows if row.lost > 1}
    return [
        (HEAD, [_cells(row) for row in rows if row.lost == 1]),
        (HEAD_AT_ONCE, [_cells_at_once(row) for row in rows if row.machines in several]),
    ]


def targets(measured: Sequence[Row]) -> list[Target]:
    """The targets, met or missed, by what was measured."""
    at_once = [
        Target(
            f"reports, {row.lost} of {row.machines:,} machines lost at once: one of each worker",
            f"{row.machines:,}",
            f"{row.reports:,}",
            row.reports <= row.machines,
        )
        for row in measured
        if row.lost > 1
    ]
    rows = [row for row in measured if row.lost == 1]
    return [*_by_size(rows), *at_once] if rows else at_once


def _by_size(rows: Sequence[Row]) -> list[Target]:
    largest, smallest = rows[-1], rows[0]
    most, least = largest.operations / largest.machines, smallest.operations / smallest.machines
    found = [
        Target(
            f"{largest.machines:,} machines, from the loss to the last order, on two cores",
            f"< {WALL_LIMIT_S:g} s",
            f"{largest.wall_s:.2f} s",
            largest.wall_s < WALL_LIMIT_S,
        )
    ]
    if len(rows) < 2:
        return found
    here = fit({row.machines: row.total_cpu_s for row in rows}).exponent
    apart = fit({row.machines: row.machines * row.alone_cpu_s for row in rows}).exponent
    return [
        *found,
        Target(
            "store operations per recovery and machine, largest job against smallest",
            "<= 1",
            f"{most / least:.2f} ({most:.1f} against {least:.1f})",
            most <= least * _NOISE,
        ),
        Target(
            "exponent of all CPU on this host, whose control planes share what is computed alike",
            f"<= {EXPONENT_LIMIT:g}",
            f"{here:.2f}",
            here <= EXPONENT_LIMIT,
        ),
        Target(
            "exponent of all CPU if each machine is one of its own (machines times one machine alone)",
            f"<= {EXPONENT_LIMIT:g}",
            f"{apart:.2f}",
            apart <= EXPONENT_LIMIT,
        ),
    ]


def main() -> int:
    """Measure every size, print, and keep."""
    parser = argument_parser(__doc__)
    parser.add_argument("--machines", type=int, nargs="+", default=list(SIZES), metavar="N")
    parser.add_argument("--lost", type=int, nargs="+", default=[8], metavar="K", help="default: %(default)s")
    parser.add_argument("--of", type=int, default=128, metavar="N", help="machines (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write JSON there, for simulated.py")
    args = parser.parse_args()
    rows = []
    for machines, lost in [*((n, 1) for n in sorted(args.machines)), *((args.of, k) for k in args.lost)]:
        rows.append(measure(machines, args.processes, lost))
        print(f"{lost} of {machines:,} machines: {rows[-1].wall_s:.2f} s", file=sys.stderr)
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(row) for row in rows if row.lost == 1], indent=1))
    parts = [table(head, cells) for head, cells in _tables(rows)]
    body = "\n\n".join([*parts, target_table(targets(rows))])
    return finish("control-plane", body, {"rows": rows}, args)


if __name__ == "__main__":
    sys.exit(main())
