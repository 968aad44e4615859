"""Bytes, rates and durations, parsed and formatted."""

import pytest

from swift_ft.errors import UsageError
from swift_ft.units import (
    format_bytes,
    format_moment,
    format_seconds,
    in_spans,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
    some,
    spans_of,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("400GB", 400 * 10**9),
        ("400GiB", 400 * 2**30),
        ("4e11", 4 * 10**11),
        ("1.5 kb", 1500),
        ("7", 7),
        ("2T", 2 * 10**12),
    ],
)
def test_parses_bytes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "-4GB", "4XB", "nan", "inf", "1e999", "4iB", "4 G B"])
def test_refuses_what_is_not_bytes(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"), [("5GB/s", 5e9), ("40Gbps", 5e9), ("40Gbit/s", 5e9), ("5e9", 5e9), ("1GiB/s", 2**30)]
)
def test_parses_bandwidth(text: str, value: float) -> None:
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), ("1h30m", 5400), ("54 days", 54 * 86400), ("250ms", 0.25), ("1.5h", 5400)]
)
def test_parses_seconds(text: str, value: float) -> None:
    assert parse_seconds(text) == value


@pytest.mark.parametrize("text", ["", "soon", "1h30", "-5s", "0s/"])
def test_refuses_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(UsageError):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.000 s"),
        (0.0123, "0.012 s"),
        (0.9996, "1.000 s"),
        (3.456, "3.46 s"),
        (12.34, "12.3 s"),
        (99.4, "99.4 s"),
        (125.2, "2 min 5 s"),
        (7199.6, "120 min 0 s"),
        (8100.0, "2.25 h"),
        (54 * 86400, "54 d"),
    ],
)
def test_formats_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_formats_a_moment() -> None:
    assert format_moment(1_795_780_799.6) == "2026-11-27 11:59:59 UTC"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1540, "1.54 kB"),
        (99_400, "99.4 kB"),
        (9_996, "10.0 kB"),
        (99_600, "99.6 kB"),
        (99_960, "100 kB"),
        (999_600, "1.00 MB"),
        (230_400_000, "230 MB"),
        (7_200_000_000, "7.20 GB"),
        (5_000_000_000_000, "5.00 TB"),
        (3e18, "3000 PB"),
    ],
)
def test_formats_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([4], "4"), ([1, 0], "0 to 1"), ([7, 2, 0, 1], "0 to 2, 7"), ([3, 3, 5, 6], "3, 5 to 6")],
)
def test_writes_numbers_as_spans(numbers: list[int], text: str) -> None:
    assert in_spans(spans_of(numbers)) == text
    assert in_spans(spans_of(numbers), "-") == text.replace(" to ", "-")


@pytest.mark.parametrize(
    ("words", "text"),
    [("", ""), ("a", "a"), ("ab", "a, b"), ("abc", "a, b and 1 more"), ("abcde", "a, b and 3 more")],
)
def test_writes_the_first_of_many(words: str, text: str) -> None:
    assert some(words, 2) == text
    assert some(words, 2, of="letters") == (f"{text} letters" if "more" in text else text)
