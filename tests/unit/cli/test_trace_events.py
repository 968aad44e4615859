"""Traces in the format that Perfetto and Chrome open (the Trace Event Format's complete events)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swift_ft.cli.timeline.trace_events import trace_events
from tests.support.trace_events import assert_is_trace
from tests.unit.offline.test_recovery_spans import recordings, traced


def written() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(trace_events([traced(recordings(late=1))])))
    return content


def test_it_is_in_the_format() -> None:
    assert_is_trace(written())


def test_machines_are_processes_and_participants_threads() -> None:
    content = written()
    named: dict[str, set[str]] = {}
    processes: Mapping[int, str] = {
        event["pid"]: event["args"]["name"]
        for event in content["traceEvents"]
        if event["name"] == "process_name"
    }
    for event in content["traceEvents"]:
        if event["name"] == "thread_name":
            named.setdefault(processes[event["pid"]], set()).add(event["args"]["name"])
    assert named == {
        "recoveries": {"what it waits for"},
        "machine 0": {"agent m-0", "worker 0"},
        "machine 1": {"agent m-2", "worker 1"},
    }


def test_times_are_microseconds_since_the_first() -> None:
    spans = {(e["name"], e["pid"]): e for e in written()["traceEvents"] if e["ph"] == "X"}
    wake = spans["wake", 1]
    assert (wake["ts"], wake["dur"]) == (500_000, 500_000)
    assert min(event["ts"] for event in spans.values()) == 0
    assert "times_wrong_by_at_most_ms" not in wake["args"]
    assert spans["load", 2]["args"]["times_wrong_by_at_most_ms"] == 500.0


def test_an_empty_trace_is_one() -> None:
    assert trace_events([]) == {"displayTimeUnit": "ms", "traceEvents": []}
