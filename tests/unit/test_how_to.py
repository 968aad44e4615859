"""The code and the commands of the how-to pages are those of the examples."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from docs.house import ROOT
from swift_ft.cli.run import parser
from swift_ft.faults import parse_faults
from tests.support.tutorial import Block, blocks_of

PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))


def gone_from(lines: list[str], source: str) -> list[str]:
    """Lines that a source does not have, however far it indents them."""
    there = {line.strip() for line in source.splitlines()}
    return [line for line in lines if line.strip() and line.strip() not in there]


def problems_of(block: Block, source: str) -> list[str]:
    """What a block shows of an example and the example does not have.

    Python is shown as it stands there, with ``...`` between parts. In a diff, the example is what a ``+`` or
    nothing precedes.
    """
    if block.language == "diff":
        lines = [line for line in block.text.splitlines() if line]
        problems = gone_from([line[1:] for line in lines if line[0] in "+ "], source)
        old = [line[1:] for line in lines if line[0] == "-"]
        there = {line.strip() for line in source.splitlines()}
        return problems + [line for line in old if line.strip() in there - new_lines(lines)]
    return [part for part in re.split(r"^\.\.\.\n", block.text, flags=re.MULTILINE) if part not in source]


def new_lines(lines: list[str]) -> set[str]:
    """What a diff adds or keeps: a line may have moved."""
    return {line[1:].strip() for line in lines if line[0] in "+ "}


def commands_of(block: Block) -> Iterator[list[str]]:
    """The commands in a block, without continuation lines and comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_is_that_of_the_example(page: Path) -> None:
    shown = [block for block in blocks_of(page) if block.language in ("python", "diff")]
    for block in shown:
        example = ROOT / block.attributes["title"]
        problems = problems_of(block, example.read_text())
        assert not problems, f"{page.name}, line {block.line}: {example.name} does not have\n{problems}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_can_be_run(page: Path) -> None:
    for block in blocks_of(page):
        if block.language != "bash" or block.skipped:
            continue
        for program, *words in commands_of(block):
            if program == "swift-run":
                args = parser().parse_args(words)
                assert args.standalone or args.nnodes in ("1", "1:1") or "--rdzv-id" in words, words
                script = args.training_script
                assert find_spec(script) if args.module else (ROOT / script).exists()
                assert parse_faults(args.inject) or "--inject" not in words


def test_what_is_no_longer_true_is_found() -> None:
    source = "if a:\n    b()\n    c()\n"
    page = Block("python", {}, "    b()\n...\n    c()\n", 1, skipped=False)
    assert not problems_of(page, source)
    assert problems_of(page, source.replace("c()", "d()"))
    change = Block("diff", {}, "-    old()\n+    b()\n     c()\n", 1, skipped=False)
    assert not problems_of(change, source)
    assert problems_of(change, source + "    old()\n")
    assert problems_of(change, source.replace("b()", "d()"))
