"""NCCL itself does what the list of statements says. The members share a GPU, each on a host of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.nccl_members import GPU, Statements
from tests.support.nccl_statements import MEMBERS, STATEMENTS, expected_codes


@pytest.fixture(scope="module")
def statements() -> Iterator[Statements]:
    running = Statements(GPU)
    yield running
    running.close()


@pytest.mark.parametrize("name", STATEMENTS)
def test_statement(name: str, statements: Statements) -> None:
    ended = statements.run(name, MEMBERS.get(name, 2))
    assert ended.codes == expected_codes(name), ended.output
