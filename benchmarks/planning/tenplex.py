"""The bytes that Tenplex's changes of the layout move (SOSP '24, figures 7, 10, 11, 14, 15 and 16).

Degrees are (T, P, D) as in the paper, devices stand four to a machine. Tenplex publishes seconds, no bytes.
The layout after 12 of 16 devices are lost is not published: here it is one replica of one stage. Figure 15
also has 32 stages, more than GPT-3 XL has layers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks.lib.results import Target, argument_parser, finish, table, target_table
from benchmarks.planning.models import gpt
from swift_ft.recovery.layout.degrees import Degrees
from swift_ft.recovery.layout.mesh import Layout
from swift_ft.recovery.layout.tensors import StateTensor
from swift_ft.recovery.moves.plan import MovePlan, plan_moves
from swift_ft.recovery.moves.sources import Location

MODELS = (gpt("GPT-3 1.3B", 24, 2048), gpt("GPT-3 2.7B", 32, 2560), gpt("GPT-3 6.7B", 32, 4096))
PER_MACHINE = 4
MOST_DEVICES = 32


@dataclass(frozen=True)
class Change:
    """A change of the layout.

    Attributes:
        old: T, P and D.
        new: the same afterwards.
        lost: devices that die.
        elsewhere: whether other devices go on.
    """

    old: tuple[int, int, int]
    new: tuple[int, int, int]
    lost: range = range(0)
    elsewhere: bool = False

    def layouts(self, layers: int) -> tuple[Layout, Layout]:
        """Both layouts of a model."""
        old, new = (Degrees(tp=t, pp=p, dp=d).layout(layers) for t, p, d in (self.old, self.new))
        return old, new

    def devices(self, layers: int) -> list[int]:
        """Those that may take a slot of the new layout."""
        old, new = self.layouts(layers)
        if self.elsewhere:
            return list(range(old.size, old.size + new.size))
        return [device for device in range(max(old.size, new.size)) if device not in self.lost]

    def plan(self, tensors: list[StateTensor], layers: int, *, in_order: bool = False) -> MovePlan:
        """The plan, for a model of so many layers."""
        old, new = self.layouts(layers)
        return plan_moves(
            tensors,
            (old, range(old.size)),
            (new, self.devices(layers)),
            lost=list(self.lost),
            locations=machines(),
            in_order=in_order,
        )


EIGHT = {
    "figure 7: two slices on one stage, three on two": Change((2, 1, 1), (3, 2, 1)),
    "figure 10: the same on other devices": Change((4, 1, 2), (4, 1, 2), elsewhere=True),
    "figure 11: 4 of 16 devices lost": Change((4, 2, 2), (4, 2, 1), range(4)),
    "figure 11: 8 of 16 devices lost": Change((4, 2, 2), (4, 2, 1), range(8)),
    "figure 11: 12 of 16 devices lost": Change((4, 2, 2), (4, 1, 1), range(12)),
    "figure 14: twice the replicas": Change((4, 2, 1), (4, 2, 2)),
    "figure 14: twice the stages": Change((4, 2, 1), (4, 4, 1)),
    "figure 14: twice the slices": Change((4, 2, 1), (8, 2, 1)),
}
"""Those whose degrees the text of the paper names, but for the doublings of figures 15 and 16."""

DOUBLED = {
    f"figures 15 and 16: {axis} from {n} to {2 * n}": Change(old, new)
    for n in (4, 8, 16)
    for axis, old, new in (
        ("T", (n, 1, 1), (2 * n, 1, 1)),
        ("P", (1, n, 1), (1, 2 * n, 1)),
        ("D", (1, 1, n), (1, 1, 2 * n)),
    )
    if axis != "P" or n < 16
}
HALVED = {
    "figure 16: T from 8 to 4": Change((8, 1, 1), (4, 1, 1)),
    "figure 16: P from 8 to 4": Change((1, 8, 1), (1, 4, 1)),
    "figure 16: D from 8 to 4": Change((1, 1, 8), (1, 1, 4)),
}
CHANGES = {**EIGHT, **DOUBLED, **HALVED}


def machines() -> dict[int, Location]:
    """The machine of each device."""
    return {device: (device // PER_MACHINE,) for device in range(MOST_DEVICES)}


@dataclass(frozen=True)
class Row:
    """One change of one model, in bytes."""

    change: str
    model: str
    state: int
    moved: int
    across: int
    from_checkpoint: int
    in_order: int


def measure() -> list[Row]:
    """Plans all changes of all models."""
    rows = []
    for model in MODELS:
        tensors = model.tensors()
        state = sum(tensor.nbytes for tensor in tensors)
        for name, change in CHANGES.items():
            plan = change.plan(tensors, model.layers)
            across = sum(n for levels, n in plan.bytes_by_distance(machines()).items() if levels)
            ranked = change.plan(tensors, model.layers, in_order=True).moved_bytes
            lost = plan.bytes_by_source().get(None, 0)
            rows.append(Row(name, model.name, state, plan.moved_bytes, across, lost, ranked))
    return rows


def main() -> int:
    """Plans all changes and prints the report. Returns 1 if one moves more than ranks in order would."""
    args = argument_parser(__doc__, repetitions=1).parse_args()
    rows = measure()
    head = ["change", "(T, P, D)", *(f"{model.name}, GB" for model in MODELS)]
    head += ["of the state", "across machines", "from the checkpoint", "ranks in order"]
    cells = []
    for name, change in CHANGES.items():
        own = [row for row in rows if row.change == name]
        largest = own[-1]
        shares = (largest.moved, largest.across, largest.from_checkpoint, largest.in_order)
        cells.append(
            [
                name,
                f"{change.old} to {change.new}",
                *(f"{row.moved / 1e9:.2f}" for row in own),
                *(f"{share / largest.state:.3f}" for share in shares),
            ]
        )
    never = sum(row.moved > row.in_order for row in rows)
    less = sum(row.moved < row.in_order for row in rows if row.model == MODELS[-1].name)
    living = max(row.moved for row in rows if "4 of 16" in row.change or "8 of 16" in row.change)
    targets = [
        Target("plans that move more than ranks in order", "<= 0", str(never), never == 0),
        Target("bytes that move after a loss while a replica lives", "<= 0", str(living), living == 0),
        Target("changes of one model that move less than ranks in order", "", str(less), None),
    ]
    intro = (
        f"{' '.join((__doc__ or '').split())} Shares are those of GPT-3 6.7B: parameters in 16 bits, AdamW's "
        "averages and a copy of the weights in 32 bits, the embedding tied to the head."
    )
    body = f"{intro}\n\n{table(head, cells)}\n\n{target_table(targets)}"
    well = all(target.met is not False for target in targets)
    return finish("tenplex", body, {"rows": rows}, args, well=well)


if __name__ == "__main__":
    sys.exit(main())
