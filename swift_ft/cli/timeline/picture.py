"""The Gantt picture of a run as a file, drawn by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift_ft.cli.common import pyplot, save_plot
from swift_ft.cli.timeline.chart import Chart, in_words, recovery_chart, run_chart, ticks
from swift_ft.cli.timeline.words import goodput_in_words
from swift_ft.errors import UsageError
from swift_ft.offline.timeline import RunTimeline
from swift_ft.recovery.occupancy import Doing
from swift_ft.units import format_seconds

COLOURS: dict[Doing, str] = {
    Doing.TRAINS: "#3f9a70",
    Doing.WAITS: "#ddd3b4",
    Doing.ABSENT: "#b3413a",
    Doing.STARTS: "#8c8c8c",
    Doing.LOADS: "#8fb4e0",
    Doing.REPLAYS: "#3f6fb0",
    Doing.HELPS: "#8559a8",
    Doing.JOINS: "#e0a13c",
    Doing.DONE: "#c3ddd0",
}
_LOSS, _BACK, _CHECKPOINT, _MEMORY = "#b3413a", "#2c6e4f", "#555555", "#6a4fa3"
_MOST_RECOVERIES = 3
_LEAST = 0.0015
"""Of the axis: width of a bar that would be narrower."""


def draw(timeline: RunTimeline, path: Path) -> None:
    """Draw the whole run, and below it the recoveries that took longest.

    Raises:
        UsageError: nothing is known of the run, matplotlib is missing, or the file cannot be written.
    """
    whole = run_chart(timeline)
    if whole is None:
        why = "; ".join((*timeline.problems, *timeline.unknown))
        raise UsageError(f"nothing of run {timeline.run_id} can be drawn: {why}")
    longest = sorted(timeline.recoveries, key=lambda report: -report.total_s)[:_MOST_RECOVERIES]
    chosen = sorted(longest, key=lambda report: report.number)
    charts = [whole, *(recovery_chart(timeline, report) for report in chosen)]
    titles = [
        _title(timeline),
        *(f"Recovery {r.number}: {in_words(r)}, {format_seconds(r.total_s)}" for r in chosen),
    ]
    plt = pyplot()
    heights = [len(chart.rows) + 2 for chart in charts]
    size = (10, 0.27 * sum(heights) + 0.75 * len(charts) + 0.6)
    figure, panels = plt.subplots(
        len(charts), 1, figsize=size, squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axes, chart, title in zip(panels[:, 0], charts, titles, strict=True):
        _panel(axes, chart, title)
    found = {doing for chart in charts for doing in chart.shown}
    shown = [doing for doing in Doing if doing in found]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[doing]) for doing in shown]
    words = [doing.meaning for doing in shown]
    if timeline.checkpoints:
        handles.append(plt.Line2D([], [], linestyle="", marker="^", color=_CHECKPOINT, markersize=5))
        words.append("checkpoint committed")
    if timeline.memory_checkpoints:
        handles.append(plt.Line2D([], [], linestyle="", marker="D", color=_MEMORY, markersize=4))
        words.append("memory checkpoint on the machines that are left")
    figure.legend(handles, words, ncols=4, loc="outside lower center", frameon=False, fontsize=8)
    save_plot(figure, path)
    plt.close(figure)


def _title(timeline: RunTimeline) -> str:
    duration = format_seconds(timeline.goodput.wall_s)
    return f"Run {timeline.run_id}: {duration}, goodput {goodput_in_words(timeline)}"


def _panel(axes: Any, chart: Chart, title: str) -> None:
    least = _LEAST * (chart.end - chart.begin)
    for y, row in enumerate(chart.rows):
        for bar in sorted(row.bars, key=lambda bar: bar.begin - bar.end):
            width = max(least, bar.end - bar.begin)
            axes.barh(y, width, left=bar.begin, color=COLOURS[bar.doing], height=0.72)
    top, bottom = -0.6, len(chart.rows) - 0.4
    for mark in chart.marks:
        if mark.kind == "checkpoint":
            axes.plot([mark.at], [bottom], marker="^", color=_CHECKPOINT, markersize=5, clip_on=False)
            continue
        if mark.kind == "memory":
            axes.plot([mark.at], [bottom], marker="D", color=_MEMORY, markersize=4, clip_on=False)
            continue
        colour = _LOSS if mark.kind == "loss" else _BACK
        axes.axvline(mark.at, color=colour, linewidth=1)
        axes.text(mark.at, top, mark.label, color=colour, ha="center", va="bottom", fontsize=8)
    axes.set_ylim(bottom, top)
    axes.set_xlim(chart.begin, chart.end)
    axes.set_yticks(range(len(chart.rows)), [_plain(row.label) for row in chart.rows], fontsize=8)
    places = ticks(chart.begin, chart.end)
    axes.set_xticks([at for at, _ in places], [label for _, label in places], fontsize=8)
    left_out = f" ({chart.left_out} workers that only train and wait are not shown)" * bool(chart.left_out)
    axes.set_xlabel(chart.axis + left_out, fontsize=8)
    axes.set_title(_plain(title), fontsize=9.5, loc="left", pad=16)
    axes.tick_params(length=2)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _plain(text: str) -> str:
    """Without matplotlib's mathematics, which a dollar sign begins."""
    return text.replace("$", r"\$")
