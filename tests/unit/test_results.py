"""Measured runs are files that say what they are, and the pages show what is in them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks.lib.figures import Figure, cell_from_text, cell_text
from benchmarks.lib.markdown import read_body, run_in_markdown
from benchmarks.lib.results import (
    Summary,
    Target,
    argument_parser,
    finish,
    of_repetitions,
    record,
    run_benchmark,
    table,
    target_table,
    without_place,
)
from benchmarks.lib.runs import FOLDER, Host, Run, Table, Verdict, newest, read_runs, write_run
from benchmarks.lib.subjects import SUBJECTS
from docs import quotes
from docs.house import ROOT
from docs.results import HISTORY, RESULTS, documents, today
from examples.commands import CommandError

RUNS = read_runs()


# ------------------------------------------------------------------------------------------- pages


def test_the_pages_show_the_newest_runs() -> None:
    old = [path.name for path, text in documents().items() if path.read_text() != text]
    assert not old, f"{old} are old: run `make docs`"


def test_the_page_of_today_is_short() -> None:
    lines = len(RESULTS.read_text().splitlines())
    assert lines <= 165, f"{lines} lines: show less in benchmarks/lib/subjects.py"


def test_what_ran_on_gpus_is_in_the_record() -> None:
    """The page is written by hand: each GPU and commit that it names is one of a run that was kept."""
    page = (ROOT / "docs" / "nccl.md").read_text()
    named = set(re.findall(r"(H\d+), commit ([0-9a-f]{7,})", page))
    kept = {(kind, run.commit) for run in RUNS for kind in str(run.host.gpu).split()}
    assert len(named) == 2
    assert named <= kept


def test_no_run_and_no_missed_target_is_left_out() -> None:
    history, page = HISTORY.read_text(), RESULTS.read_text()
    assert [run.name for run in RUNS if f"### {run.name}\n" not in history] == []
    latest = newest(RUNS)
    missed = [target.name for run in latest.values() for target in run.targets if target.met is False]
    assert missed
    assert [name for name in missed if not re.search(rf"\| {re.escape(name)} \|.*\*\*missed\*\*", page)] == []


def test_code_that_was_not_kept_gives_no_figure_of_today() -> None:
    tried = next(run for run in RUNS if run.discarded)
    assert any(run.subject == tried.subject and run.number < tried.number for run in RUNS)
    assert newest(RUNS)[tried.subject].number < tried.number


def test_another_figure_is_another_page() -> None:
    latest = newest(RUNS)
    run = latest["imports"]
    cells = tuple(
        tuple(replace(cell, value=7.5) if isinstance(cell, Figure) else cell for cell in row)
        for row in run.tables[0].rows
    )
    changed = latest | {"imports": replace(run, tables=(replace(run.tables[0], rows=cells),))}
    assert "7.500 s" in today(changed)
    assert "7.500 s" not in today(latest)
    assert "7.50 s with [`--preload`]" in quotes.fill((ROOT / "docs" / "faq.md").read_text(), changed)


def test_each_text_has_its_place_and_each_place_its_text() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [name for page in pages for name in quotes.places(page.read_text())]
    assert sorted(found) == sorted(quotes.QUOTES)


def test_each_figure_that_is_named_is_quoted() -> None:
    named = {name for text in quotes.QUOTES.values() for name in re.findall(r"{(\w+)[.:}]", text)}
    assert set(quotes.FIGURES) - named == set()


@pytest.mark.parametrize(
    ("quote", "message"),
    [
        (quotes.Quote("imports", "no such row", ("kill to all live",)), "no figure for 'no such row'"),
        (quotes.Quote("imports", "as it comes", ("no such column",)), "'no such column'"),
        (quotes.Quote("undo", "no such target"), "no target 'no such target'"),
        (quotes.Quote("unlike-devices", "16", ("counts",)), "is no figure, but 'even'"),
    ],
)
def test_a_figure_that_is_gone_is_named(quote: quotes.Quote, message: str) -> None:
    with pytest.raises(LookupError, match=re.escape(message)):
        quote.figure(newest(RUNS))


# ------------------------------------------------------------------------------------------- files


def test_each_run_has_a_subject_that_is_known() -> None:
    assert {run.subject for run in RUNS} <= set(SUBJECTS)


@pytest.mark.parametrize("word", ["/home/me/before", "../before"])
def test_a_path_in_a_command_is_only_named(word: str) -> None:
    assert without_place(word) == "../before"


def test_a_command_names_no_place_of_a_machine() -> None:
    assert without_place("--machines") == "--machines"
    assert not [run.command for run in RUNS if re.search(r" /\w", run.command or "")]


def test_each_command_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for subject in SUBJECTS.values():
        if subject.command is None:
            assert subject.why_no_command
        elif subject.command.startswith("make "):
            assert f"\n{subject.command.removeprefix('make ')}:" in makefile
        else:
            module = subject.command.partition(" ")[0]
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), subject.command


def test_each_benchmark_records_its_own_subject() -> None:
    for name, subject in SUBJECTS.items():
        if subject.command is not None and not subject.command.startswith("make "):
            source = (ROOT / f"{subject.command.partition(' ')[0].replace('.', '/')}.py").read_text()
            assert re.search(rf'(record|finish)\([^)]*"{name}"', source), (
                f"{subject.command} does not record {name}"
            )


def of_limit(limit: str) -> tuple[Callable[[float, float], bool], Figure] | None:
    """How a figure is compared with a limit such as ``<= 1.15``; None if it is said in another way."""
    compared: dict[str, Callable[[float, float], bool]] = {
        "<=": lambda a, b: a <= b,
        ">=": lambda a, b: a >= b,
        "<": lambda a, b: a < b,
    }
    sign, _, rest = limit.partition(" ")
    figure = Figure.from_text(rest)
    return (compared[sign], figure) if sign in compared and figure is not None else None


def contradictions(run: Run) -> list[str]:
    """Targets whose verdict is not what their figure says, by more than the last digit that is shown."""
    found = []
    for target in run.targets:
        asked = of_limit(target.limit)
        if asked is None or not isinstance(target.measured, Figure) or target.measured.value is None:
            continue
        compare, limit = asked
        assert limit.value is not None
        if limit.unit not in ("", target.measured.unit):
            continue
        half = 0.5 * 10**-target.measured.digits
        verdicts = {compare(target.measured.value + off, limit.value) for off in (-half, 0.0, half)}
        if target.met not in verdicts:
            found.append(f"{run.name}: {target.name}: {target.limit}, {target.measured}: {target.met}")
    return found


def test_verdicts_are_what_the_figures_say() -> None:
    assert [line for run in RUNS for line in contradictions(run)] == []


def test_a_wrong_verdict_is_found() -> None:
    run = next(run for run in RUNS if any(target.met is False for target in run.targets))
    better = tuple(replace(target, met=True) for target in run.targets)
    assert contradictions(replace(run, targets=better))


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    for run in RUNS:
        path = write_run(run, tmp_path)
        assert path.read_text() == (FOLDER / path.name).read_text()
    assert read_runs(tmp_path) == RUNS


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("2026-11-26-imports-1", {"colour": "red"}, "unknown keys ['colour']"),
        ("2026-11-26-imports-1", {"repetitions": "3"}, "repetitions is '3'"),
        ("2026-11-26-imports-1", {"host": {"cores": 2}}, "missing"),
        ("2026-11-27-imports-1", {}, "call it 2026-11-26-imports-1.json"),
        ("2026-11-26-imports-1", {"date": "2026-13-26"}, "month must be"),
        ("imports", {}, "call it DATE-SUBJECT-NUMBER.json"),
        ("2026-11-26-imports-1", {"tables": [{"columns": ["a"], "rows": [["b", "c"]]}]}, "number of cells"),
        ("2026-11-26-imports-1", {"tables": [{"columns": ["a"], "rows": [[3]]}]}, "not a cell: 3"),
        ("2026-11-26-imports-1", {"tables": [{"columns": ["a"], "rows": [[{"mean": 3}]]}]}, "not a figure"),
    ],
)
def test_what_is_no_run_is_refused(
    tmp_path: Path, name: str, changed: dict[str, object], message: str
) -> None:
    data = json.loads((FOLDER / "2026-11-26-imports-1.json").read_text())
    (tmp_path / f"{name}.json").write_text(json.dumps(data | changed))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_runs(tmp_path)


def test_each_key_of_a_file_is_described() -> None:
    page = (FOLDER / "README.md").read_text()
    keys = [one.name for kind in (Run, Host, Table, Verdict) for one in fields(kind) if one.name != "number"]
    assert [key for key in keys if f"`{key}`" not in page] == []


# ------------------------------------------------------------------------------------------ figures


@pytest.mark.parametrize(
    ("text", "figure"),
    [
        ("0.512 s (0.498-0.530)", Figure(0.512, 0.498, 0.53, "s", 3)),
        ("1.10", Figure(1.1, digits=2)),
        ("9,437,184 bytes", Figure(9437184, unit="bytes")),
        ("0.955x (0.541-1.012)", Figure(0.955, 0.541, 1.012, "x", 3)),
        ("98.9 % (98.8-99.0)", Figure(98.9, 98.8, 99.0, "%", 1)),
        ("0.01-0.03 s", Figure(None, 0.01, 0.03, "s", 2)),
        ("0.00009 s", Figure(0.00009, unit="s", digits=5)),
    ],
)
def test_a_figure_as_text_and_as_json(text: str, figure: Figure) -> None:
    assert Figure.from_text(text) == figure
    assert figure.text() == text
    assert Figure.from_json(json.loads(json.dumps(figure.to_json()))) == figure


@pytest.mark.parametrize(
    "text", ["8 of 8", "6 h", "yes", "0.06 (0.0 against 0.2)", "68; 0", "1.0 (0.25-2.0)"]
)
def test_what_is_no_figure_stays_words(text: str) -> None:
    assert cell_from_text(text) == text


def test_an_empty_cell_is_nothing() -> None:
    assert cell_from_text("") is None
    assert cell_text(None) == ""


def test_one_repetition_is_no_median() -> None:
    assert "no medians" in of_repetitions(1)
    assert of_repetitions(3) == "Medians (ranges) of 3 interleaved repetitions"


# ------------------------------------------------------------------------------------------- records

BODY = "\n\n".join(
    [
        "How it was\nmeasured.",
        "And on what.",
        table(["", "takes"], [["this", "0.50 s (0.40-0.60)"], ["that", ""]]),
        "Said before the second one.",
        table(["case", "share"], [["small", "8 of 8"]]),
        target_table([Target("this / that", "<= 1", "1.20", False), Target("seen", "", "3", None)]),
        "Said at the end.",
    ]
)


def arguments(*words: str) -> argparse.Namespace:
    """The command line of a benchmark."""
    return argument_parser(None, repetitions=3).parse_args(words)


def test_what_a_benchmark_prints_is_what_it_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["imports.py", "--record", str(tmp_path), "--repetitions", "2"])
    record("imports", BODY, arguments(*sys.argv[1:]))
    record("imports", BODY, arguments(*sys.argv[1:]))
    first, second = read_runs(tmp_path)
    assert (first.number, second.number) == (1, 2)
    assert first.repetitions == 2
    assert first.command is not None
    assert first.command.endswith("--repetitions 2")
    assert "record" not in first.command
    assert first.host.cores >= 1
    assert first.about == "How it was measured.\n\nAnd on what."
    assert first.cell("this", "takes") == Figure(0.5, 0.4, 0.6, "s", 2)
    assert first.cell("that", "takes") is None
    assert [(one.name, one.met) for one in first.targets] == [("this / that", False), ("seen", None)]
    assert first.notes == ("Said at the end.",)
    assert read_body(run_in_markdown(first)) == read_body(BODY)


def test_an_end_is_text_or_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BENCH_RECORD", raising=False)
    assert finish("imports", BODY, {"steps": []}, arguments()) == 0
    assert capsys.readouterr().out == f"{BODY}\n"
    asked = arguments("--json", "--record", str(tmp_path))
    assert finish("imports", BODY, {"steps": [Summary(0.5, 0.4, 0.6)]}, asked, well=False) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [{"median": 0.5, "low": 0.4, "high": 0.6}]
    assert found["targets"] == [
        {"name": "this / that", "limit": "<= 1", "measured": "1.20", "met": False},
        {"name": "seen", "limit": "", "measured": "3", "met": None},
    ]
    assert int(found["machine"]["cores"]) >= 1
    assert len(read_runs(tmp_path)) == 1


def test_a_command_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise CommandError("exit code 1")

    monkeypatch.setattr(sys, "argv", ["/somewhere/imports.py"])
    assert run_benchmark(main) == 1
    assert capsys.readouterr().err == "imports.py: exit code 1\n"
    assert run_benchmark(lambda: 2) == 2


def test_a_subject_that_nobody_knows_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        record("no-such-subject", BODY, arguments("--record", str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_nothing_is_recorded_unless_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BENCH_RECORD", raising=False)
    assert arguments().record is None
    assert arguments("--record").record == FOLDER
    monkeypatch.setenv("BENCH_RECORD", str(tmp_path))
    assert arguments().record == tmp_path
