"""The report of a run as one HTML file, which needs no network and no script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from string import Template

from swift_ft.cli.timeline.chart import Chart, Moment, recovery_chart, run_chart, ticks
from swift_ft.cli.timeline.reader import cause_named, column_named, grade, parts_of, told, without_slots
from swift_ft.cli.timeline.tables import (
    ReportTable,
    place_table,
    recovery_table,
    time_table,
    took_in_words,
    work_table,
    world_table,
)
from swift_ft.cli.timeline.words import goodput_in_words, in_seconds, lost_in_words, outcome
from swift_ft.offline.lost_time import Cause
from swift_ft.offline.timeline import RecoveryReport, RunTimeline
from swift_ft.units import counted, format_bytes, format_seconds

_MOST_PICTURES = 20
_WIDTH, _LABELS, _RIGHT, _TOP = 1000, 190, 12, 24
_ROW, _BAR, _AXIS = 24, 17, 44
_LEAST = 1.5
"""Width of a bar that would be narrower: an event of a second shows in a run of a day."""
_Cell = tuple[str, str]
"""The class of a cell, and its HTML."""


def html_of(timeline: RunTimeline, written: datetime) -> str:
    """The whole page. Everything that a run, a script or a host could name is escaped.

    Args:
        written: when, with a time zone.
    """
    template = Template(files("swift_ft.cli.timeline").joinpath("page.html").read_text())
    workers = counted(timeline.workers_per_machine, "worker")
    size = f", {counted(timeline.machines, 'machine')} with {workers} each" if timeline.machines else ""
    return template.substitute(
        title=escape(f"Run {timeline.run_id}"),
        run=escape(timeline.run_id),
        where=escape(f"{timeline.url}{size}"),
        outcome=escape(outcome(timeline)),
        notes="\n".join(_notes(timeline)),
        tiles="\n".join(_tiles(timeline)),
        sections="\n".join(_sections(timeline)),
        footer=escape(
            f"Written by swift-recover timeline on {written.astimezone(UTC):%Y-%m-%d at %H:%M:%S} UTC from "
            "the store of the run. Times are those of the machines' own clocks. docs/timeline.md defines "
            "all terms."
        ),
    )


def _notes(timeline: RunTimeline) -> Iterator[str]:
    for problem in timeline.problems:
        yield f'<p class="note bad"><b>Damaged or missing:</b> {escape(problem)}</p>'
    for unknown in timeline.unknown:
        yield f'<p class="note"><b>Not known:</b> {escape(unknown)}</p>'


def _tiles(timeline: RunTimeline) -> Iterator[str]:
    good, totals = timeline.goodput, timeline.totals
    seconds = {one.cause: one.seconds for one in good.lost}
    values = [("goodput", goodput_in_words(timeline))]
    if good.share is not None:
        values += [
            ("duration", format_seconds(good.wall_s)),
            ("not training", format_seconds(good.wall_s - good.training_s)),
            ("recoveries", str(len(timeline.recoveries))),
        ]
    if any(worker.known for worker in totals):
        values += [
            ("iterations", str(max(worker.iteration for worker in totals))),
            ("logged", format_bytes(sum(worker.log_bytes for worker in totals))),
            ("waited for the log", in_seconds(seconds[Cause.HELD_BACK])),
        ]
    for number, (name, value) in enumerate(values):
        css = f" main {grade(good)}".rstrip() if number == 0 else ""
        yield f'<div class="tile{css}"><b>{escape(value)}</b><span>{name}</span></div>'


def _sections(timeline: RunTimeline) -> Iterator[str]:
    chart = run_chart(timeline, told)
    if chart is None:
        return
    yield "<h2>Where the time went</h2>"
    yield _lost_time(timeline)
    yield "<h2>The whole run</h2>"
    yield _figure(chart)
    yield "<h2>Recoveries</h2>"
    yield from _recoveries(timeline)
    if timeline.worlds:
        yield "<h2>Other worlds</h2>"
        yield _plain_table(world_table(timeline))
    yield "<h2>Who held what, and when</h2>"
    yield _plain_table(place_table(timeline))
    yield "<h2>Work and log of each worker</h2>"
    yield _plain_table(work_table(timeline))
    yield (
        '<p class="soft">A worker notes this at each checkpoint, when it is interrupted, and at its end. '
        "One that is killed takes the last steps before with it.</p>"
    )


def _lost_time(timeline: RunTimeline) -> str:
    """The table of lost time, with a bar in each row."""
    good, table = timeline.goodput, time_table(timeline)
    bars = []
    for number, seconds in enumerate((good.training_s, *(lost.seconds for lost in good.lost))):
        width, css = 100 * (seconds or 0) / (good.wall_s or 1.0), "lost" if number else "trains"
        bars.append(f'<span class="share {css}" style="width:{width:.2f}%"></span>' if width else "")
    rows = [
        [("name", cause_named(name)), ("n", escape(time)), ("n", percent), ("bar-cell", bar), ("soft", words)]
        for (name, time, percent, words), bar in zip(table.rows, bars, strict=True)
    ]
    return _table(["", "time", "share", "", "what that is"], rows, numeric=(1, 2), css="shares")


def _figure(chart: Chart) -> str:
    legend = "".join(f'<li><i class="{doing}"></i>{escape(doing.meaning)}</li>' for doing in chart.shown)
    if any(mark.kind == "checkpoint" for mark in chart.marks):
        legend += "<li>▲ checkpoint committed</li>"
    if any(mark.kind == "memory" for mark in chart.marks):
        legend += '<li><span class="memory">◆</span> memory checkpoint on the machines that are left</li>'
    if chart.left_out:
        legend += f"<li>{chart.left_out} workers that only train and wait are not shown</li>"
    picture = f'<div class="scroll">{_svg(chart)}</div>'
    return f'<div class="card">{picture}<ul class="legend">{legend}</ul></div>'


def _svg(chart: Chart) -> str:
    """A chart as inline SVG. Its colours are those of the page's style sheet."""
    height = _TOP + len(chart.rows) * _ROW + _AXIS
    parts = [
        f'<svg class="gantt" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(chart.title)}">',
        *_svg_axis(chart),
        *_svg_rows(chart),
        *(line for mark in chart.marks for line in _svg_mark(chart, mark)),
        "</svg>",
    ]
    return "\n".join(parts)


