"""AutoHet's recoveries A, B and C (arXiv 2512.20953, figure 10), by the bytes that move.

Sixteen devices form four pipelines: two H20 of node 1 with the first layers, two A100 of node 0 with the
others. A: two pipelines are lost. B: node 0 is lost, and node 1 goes on as two pipelines of one stage with
four slices. C: two A100 and two H20 come on nodes of their own. The paper publishes how much faster than
Varuna each is. The cut of the layers is not published: here it is the one that swift-plan finds for this
cluster, 10 and 22 of 32.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from swift_ft.costs.layer_profile import LayerProfile
from swift_ft.planning.layout.cluster import POWER_UNIT, Cluster, Node
from swift_ft.planning.layout.devices import plan_devices
from swift_ft.recovery.layout.mesh import Layout, Stages
from swift_ft.recovery.layout.tensors import StateTensor
from swift_ft.recovery.moves.plan import MovePlan, plan_moves
from swift_ft.recovery.moves.sources import Location

LAYERS = 32
PARAMETERS = {"3B": 3e9, "6.7B": 6.7e9, "13B": 13e9, "20B": 20e9}
BYTES_PER_PARAMETER = 14  # 16-bit weights, 32-bit optimizer: the paper's 180 GB for 13 billion
CLOUD, DISK = 1.2e9, 3.5e9  # bytes per second, published
LAYER = LayerProfile(10**7, 2 * 10**7, 6_700_000_000 * 16 // LAYERS)
A100 = Node("A100", 8, 312 * POWER_UNIT, 80 * 10**9)
H20 = Node("H20", 8, 148 * POWER_UNIT, 100 * 10**9)
SLICES = 96  # units of a layer's state: divides by two, three and four


def stages() -> Stages:
    """The cut that swift-plan finds for eight A100, eight H20 and two slices."""
    plan = plan_devices(Cluster((A100, H20)), [LAYER] * LAYERS, 16, tp=2)
    if [pipeline.devices for pipeline in plan.pipelines] != [{"A100": 2, "H20": 2}] * 4:
        raise AssertionError("the four pipelines are not those of the paper")
    return plan.pipelines[0].stages


@dataclass(frozen=True)
class Scenario:
    """A change of what is available.

    Attributes:
        name: a letter, as in the paper.
        speedup: over Varuna, as published.
        lost: devices that are gone. Node 0 has 0 to 7, node 1 has 8 to 15.
        replicas: pipelines afterwards.
        whole: whether a pipeline has one stage of four slices afterwards.
        added: devices of nodes 2 and 3.
    """

    name: str
    speedup: float
    lost: tuple[int, ...]
    replicas: int
    whole: bool = False
    added: int = 0


SCENARIOS = (
    Scenario("A", 4.38, (4, 5, 6, 7, 12, 13, 14, 15), 2),
    Scenario("B", 1.49, tuple(range(8)), 2, whole=True),
    Scenario("C", 3.59, (), 5, added=4),
)


@dataclass(frozen=True)
class Recovery:
    """A scenario, in shares of one model's state.

    Attributes:
        name: of the scenario.
        kept: what stays on its device.
        peers: what comes from living devices.
        cloud: what no living device holds, for all pipelines.
        missing: the same, each byte once.
        varuna: what Varuna downloads: all pipelines' state.
        faster: than Varuna, if disks and the cloud are as fast as published and all else costs nothing.
    """

    name: str
    kept: float
    peers: float
    cloud: float
    missing: float
    varuna: float
    faster: float


def recover(scenario: Scenario) -> Recovery:
    """Plans one scenario."""
    cut = stages()
    plan = plan_scenario(scenario, cut)
    state = LAYERS * SLICES
    cloud = plan.bytes_by_source().get(None, 0)
    different = {(move.tensors, move.ranges): move.nbytes for move in plan.moves if move.source is None}
    # AutoHet's processes read their layers from the disks of their nodes, at once with the cloud (B: all
    # of the time).
    on_node = max(last - first + 1 for first, last in cut) / LAYERS
    disk = 0.0 if scenario.whole else scenario.replicas * on_node / DISK
    ours = max(disk, cloud / state / CLOUD)
    return Recovery(
        scenario.name,
        plan.kept_bytes / state,
        (plan.moved_bytes - cloud) / state,
        cloud / state,
        sum(different.values()) / state,
        scenario.replicas,
        scenario.replicas / CLOUD / ours,
    )


def plan_scenario(scenario: Scenario, cut: Stages) -> MovePlan:
    """The moves of one scenario, each layer's state being 96 bytes."""
    tensors = [StateTensor(f"layers.{i}", (SLICES,), 1, (i,), (("tp", 0),)) for i in range(LAYERS)]
    old = Layout((cut,) * 4, tp=2)
    devices = [device for p in range(4) for device in (8 + 2 * p, 9 + 2 * p, 2 * p, 2 * p + 1)]
    living = [device for device in devices if device not in scenario.lost]
    after: Stages = ((0, LAYERS - 1),) if scenario.whole else cut
    new = Layout((after,) * scenario.replicas, tp=4 if scenario.whole else 2)
    return plan_moves(
        tensors,
        (old, devices),
        (new, [*living, *range(16, 16 + scenario.added)]),
        lost=scenario.lost,
        locations=nodes(),
    )


def nodes() -> dict[int, Location]:
    """The node of each device."""
    return {device: (device // 8 if device < 16 else 2 + (device - 16) // 2,) for device in range(20)}


def main() -> int:
    """Plans all scenarios and prints the report. Returns 1 if A or C needs the cloud."""
    args = argument_parser(__doc__, repetitions=1).parse_args()
    rows = [recover(scenario) for scenario in SCENARIOS]
    head = ["scenario", "stays", "from peers", "from the cloud", "the same, once", "Varuna, from the cloud"]
    head += [f"{size}, GB from the cloud" for size in PARAMETERS]
    head += ["faster than Varuna, by published rates", "published"]
    cells = [
        [
            row.name,
            *(f"{share:.3f}" for share in (row.kept, row.peers, row.cloud, row.missing, row.varuna)),
            *(f"{row.cloud * n * BYTES_PER_PARAMETER / 1e9:.1f}" for n in PARAMETERS.values()),
            f"{row.faster:.2f}",
            f"{scenario.speedup:.2f}",
        ]
        for row, scenario in zip(rows, SCENARIOS, strict=True)
    ]
    cloud = max(row.cloud for row in rows if row.name != "B")
    off = [row.faster / scenario.speedup - 1 for row, scenario in zip(rows, SCENARIOS, strict=True)]
    targets = [
        Target("bytes from the cloud in scenarios A and C", "<= 0", f"{cloud:g}", cloud == 0),
        *(
            Target(f"{row.name}: faster than Varuna, beside the published", "", f"{by:+.1%}", None)
            for row, by in zip(rows, off, strict=True)
        ),
    ]
    intro = (
        f"{' '.join((__doc__ or '').split())} Shares are of one model's state. The last columns take the "
        "published 1.2 GB/s of the cloud and 3.5 GB/s of each node's disks: AutoHet reads all pipelines' "
        "layers from the disks while it downloads the rest, Varuna downloads all. C comes out too fast, so "
        "reading is not all that it takes. swift_ft keeps its processes, and what stays is not read at all."
    )
    body = f"{intro}\n\n{table(head, cells)}\n\n{target_table(targets)}"
    return finish("autohet", body, {"rows": rows}, args, well=cloud == 0)


if __name__ == "__main__":
    sys.exit(main())
