"""The job's secret, from where the user put it."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_ft.errors import UsageError
from swift_ft.network import JobSecret
from swift_ft.network.secret import token_of

TOKEN = "0123456789abcdef0123456789abcdef"


def token_file(folder: Path, content: str, mode: int = 0o600) -> str:
    path = folder / "token"
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def test_a_file_comes_before_the_variable(tmp_path: Path) -> None:
    path = token_file(tmp_path, TOKEN + "\n")
    assert token_of(path, {"SWIFT_FT_TOKEN": "another token that is long"}) == TOKEN
    assert token_of(None, {"SWIFT_FT_TOKEN": TOKEN}) == TOKEN
    assert token_of(None, {}) is None


@pytest.mark.parametrize(
    ("content", "mode", "line"),
    [
        ("", 0o600, "is empty"),
        (" \n", 0o600, "is empty"),
        ("short", 0o600, "has 5 characters"),
        (TOKEN, 0o644, "is open to all users"),
        ("x" * 5000, 0o600, "more than 4096 bytes"),
    ],
)
def test_one_line_says_what_is_wrong_with_a_file(tmp_path: Path, content: str, mode: int, line: str) -> None:
    with pytest.raises(UsageError, match=line) as raised:
        token_of(token_file(tmp_path, content, mode), {})
    assert "\n" not in str(raised.value)
    assert TOKEN not in str(raised.value)


def test_a_missing_file_and_an_empty_variable_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        token_of(str(tmp_path / "none"), {})
    with pytest.raises(UsageError, match="the variable SWIFT_FT_TOKEN is empty"):
        token_of(None, {"SWIFT_FT_TOKEN": ""})


def test_a_file_that_its_group_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert token_of(token_file(tmp_path, TOKEN, 0o640), {}) == TOKEN
    assert [record.getMessage().count("chmod 600") for record in caplog.records] == [1]


def test_secrets_are_equal_only_for_equal_tokens_and_show_nothing() -> None:
    secret = JobSecret.of_token(TOKEN)
    assert secret == JobSecret.of_token(TOKEN)
    assert secret != JobSecret.of_token(TOKEN[::-1])
    assert JobSecret.generated() != JobSecret.generated()
    assert repr(secret) == "JobSecret(certificates=None)"
    tokens = {secret.token("logs"), secret.token("parts"), secret.key.hex()}
    assert len(tokens) == 3
