"""How long it takes to plan the moves between two layouts of 1,024 devices, for a model of 100 layers.

Each layer has twelve tensors, and AdamW keeps four more for each. CPU time of one process with one thread.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from benchmarks.planning.models import gpt
from swift_ft.recovery.layout.degrees import SHORT_NAMES, from_names
from swift_ft.recovery.moves.plan import plan_moves

LAYERS = 100
MODEL = gpt("100 layers", LAYERS, 4096, vocabulary=0)
LIMIT_S = 5.0
CASES = (
    ("fewer stages", {"tp": 8, "pp": 16, "dp": 8}, {"tp": 8, "pp": 8, "dp": 16}, False),
    ("more tensor parallelism", {"tp": 8, "pp": 64, "dp": 2}, {"tp": 16, "pp": 32, "dp": 2}, False),
    ("from replicas to stages", {"tp": 8, "pp": 8, "dp": 16}, {"tp": 16, "pp": 64, "dp": 1}, False),
    ("a replica less", {"tp": 8, "pp": 16, "dp": 8}, {"tp": 8, "pp": 16, "dp": 7}, False),
    ("a replica more", {"tp": 8, "pp": 16, "dp": 7}, {"tp": 8, "pp": 16, "dp": 8}, False),
    ("sixteen times the replicas", {"tp": 8, "dp": 8}, {"tp": 8, "dp": 128}, False),
    ("sharded: 24 devices less", {"dp": 1024}, {"dp": 1000}, True),
    ("sharded: half of the devices", {"dp": 1024}, {"dp": 512}, True),
    ("sharded: more stages", {"dp": 128, "pp": 8}, {"dp": 64, "pp": 16}, True),
)
"""Name, old and new degrees, and whether replicas shard their state, as FSDP does."""


@dataclass(frozen=True)
class Row:
    """One change of layout."""

    name: str
    old: str
    new: str
    seconds: float
    moves: int
    moved_share: float


def measure(name: str, old: dict[str, int], new: dict[str, int], sharded: bool) -> Row:
    """Plans one change, with the state already listed."""
    tensors = MODEL.tensors(shared=(("dp", 0),) if sharded else ())
    before, after = (from_names(d.items(), SHORT_NAMES, None).layout(LAYERS) for d in (old, new))
    devices = range(max(before.size, after.size))
    begin = time.process_time()
    plan = plan_moves(tensors, (before, range(before.size)), (after, devices))
    seconds = time.process_time() - begin
    share = plan.moved_bytes / sum(tensor.nbytes for tensor in tensors)
    return Row(name, _text(old), _text(new), seconds, len(plan.moves), share)


def _text(degrees: dict[str, int]) -> str:
    return " ".join(f"{axis}={degree}" for axis, degree in degrees.items())


def main() -> int:
    """Plans all changes and prints the report. Returns 1 if one took too long."""
    args = argument_parser(__doc__, repetitions=1).parse_args()
    rows = [measure(*case) for case in CASES for _ in range(args.repetitions)]
    slowest = max(row.seconds for row in rows)
    target = Target("slowest plan", f"<= {LIMIT_S:g} s", f"{slowest:.2f} s", slowest <= LIMIT_S)
    head = ["change", "from", "to", "CPU time", "moves", "moved / state of one model"]
    cells = [
        [row.name, row.old, row.new, f"{row.seconds:.2f} s", str(row.moves), f"{row.moved_share:.2f}"]
        for row in rows
    ]
    intro = (
        f"{LAYERS} layers of twelve tensors, each with four more of AdamW: 6,000 tensors. CPU time of one "
        "process with one thread, beside other load."
    )
    body = f"{intro}\n\n{table(head, cells)}\n\n{target_table([target])}"
    return finish("layout-moves", body, {"rows": rows}, args, well=bool(target.met))


if __name__ == "__main__":
    sys.exit(main())
