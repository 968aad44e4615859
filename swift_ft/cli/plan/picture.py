"""Pictures of plans: one bar for each pipeline, its stages as long as they compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_ft.cli.common import pyplot, save_plot
from swift_ft.costs.layer_profile import NANOSECONDS
from swift_ft.planning.layout.costs import StageCosts
from swift_ft.planning.layout.search import Stage
from swift_ft.units import format_seconds

STAGE_SECONDS = "seconds of a microbatch, forward and backward; in the bars, layers"

_COLOURS = ("#4c78a8", "#9ecae9")
_MOST_LABELS = 12
"""Stages of a bar whose layers are written into it; more would not be legible."""


def draw_stages(rows: Sequence[tuple[str, Sequence[Stage], int]], costs: StageCosts, path: Path) -> None:
    """Draw pipelines into a file.

    Args:
        rows: of each pipeline its name, its stages, and the time of an iteration in nanoseconds.
        path: of the picture; its format follows the name.

    Raises:
        UsageError: if matplotlib is missing, or the file cannot be written.
    """
    bars = [
        (
            f"{name}\n{format_seconds(time_ns / NANOSECONDS)}",
            [(named(stage), costs.time(*stage).compute_ns / NANOSECONDS) for stage in stages],
        )
        for name, stages, time_ns in rows
    ]
    draw_bars(bars, STAGE_SECONDS, path)


def draw_bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], axis: str, path: Path) -> None:
    """Draw a bar of several parts per row into a file.

    Args:
        rows: of each bar its name, and of its parts the label and the length.
        axis: what the length means.
        path: of the picture; its format follows the name.

    Raises:
        UsageError: if matplotlib is missing, or the file cannot be written.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(10, 1 + 0.4 * len(rows)))
    for row, (_, parts) in enumerate(rows):
        left = 0.0
        for number, (label, width) in enumerate(parts):
            axes.barh(row, width, left=left, color=_COLOURS[number % 2], edgecolor="white")
            if len(parts) <= _MOST_LABELS:
                axes.text(left + width / 2, row, label, ha="center", va="center", fontsize=7)
            left += width
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(axis)
    if all(float(width).is_integer() for _, parts in rows for _, width in parts):
        axes.xaxis.get_major_locator().set_params(integer=True)  # it counts something
    save_plot(figure, path)
    plt.close(figure)


def named(stage: Stage) -> str:
    """The layers of a stage: ``3`` or ``3-5``."""
    last = stage.end - 1
    return str(last) if stage.first == last else f"{stage.first}-{last}"
