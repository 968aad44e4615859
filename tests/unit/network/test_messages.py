"""Messages and their bytes."""

from __future__ import annotations

from typing import Any

import pytest

from swift_ft.network.messages import decoded, encoded


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"note": {"rank 3": {"step": 7, "why": "a\nb"}}},
        {"text": ""},
        {"block": 3, "text": '[{"event":"WorkerReady"}]'},
        {"block": 3, "text": "lines\nof their own\n\u2028 and umlauts: äöü"},
    ],
)
def test_a_message_comes_back_as_it_was(message: dict[str, Any]) -> None:
    assert decoded(encoded(message)) == message


def test_the_text_of_a_message_is_not_escaped() -> None:
    text = '[{"event":"WorkerReady"}]'
    assert encoded({"block": 3, "text": text}).endswith(text.encode())


@pytest.mark.parametrize("data", [b"", b"\n", b"[1]", b"[1]\ntext", b"{", b'{"a":1}\n\xff', b"[" * 100_000])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        decoded(data)
