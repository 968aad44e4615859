"""Draws how long each system takes to go on, from the newest recorded side by side (needs swift-ft[plot]).

python -m benchmarks.peers.draw
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.lib.figures import Figure
from benchmarks.lib.runs import Run, newest, read_runs
from benchmarks.peers.report import NEW
from benchmarks.peers.systems import OURS

PICTURE = Path(__file__).resolve().parents[1] / "figures" / "peers.png"
_DPI = 90
_OURS, _OTHERS = "#b3413a", "#8c8c8c"


def main() -> int:
    """Writes the picture."""
    run = newest(read_runs()).get("peers")
    if run is None:
        print("draw.py: no side by side was recorded yet: make bench-peers", file=sys.stderr)
        return 1
    draw(run, PICTURE)
    return 0


def draw(run: Run, path: Path) -> None:
    """A row of bars for each kind of loss, on one logarithmic axis."""
    rows = seconds(run)
    figure, axes = plt.subplots(len(rows), 1, figsize=(8, 1.7 * len(rows)), sharex=True, squeeze=False)
    for (title, found), (one,) in zip(rows.items(), axes, strict=True):
        names = list(found)[::-1]
        values = [found[name] for name in names]
        one.barh(names, values, color=[_OURS if name in OURS else _OTHERS for name in names])
        for place, value in enumerate(values):
            one.text(value, place, f" {value:.3g}", va="center", fontsize=7)
        one.set_title(title, fontsize=8, loc="left")
        one.tick_params(labelsize=7)
        one.set_xscale("log")
        one.margins(x=0.1)
    axes[-1][0].set_xlabel("seconds from the kill to the end of the next new iteration", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)


def seconds(run: Run) -> dict[str, dict[str, float]]:
    """Of each table the row with the checkpoint 25 iterations earlier: by system, if there is a time."""
    found: dict[str, dict[str, float]] = {}
    for one in run.tables:
        for row in one.rows:
            if row[0] == f"{NEW}, 25 after the checkpoint":
                cells = zip(one.columns[1:], row[1:], strict=True)
                times = {name: cell.value for name, cell in cells if isinstance(cell, Figure)}
                known = {name: value for name, value in times.items() if value is not None}
                found[one.text.strip("*")] = known
    return found


if __name__ == "__main__":
    sys.exit(main())
