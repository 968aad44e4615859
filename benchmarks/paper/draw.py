"""Draws figures 9 to 11 as PNG, from what was measured (needs swift-ft[plot])."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.lib.results import Summary
from benchmarks.paper.variants import Run

_DPI = 90  # a file of each stays small enough for a repository
_COLOURS = ("#8c8c8c", "#3f6fb0", "#4c9a6a", "#b3813a", "#b3413a", "#7a5ea8")


@dataclass(frozen=True)
class Bar:
    """One bar of figure 9.

    Attributes:
        name: below it.
        value: its height, and the range of the repetitions.
        words: above it.
    """

    name: str
    value: Summary
    words: str = ""


@dataclass(frozen=True)
class Marker:
    """One marker of figure 11: a number of groups.

    Attributes:
        groups: how many.
        log_bytes: over a checkpoint interval.
        measured: seconds of recovery.
        planned: seconds of recovery that the session's plan had forecast.
    """

    groups: int
    log_bytes: int
    measured: Summary
    planned: Summary


def figure_9(panels: Mapping[str, tuple[Sequence[Bar], Sequence[Bar]]], path: Path) -> None:
    """Failure-free throughput (top) and recovery time (bottom), a column for each kind of parallelism."""
    widths = [len(throughput) for throughput, _ in panels.values()]
    figure, grid = plt.subplots(2, len(panels), figsize=(11, 7), squeeze=False, width_ratios=widths)
    for column, (title, (throughput, recovery)) in enumerate(panels.items()):
        _bars(grid[0][column], throughput, "sequences / s, failure-free")
        _bars(grid[1][column], recovery, "recovery time [s]")
        grid[0][column].set_title(title)
    _save(figure, path)


def figure_10(runs: Mapping[str, Run], batch: int, path: Path) -> None:
    """Throughput over time around the failure; what is computed again counts, as in the paper."""
    figure, panels = plt.subplots(len(runs), 1, figsize=(9, 1.5 * len(runs) + 0.6), sharex=True, sharey=True)
    compared = next(iter(runs.values()))
    restored_s = compared.joined_s + compared.recovery_s
    for axes, (name, run), colour in zip(panels, runs.items(), _COLOURS, strict=False):
        for span in run.spans:
            axes.plot(
                [span.begin, span.end], [batch / (span.end - span.begin)] * 2, color=colour, linewidth=3
            )
        axes.axvline(0, color="#b3413a", linewidth=1)
        axes.axvline(restored_s, color="#3f6fb0", linewidth=1, linestyle="--")
        axes.set_title(f"{name}: back after {run.joined_s + run.recovery_s:.1f} s", fontsize=9, loc="left")
    panels[-1].set_ylim(bottom=0)  # of all
    panels[-1].set_xlim(-0.3 * restored_s, 1.3 * restored_s)
    panels[-1].set_xlabel("seconds since the kill (red); dashed: global checkpoint is back")
    figure.supylabel("sequences / s", fontsize=9)
    _save(figure, path)


def figure_11(markers: Sequence[Marker], path: Path) -> None:
    """Recovery time against the log's size, by number of groups."""
    figure, axes = plt.subplots(figsize=(6, 4))
    ordered = sorted(markers, key=lambda marker: marker.log_bytes)
    sizes = [marker.log_bytes / 1e6 for marker in ordered]
    for name, style, found in (
        ("measured", "o-", [marker.measured for marker in ordered]),
        ("forecast by session.plan()", "s--", [marker.planned for marker in ordered]),
    ):
        axes.errorbar(sizes, [one.median for one in found], _ranges(found), fmt=style, capsize=3, label=name)
    for marker, size in zip(ordered, sizes, strict=True):
        place = (size, marker.measured.median)
        axes.annotate(
            f"{marker.groups} group{'s' * (marker.groups > 1)}",
            place,
            textcoords="offset points",
            xytext=(4, 6),
            fontsize=8,
        )
    axes.set_xlabel("log over a checkpoint interval [MB]")
    axes.set_ylabel("recovery time [s]")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    axes.legend(fontsize=8)
    _save(figure, path)


def _bars(axes: Any, bars: Sequence[Bar], label: str) -> None:
    values = [bar.value for bar in bars]
    places = range(len(bars))
    axes.bar(
        places,
        [value.median for value in values],
        yerr=_ranges(values),
        color=[_COLOURS[place % len(_COLOURS)] for place in places],
        capsize=3,
    )
    for place, bar in enumerate(bars):
        words = f"{bar.value.median:.3g}" + (f"\n{bar.words}" if bar.words else "")
        axes.text(place, bar.value.high, words, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(places, [bar.name.replace(", ", ",\n") for bar in bars], fontsize=7)
    axes.set_ylabel(label, fontsize=8)
    axes.margins(y=0.3)


def _ranges(values: Sequence[Summary]) -> list[list[float]]:
    return [[one.median - one.low for one in values], [one.high - one.median for one in values]]


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)
