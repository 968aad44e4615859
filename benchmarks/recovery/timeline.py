"""Draws the timeline of the first recovery in a file of `swift-run --events-out` (needs swift-ft[plot])."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

COLOURS = {"trains": "#4c9a6a", "waits, keeps its state": "#d9d2bc", "dead": "#b3413a", "starts": "#8c8c8c"}
REPLAY = "#3f6fb0"


def main() -> None:
    """Reads the events and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("events")
    parser.add_argument("picture")
    args = parser.parse_args()
    report = json.loads(Path(args.events).read_text())
    figure = draw(report["events"], report["recoveries"][0])
    figure.savefig(args.picture, bbox_inches="tight")


def draw(events: list[dict[str, Any]], recovery: dict[str, Any]) -> Any:
    """One row per machine, seconds since the kill."""
    kill = next(e["at"] for e in events if e["event"] == "FaultInjected")
    lost = recovery["slots"][0]
    reported = {
        e["rank"]: e["at"] - kill
        for e in events
        if e["event"] == "StatusReported" and e["generation"] == recovery["generation"]
    }
    live = recovery["live"] - kill
    detected = recovery["detected"] - kill
    start, end = -0.25 * live, 1.25 * live
    figure, axes = plt.subplots(figsize=(9, 2.8))
    for rank in sorted(reported):
        if rank == lost:
            spans = [(start, 0, "trains"), (0, detected, "dead"), (detected, reported[rank], "starts")]
            replayed = recovery["replayed_iterations"].get(str(rank), 0)
            label = f"loads its checkpoint, replays {replayed} iterations"
            axes.barh(rank, live - reported[rank], left=reported[rank], color=REPLAY, height=0.6)
            axes.text(
                (live + reported[rank]) / 2, rank, label, ha="center", va="center", color="white", fontsize=9
            )
        else:
            spans = [(start, detected, "trains"), (detected, live, "waits, keeps its state")]
        for left, right, kind in [*spans, (live, end, "trains")]:
            axes.barh(rank, right - left, left=left, color=COLOURS[kind], height=0.6)
    axes.axvline(0, color="#b3413a", linewidth=1)
    axes.text(0, -0.75, "SIGKILL", color="#b3413a", ha="center", fontsize=9)
    axes.set_yticks(sorted(reported), [f"machine {rank}" for rank in sorted(reported)])
    axes.invert_yaxis()
    axes.set_xlim(start, end)
    axes.set_xlabel("seconds since the kill")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(handles, COLOURS, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.28), frameon=False)
    return figure


if __name__ == "__main__":
    main()
