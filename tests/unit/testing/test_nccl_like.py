"""The backend that behaves like NCCL does what the list of statements about NCCL says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from docs.house import ROOT
from swift_ft.testing.nccl_like.collectives import fill_with_garbage
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_garbage_is_another_one_on_each_member(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """As after an abort, where the host runs ahead."""
    whole = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    turned = [torch.zeros(shape, dtype=dtype).t() if len(shape) == 2 else whole[rank] for rank in range(2)]
    for rank in range(2):
        fill_with_garbage(whole[rank], rank)
        fill_with_garbage(turned[rank], rank)
        assert torch.equal(whole[rank].flatten(), turned[rank].flatten())
        assert bool((whole[rank].abs() > 2).all())
    assert torch.equal(*whole) == (not whole[0].numel())


def test_the_document_has_all_statements() -> None:
    lines = (ROOT / "docs" / "nccl-internals.md").read_text().splitlines()
    statements = [line.split(" | ")[0][2:] for line in lines if " | yes | " in line]
    assert statements == [*STATEMENTS.values()]