def _x(chart: Chart, at: float) -> float:
    share = (at - chart.begin) / (chart.end - chart.begin)
    return _LABELS + share * (_WIDTH - _LABELS - _RIGHT)


def _svg_axis(chart: Chart) -> Iterator[str]:
    bottom = _TOP + len(chart.rows) * _ROW
    for at, label in ticks(chart.begin, chart.end):
        x = _x(chart, at)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom + 4}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 18}">{escape(label)}</text>'
    middle = (_LABELS + _WIDTH - _RIGHT) / 2
    yield f'<text class="axis" x="{middle:.0f}" y="{bottom + 37}">{escape(chart.axis)}</text>'


def _svg_rows(chart: Chart) -> Iterator[str]:
    for number, row in enumerate(chart.rows):
        y = _TOP + number * _ROW
        yield f'<text class="label" x="{_LABELS - 10}" y="{y + 16}">{escape(row.label)}</text>'
        for bar in sorted(row.bars, key=lambda bar: bar.begin - bar.end):  # the short ones above the long
            x = _x(chart, bar.begin)
            width = max(_LEAST, _x(chart, bar.end) - x)
            place = f'x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_BAR}"'
            title = escape(without_slots(bar.title))
            yield f'<rect class="bar {bar.doing}" {place}><title>{title}</title></rect>'


def _svg_mark(chart: Chart, mark: Moment) -> Iterator[str]:
    x, bottom = _x(chart, mark.at), _TOP + len(chart.rows) * _ROW
    title = f"<title>{escape(mark.title)}</title>"
    if mark.kind == "checkpoint":
        points = f"{x - 4:.1f},{bottom + 6} {x + 4:.1f},{bottom + 6} {x:.1f},{bottom}"
        yield f'<polygon class="mark checkpoint" points="{points}">{title}</polygon>'
        return
    if mark.kind == "memory":
        y = bottom + 4
        points = f"{x:.1f},{y - 5} {x + 5:.1f},{y} {x:.1f},{y + 5} {x - 5:.1f},{y}"
        yield f'<polygon class="mark memory" points="{points}">{title}</polygon>'
        return
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{bottom}"'
    yield f'<line class="mark {mark.kind}" {ends}>{title}</line>'
    yield f'<text class="mark {mark.kind}" x="{x:.1f}" y="{_TOP - 9}">{escape(mark.label)}{title}</text>'


def _recoveries(timeline: RunTimeline) -> Iterator[str]:
    if not timeline.recoveries:
        yield "<p>There was none.</p>"
        return
    table = recovery_table(timeline).without("of which")  # said below
    rows = [
        (row[0], told(report), *row[2:]) for row, report in zip(table.rows, timeline.recoveries, strict=True)
    ]
    yield _plain_table(replace(table, rows=rows))
    longest = sorted(timeline.recoveries, key=lambda report: -report.total_s)[:_MOST_PICTURES]
    if len(timeline.recoveries) > _MOST_PICTURES:
        yield f"<p>The {_MOST_PICTURES} that took longest are drawn here.</p>"
    for report in sorted(longest, key=lambda report: report.number):
        yield from _recovery(timeline, report)


def _recovery(timeline: RunTimeline, report: RecoveryReport) -> Iterator[str]:
    recovery = report.recovery
    yield f"<h3>Recovery {report.number}: {escape(told(report))}, {took_in_words(report)}</h3>"
    facts = [
        (f"machine {slot} lost", reason)
        for slot, reason in zip(recovery.slots, recovery.reasons, strict=False)
    ]
    if recovery.reason:
        facts.append(("no cheaper way", recovery.reason))
    facts.append(("cost", lost_in_words(report)))
    facts.append(("time", parts_of(report)))
    if report.back is None and recovery.live is not None:
        facts.append(("not known", "when its first step began; the time ends when training could go on"))
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in facts)
    yield f"<dl>{terms}</dl>"
    yield _figure(recovery_chart(timeline, report, told))


def _plain_table(table: ReportTable) -> str:
    numeric = [at for at, name in enumerate(table.columns) if name in table.numbers]
    rows = [
        [("n" if at in numeric else "", escape(without_slots(cell))) for at, cell in enumerate(row)]
        for row in table.rows
    ]
    return _table([column_named(name) for name in table.columns], rows, numeric)


def _table(
    names: Sequence[str], rows: Sequence[Sequence[_Cell]], numeric: Sequence[int], css: str = ""
) -> str:
    head = "".join(
        f'<th class="n">{name}</th>' if i in numeric else f"<th>{name}</th>" for i, name in enumerate(names)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    table = f'<table class="{css}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'
    return f'<div class="card scroll">{table}</div>'


def _cell(cell: _Cell) -> str:
    css, html = cell
    return f'<td class="{css}">{html}</td>' if css else f"<td>{html}</td>"
