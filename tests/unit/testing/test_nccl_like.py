"""The backend that behaves like NCCL does what the list of statements about NCCL says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from docs.house import ROOT
from tests.support.nccl_members import LIKE_NCCL, Statements
from tests.support.nccl_statements import MEMBERS, STATEMENTS, expected_codes


@pytest.fixture(scope="module")
def statements() -> Iterator[Statements]:
    running = Statements(LIKE_NCCL)
    yield running
    running.close()


@pytest.mark.parametrize("name", STATEMENTS)
def test_statement(name: str, statements: Statements) -> None:
    ended = statements.run(name, MEMBERS.get(name, 2))
    assert ended.codes == expected_codes(name), ended.output


def test_the_document_has_all_statements() -> None:
    lines = (ROOT / "docs" / "nccl-internals.md").read_text().splitlines()
    statements = [line.split(" | ")[0][2:] for line in lines if " | yes | " in line]
    assert statements == [*STATEMENTS.values()]
