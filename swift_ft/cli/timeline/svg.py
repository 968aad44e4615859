"""A chart as inline SVG. Its colours are those of the page's style sheet."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from swift_ft.cli.timeline.chart import Chart, Mark, ticks

_WIDTH, _LABELS, _RIGHT, _TOP = 1000, 190, 12, 24
_ROW, _BAR, _AXIS = 24, 17, 44
_LEAST = 1.5
"""Width of a bar that would be narrower: an event of a second shows in a run of a day."""


def svg_of(chart: Chart) -> str:
    """Draw a chart. All text in it is escaped."""
    height = _TOP + len(chart.rows) * _ROW + _AXIS
    parts = [
        f'<svg class="gantt" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(chart.title)}">',
        *_axis(chart),
        *_rows(chart),
        *(line for mark in chart.marks for line in _mark(chart, mark)),
        "</svg>",
    ]
    return "\n".join(parts)


def _x(chart: Chart, at: float) -> float:
    share = (at - chart.begin) / (chart.end - chart.begin)
    return _LABELS + share * (_WIDTH - _LABELS - _RIGHT)


def _axis(chart: Chart) -> Iterator[str]:
    bottom = _TOP + len(chart.rows) * _ROW
    for at, label in ticks(chart.begin, chart.end):
        x = _x(chart, at)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom + 4}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 18}">{escape(label)}</text>'
    middle = (_LABELS + _WIDTH - _RIGHT) / 2
    yield f'<text class="axis" x="{middle:.0f}" y="{bottom + 37}">{escape(chart.axis)}</text>'


def _rows(chart: Chart) -> Iterator[str]:
    for number, row in enumerate(chart.rows):
        y = _TOP + number * _ROW
        yield f'<text class="label" x="{_LABELS - 10}" y="{y + 16}">{escape(row.label)}</text>'
        for bar in sorted(row.bars, key=lambda bar: bar.begin - bar.end):  # the short ones above the long
            x = _x(chart, bar.begin)
            width = max(_LEAST, _x(chart, bar.end) - x)
            place = f'x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_BAR}"'
            yield f'<rect class="bar {bar.doing}" {place}><title>{escape(bar.title)}</title></rect>'


def _mark(chart: Chart, mark: Mark) -> Iterator[str]:
    x, bottom = _x(chart, mark.at), _TOP + len(chart.rows) * _ROW
    title = f"<title>{escape(mark.title)}</title>"
    if mark.kind == "checkpoint":
        points = f"{x - 4:.1f},{bottom + 6} {x + 4:.1f},{bottom + 6} {x:.1f},{bottom}"
        yield f'<polygon class="mark checkpoint" points="{points}">{title}</polygon>'
        return
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{bottom}"'
    yield f'<line class="mark {mark.kind}" {ends}>{title}</line>'
    yield f'<text class="mark {mark.kind}" x="{x:.1f}" y="{_TOP - 9}">{escape(mark.label)}{title}</text>'
