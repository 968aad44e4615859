"""Write what was measured: benchmarks/RESULTS.md, benchmarks/HISTORY.md, and the figures that pages quote.

All of it comes from ``benchmarks/results/``. ``python -m docs.results`` writes the pages anew; with
``--check`` it fails if one is old.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.lib.figures import cell_text
from benchmarks.lib.markdown import VERDICTS, run_in_markdown, table
from benchmarks.lib.runs import Host, Run, newest, read_runs
from benchmarks.lib.subjects import SUBJECTS, Pick, Subject
from docs import peers_page, quotes
from docs.generated import write_or_check
from docs.house import ROOT

RESULTS = ROOT / "benchmarks" / "RESULTS.md"
HISTORY = ROOT / "benchmarks" / "HISTORY.md"

_INTRO = """\
# Results

Of each subject the newest run, of the code of its day. [HISTORY.md](HISTORY.md) has all runs, and says how
they were measured. `make docs` writes this page from the files in [results/](results/README.md).

- With several repetitions a figure is their median, and the range is in parentheses. **A figure of one
  repetition is no median of anything**: a difference of a few percent says nothing then.
- (a) The load average at the end, the run's own processes included; or what else ran.
- All of it ran on one host, over gloo, unless a subject says otherwise. `make bench` measures on yours.
"""
PEERS = ROOT / "docs" / "peers.md"
_NO_GPU = "- Nothing was measured on a GPU yet ([docs/nccl.md](../docs/nccl.md)).\n"


def documents() -> dict[Path, str]:
    """Each page, and what it has to be."""
    runs = read_runs()
    latest = newest(runs)
    pages = {RESULTS: today(latest), HISTORY: history(runs)}
    if "peers" in latest:
        run = latest["peers"]
        pages[PEERS] = peers_page.page(run, _where(run))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text()
        if quotes.places(text):
            pages[page] = quotes.fill(text, latest)
    return pages


# ------------------------------------------------------------------------------------------------- today


def today(latest: Mapping[str, Run]) -> str:
    """The page of today's figures.

    Args:
        latest: the newest run of each subject.
    """
    measured = {name: subject for name, subject in SUBJECTS.items() if name in latest}
    hosts = list(dict.fromkeys(_machine(latest[name].host) for name in measured))
    letters = {host: chr(ord("A") + number) for number, host in enumerate(hosts)}
    overview = [_overview(latest[name], subject, letters) for name, subject in measured.items()]
    columns = (
        "subject",
        "newest run",
        "repetitions",
        "host",
        "load (a)",
        "targets met",
        "missed",
        "measured by",
    )
    figures = [row for name, subject in measured.items() for row in _figures(latest[name], subject)]
    parts = [
        _INTRO + ("" if any(run.host.gpu for run in latest.values()) else _NO_GPU),
        "## Runs\n",
        *(f"- Host {letter}: {host}." for host, letter in letters.items()),
        "\n" + table(columns, overview) + "\n",
        *_remarks(measured, latest),
        "## Figures\n\nAll targets that were missed, and the figures that say most.\n",
        table(("subject", "figure", "measured", "asked", ""), figures),
    ]
    return "\n".join(parts) + "\n"


def _overview(run: Run, subject: Subject, letters: Mapping[str, str]) -> list[str]:
    met, missed = (sum(target.met is verdict for target in run.targets) for verdict in (True, False))
    return [
        f"[{subject.title}](HISTORY.md#{run.name})",
        run.date,
        _repetitions(run),
        letters[_machine(run.host)],
        _load(run.host),
        str(met) if run.targets else "",
        f"**{missed}**" if missed else "0" if run.targets else "",
        _measured_by(subject),
    ]


def _repetitions(run: Run) -> str:
    if run.repetitions is None:
        return "not noted"
    cut_off = any(note.startswith("Not complete") for note in run.notes)
    return f"{run.repetitions}, not of all" if cut_off else str(run.repetitions)


def _figures(run: Run, subject: Subject) -> Iterator[list[str]]:
    """What is shown of a subject; its name stands in its first row only."""
    targets = {target.name: target for target in run.targets}
    shown = dict.fromkeys((*subject.shown, *(target.name for target in run.targets if target.met is False)))
    for number, one in enumerate(shown):
        if isinstance(one, Pick):
            row = [one.words, cell_text(run.cell(one.row, one.column, one.occurrence)), "", ""]
        elif one in targets:
            target = targets[one]
            row = [one, cell_text(target.measured), target.limit, VERDICTS[target.met]]
        else:
            raise LookupError(f"{run.name} has no target {one!r}, which benchmarks/lib/subjects.py shows")
        yield ["" if number else subject.title, *row]


def _remarks(measured: Mapping[str, Subject], latest: Mapping[str, Run]) -> Iterator[str]:
    """What has no script, and what has no run."""
    for subject in measured.values():
        if subject.command is None:
            yield f"- No script: *{subject.title}*: {subject.why_no_command}."
    never = [
        f"*{subject.title}* ({_measured_by(subject)})"
        for name, subject in SUBJECTS.items()
        if name not in latest
    ]
    if never:
        yield f"- No run was kept yet: {', '.join(never)}."
    yield ""


def _measured_by(subject: Subject) -> str:
    if subject.command is None:
        return "no script"
    return f"`{subject.command}`"


# ----------------------------------------------------------------------------------------------- history


def history(runs: Sequence[Run]) -> str:
    """The page of all runs, by subject, newest first.

    Args:
        runs: all of them, oldest first.
    """
    parts = [
        "# All measured runs\n\nBy subject, the newest first. [RESULTS.md](RESULTS.md) has today's figures.\n"
        "`make docs` writes this page from the files in `benchmarks/results/`, which have the same names.\n"
    ]
    for name, subject in SUBJECTS.items():
        found = [run for run in reversed(runs) if run.subject == name]
        if found:
            parts.append(f"## {subject.title}\n\nMeasured by: {_how(subject)}.\n")
            parts += [f"### {run.name}\n\n{_where(run)}\n\n{run_in_markdown(run)}\n" for run in found]
    return "\n".join(parts)


def _how(subject: Subject) -> str:
    return f"no script: {subject.why_no_command}" if subject.command is None else _measured_by(subject)


def _where(run: Run) -> str:
    """The machine, and how often and how it was measured."""
    facts = [_machine(run.host)]
    if run.until:
        facts.append(f"from {run.date} to {run.until}")
    if run.repetitions == 1:
        facts.append("one repetition: no figure is a median of repetitions")
    elif run.repetitions:
        facts.append(f"{run.repetitions} repetitions")
    if run.host.load is not None:
        facts.append(f"load average at the end {run.host.load:.1f}")
    if run.host.beside:
        facts.append(f"beside it: {run.host.beside}")
    if run.commit:
        facts.append(f"commit {run.commit}")
    elif run.recorded:
        facts.append(f"recorded with commit {run.recorded}")
    if run.command:
        facts.append(f"`{run.command}`")
    if run.discarded:
        facts.append("**of code that was tried and not kept**")
    return "; ".join(facts) + "."


def _machine(host: Host) -> str:
    facts = [f"{host.cores} cores ({host.cpu})", f"{host.memory_gib} GiB", host.system]
    facts += [host.gpu] * bool(host.gpu)
    facts.append(f"Python {host.python}" if host.python else "several versions of Python")
    facts.append(f"torch {host.torch}" if host.torch else "several versions of torch")
    return ", ".join(facts)


def _load(host: Host) -> str:
    return host.beside if host.load is None else f"{host.load:.1f}"


if __name__ == "__main__":
    sys.exit(write_or_check("docs.results", __doc__, documents))
