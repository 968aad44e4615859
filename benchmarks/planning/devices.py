"""How long it takes to form pipelines of unlike devices (AutoHet §III), by number of devices and types.

The layers are those of a LLaMA with 6.7 billion parameters (32, and 96 for 1,024 devices). Types have about
as many devices each ("even"), or an eighth of all is of the fastest type and a quarter of the slowest
("uneven"). CPU time of one process with one thread, at a tensor-parallel degree of 1, where the search is
largest.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.planning.layout.cluster import POWER_UNIT, Cluster, Node
from swift_ft.planning.layout.devices import plan_devices

TYPES = (("A100", 312, 80), ("H20", 148, 96), ("V100", 125, 32))  # TFLOP/s, GB
SIZES = (16, 24, 32, 64, 1024)
SCIP_S = {16: 1.23, 24: 5.72, 32: 16.96, 64: 159.12}  # AutoHet's search with a solver
LIMIT_S, LARGE_LIMIT_S = 1.0, 30.0
LAYER = LayerProfile(10**7, 2 * 10**7, 6_700_000_000 * 16 // 32)


@dataclass(frozen=True)
class Row:
    """One cluster."""

    devices: int
    types: int
    even: bool
    seconds: float
    pipelines: int
    gap: float


def measure(devices: int, types: int, *, even: bool) -> Row:
    """Plans one cluster of nodes of one device each."""
    counts = [devices // types] * types if even else [devices // 8, 0, *[devices // 4] * (types - 2)]
    counts[1] += devices - sum(counts)
    nodes = tuple(
        Node(name, 1, tflops * POWER_UNIT, memory * 10**9)
        for (name, tflops, memory), count in zip(TYPES, counts, strict=False)
        for _ in range(count)
    )
    layers = [LAYER] * (96 if devices > 64 else 32)
    begin = time.process_time()
    plan = plan_devices(Cluster(nodes), layers, 16, tp=1)
    return Row(devices, types, even, time.process_time() - begin, len(plan.pipelines), plan.gap)


def main() -> int:
    """Plans all clusters and prints the report. Returns 1 if one took too long."""
    args = argument_parser(__doc__, repetitions=1).parse_args()
    rows = [measure(n, types, even=even) for n in SIZES for types in (2, 3) for even in (True, False)]
    small, large = (max(r.seconds for r in rows if (r.devices > 64) == big) for big in (False, True))
    targets = [
        Target("up to 64 devices", f"<= {LIMIT_S:g} s", f"{small:.2f} s", small <= LIMIT_S),
        Target("1,024 devices", f"<= {LARGE_LIMIT_S:g} s", f"{large:.2f} s", large <= LARGE_LIMIT_S),
    ]
    head = ["devices", "types", "counts", "CPU time", "AutoHet's, with SCIP", "pipelines", "proven best"]
    cells = [
        [
            str(row.devices),
            str(row.types),
            "even" if row.even else "uneven",
            f"{row.seconds:.2f} s",
            f"{SCIP_S[row.devices]} s" if row.devices in SCIP_S else "",
            str(row.pipelines),
            "yes" if not row.gap else f"within {row.gap:.1%}",
        ]
        for row in rows
    ]
    body = f"{' '.join((__doc__ or '').split())}\n\n{table(head, cells)}\n\n{target_table(targets)}"
    return finish("unlike-devices", body, {"rows": rows}, args, well=all(target.met for target in targets))


if __name__ == "__main__":
    sys.exit(main())
