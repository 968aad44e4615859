"""The page of what works with what says what the tests run."""

from __future__ import annotations

import re

import pytest

from docs.support import PATH, document
from tests.support.support_table import CASES, Case


def test_the_page_is_what_the_tests_run() -> None:
    text = PATH.read_text()
    assert document(text) == text, "docs/support.md is old: run `make docs`"


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(LookupError, match="no place"):
        document("# What works with what\n")


def test_a_place_is_named_once() -> None:
    assert len({(case.feature, case.parallelism) for case in CASES}) == len(CASES)


def test_another_result_is_another_page(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [Case(case.feature, case.parallelism, refused="no such thing") for case in CASES[:1]]
    monkeypatch.setattr("docs.support.CASES", changed + CASES[1:])
    text = document(PATH.read_text())
    assert re.search(r"\| refused \(\d+\) \|", text)
    assert "The line says: “no such thing”." in text
