"""The proof that a command comes from a member of the job."""

from __future__ import annotations

import pytest

from swift_ft.network import JobSecret
from swift_ft.network.command_proof import is_proved, proof_of_command

SECRET = JobSecret.of_token("a token of the job")
COMMAND = ("train.py", "--lr", "0.1")


def test_a_member_proves_its_command() -> None:
    assert is_proved(proof_of_command(SECRET, "run.1", COMMAND), SECRET, "run.1", COMMAND)


@pytest.mark.parametrize(
    ("secret", "run_id", "command"),
    [
        (JobSecret.of_token("another token"), "run.1", COMMAND),
        (SECRET, "run.2", COMMAND),
        (SECRET, "run.1", ("train.py", "--lr", "0.2")),
        (SECRET, "run.1", ("train.py", "--lr 0.1")),
        (SECRET, "run.1", ()),
    ],
)
def test_a_proof_is_for_one_command_of_one_run(
    secret: JobSecret, run_id: str, command: tuple[str, ...]
) -> None:
    assert not is_proved(proof_of_command(secret, run_id, command), SECRET, "run.1", COMMAND)


@pytest.mark.parametrize("proof", ["", "0", "x" * 64])
def test_anything_else_is_none(proof: str) -> None:
    assert not is_proved(proof, SECRET, "run.1", COMMAND)
