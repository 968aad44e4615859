"""``swift-recover timeline``: recoveries, lost time, and who held what, as tables, a picture or a page."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from swift_ft.cli.recover.progress import file_progress
from swift_ft.cli.timeline.page import html_of
from swift_ft.cli.timeline.picture import draw
from swift_ft.cli.timeline.tables import place_table, recovery_table, time_table, work_table, world_table
from swift_ft.cli.timeline.terminal import print_table
from swift_ft.cli.timeline.trace_events import trace_events
from swift_ft.cli.timeline.words import goodput_in_words, outcome, path_in_words
from swift_ft.cli.verb import ExitCode, Verb, print_json
from swift_ft.costs.json_files import write_text
from swift_ft.errors import UsageError
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.timeline import RunTimeline, run_timeline

_PAGE = ".html"
_PICTURES = (".png", ".svg", ".pdf")


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="the store that the script gave to swift_ft.Session")
    parser.add_argument(
        "--run", metavar="R", dest="run_id", help="which run (default: the newest one in the store)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="write a picture (.png, .svg or .pdf; needs swift-ft[plot]) or a report for a browser (.html)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write what each process did in the recoveries, span by span, in the format that Perfetto "
        "(ui.perfetto.dev) and Chrome (about:tracing) open",
    )


def _run(args: argparse.Namespace) -> ExitCode:
    plot: Path | None = args.plot
    if plot is not None and plot.suffix not in (_PAGE, *_PICTURES):
        raise UsageError(f"{plot} cannot be written: give a name that ends in .html, {', '.join(_PICTURES)}")
    with file_progress("reading the run") as on_file:
        timeline = run_timeline(open_run_store(args.store), args.run_id, on_file)
    if plot is not None:
        _write(timeline, plot)
    if args.trace is not None:
        traced = [report.traced for report in timeline.recoveries if report.traced is not None]
        write_text(args.trace, json.dumps(trace_events(traced)))
    if args.json:
        print_json(timeline.to_dict())
    else:
        _print(timeline)
        for path in (plot, args.trace):
            if path is not None:
                print(f"{path} is written")
    return ExitCode.FINDINGS if timeline.problems else ExitCode.OK


def _write(timeline: RunTimeline, path: Path) -> None:
    if path.suffix != _PAGE:
        draw(timeline, path)
        return
    write_text(path, html_of(timeline, datetime.now(UTC)))


def _print(timeline: RunTimeline) -> None:
    console = Console(highlight=False, markup=False)
    # A terminal would break lines in the middle of words; programs get each on one line.
    say = partial(console.print, soft_wrap=not console.is_terminal)
    say(f"run {timeline.run_id} in {timeline.url}")
    say(outcome(timeline))
    if timeline.began is not None:
        say(f"goodput: {goodput_in_words(timeline)}")
        print_table(console, time_table(timeline).without("what that is"))
        if timeline.recoveries:
            print_table(console, recovery_table(timeline))
            for report in timeline.recoveries:
                if report.traced is not None and report.traced.path:
                    say(f"recovery {report.number} waited for: {path_in_words(report.traced.path)}")
        if timeline.worlds:
            print_table(console, world_table(timeline))
        print_table(console, place_table(timeline))
        print_table(console, work_table(timeline))
    for unknown in timeline.unknown:
        say(f"not known: {unknown}")
    for problem in timeline.problems:
        say(f"problem: {problem}")


VERB = Verb(
    description="Show a run from its beginning to its end: goodput, lost time by cause, recoveries, and "
    "which machine held which part of the model. It reads the archived journal and what workers noted in the "
    "store, so the job may be gone. With --plot it writes a picture, or a report for a browser that needs no "
    "network.",
    declare=_declare,
    run=_run,
)
