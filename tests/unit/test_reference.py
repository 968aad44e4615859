"""The reference says what the code says, and what the documents name exists."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import swift_ft
from docs.house import ROOT
from docs.reference import PATH, document, log_calls
from swift_ft import Session
from swift_ft.cli import group, run, simulate
from swift_ft.cli.chaos import main as chaos
from swift_ft.cli.plan.main import VERBS
from swift_ft.cli.verb import load_verb
from swift_ft.config import exit_codes


def test_the_tables_are_what_the_code_says() -> None:
    text = PATH.read_text()
    assert document(text) == text, "docs/reference.md is old: run `make docs`"


def test_all_that_the_package_exports_is_described() -> None:
    headings = {
        line.partition("`")[2].partition("`")[0] for line in PATH.read_text().splitlines() if "##" in line
    }
    assert {*swift_ft.__all__} <= headings | {"SessionMetrics"}


def section_of_swift_run() -> str:
    return PATH.read_text().partition("\n## swift-run\n")[2].partition("\n## ")[0]


def test_each_option_of_swift_run_is_described() -> None:
    """Torchrun's, too, and those that no configuration has."""
    names = [name for action in run.parser()._actions for name in action.option_strings[:2] if "--" in name]
    hyphened = {name for name in names if "_" not in name}
    assert "--status" in hyphened
    described = {*re.findall(r"(?<=`)--[a-z-]+", section_of_swift_run())}
    assert hyphened - described == set()


def test_each_exit_code_with_a_meaning_is_described() -> None:
    codes = {value for name, value in vars(exit_codes).items() if name.startswith("EXIT_")}
    assert exit_codes.EXIT_KEPT_OUT in codes
    described = {int(code) for code in re.findall(r"^\| (\d+) \|", section_of_swift_run(), re.MULTILINE)}
    assert codes - described == {exit_codes.EXIT_RENDEZVOUS_LOST}, "which no user sees"


def test_an_exit_code_without_words_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_codes, "EXIT_NEW", 99, raising=False)
    with pytest.raises(LookupError, match="EXIT_NEW"):
        document(PATH.read_text())


def test_a_document_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(LookupError, match="places"):
        document("# Reference\n")


def test_each_record_that_an_operator_may_wait_for_has_an_event() -> None:
    unnamed = [
        call.line for call in log_calls() if call.event is None and call.level not in ("debug", "info")
    ]
    assert not unnamed


def test_events_are_written_alike() -> None:
    odd = [
        call.event for call in log_calls() if call.event and not re.fullmatch(r"[a-z]+(_[a-z]+)*", call.event)
    ]
    assert not odd


def test_a_record_without_an_event_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('_logger.warning("a")\n_logger.error("b", extra={"event": "broken", "rank": 1})\n')
    first, second = log_calls({"module": module})
    assert (first.level, first.event) == ("warning", None)
    assert (second.level, second.event, second.fields) == ("error", "broken", ("rank",))


PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FLAGS = {
    name: {flag for action in tool.parser()._actions for flag in action.option_strings}
    for name, tool in (
        ("swift-run", run),
        ("swift-group", group),
        ("swift-sim", simulate),
        ("swift-chaos", chaos),
    )
}


def flags_of_verbs() -> set[str]:
    """The flags of all verbs of swift-plan."""
    flags = {"--json"}
    for name in VERBS:
        own = argparse.ArgumentParser()
        load_verb("swift_ft.cli.plan", name).declare(own)
        flags |= {flag for action in own._actions for flag in action.option_strings}
    return flags


FLAGS["swift-plan"] = flags_of_verbs()


def commands_that_do_not_exist(text: str) -> set[str]:
    """Targets of make, modules, and flags of the tools in a text that the project does not have."""
    gone = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) - TARGETS
    modules = set(re.findall(r"python -m ((?:swift_ft|benchmarks|docs|examples|tests)[.\w]*\w)", text))
    gone |= {module for module in modules if importlib.util.find_spec(module) is None}
    for name, arguments in re.findall(rf"(?:^|`) *({'|'.join(FLAGS)}) ([^`\n]*)", text, re.MULTILINE):
        own = arguments.partition(".py")[0]  # what follows is the script's
        gone |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", own)) - FLAGS[name]
    return gone


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    assert not commands_that_do_not_exist(page.read_text())


def test_a_command_that_is_gone_is_found() -> None:
    text = (
        "make demo\n`make nothing`, python -m docs.house, python -m docs.nothing.\nswift-run --resum a.py --b"
    )
    assert commands_that_do_not_exist(text) == {"nothing", "docs.nothing", "--resum"}


def test_arguments_of_a_session_stand_in_three_groups() -> None:
    section = PATH.read_text().partition("### `Session`\n")[2].partition("\nRaises:")[0]
    groups = dict(re.findall(r"\*\*(.+?)\*\*\n\n((?:- .+\n)+)", section))
    assert [*groups] == ["The first day", "Checkpoints and logs", "Checks, and random numbers"]
    names = {title: re.findall(r"^- `(\w+)`", entries, re.MULTILINE) for title, entries in groups.items()}
    assert names["The first day"] == ["state", "store"]
    each = [name for group in names.values() for name in group]
    assert sorted(each) == sorted(inspect.signature(Session).parameters)


def test_arguments_without_groups_are_one_list() -> None:
    section = PATH.read_text().partition("### `wrap_optimizer`\n")[2].partition("\n### ")[0]
    assert re.search(r"^- `optimizer`", section, re.MULTILINE)
    assert "**" not in section.partition("Raises:")[0]
