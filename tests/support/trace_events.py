"""What a file must have that Perfetto and Chrome open: the JSON of the Trace Event Format."""

from __future__ import annotations

from typing import Any

_NAMES = ("process_name", "thread_name")


def assert_is_trace(content: dict[str, Any]) -> None:
    """Complete events and the names of their rows; on one row, spans nest or do not touch."""
    events = content["traceEvents"]
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named: dict[str, set[Any]] = {name: set() for name in _NAMES}
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            if event["name"] in _NAMES:
                assert isinstance(event["args"]["name"], str)
                row = event["pid"] if event["name"] == "process_name" else (event["pid"], event["tid"])
                assert row not in named[event["name"]]
                named[event["name"]].add(row)
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        row = (event["pid"], event["tid"])
        rows.setdefault(row, []).append((event["ts"], event["ts"] + event["dur"]))
    assert named["thread_name"] == set(rows)
    assert named["process_name"] == {process for process, _ in rows}
    for spans in rows.values():
        _assert_nested(sorted(spans, key=lambda span: (span[0], -span[1])))


def _assert_nested(spans: list[tuple[float, float]]) -> None:
    outer: list[float] = []
    for begin, end in spans:
        while outer and outer[-1] <= begin + 0.002:  # microseconds are rounded to a thousandth
            outer.pop()
        assert not outer or end <= outer[-1] + 0.002, (begin, end, outer)
        outer.append(end)
