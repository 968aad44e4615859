"""Recoveries in the trace event format, which Perfetto (ui.perfetto.dev) and Chrome (about:tracing) open.

A machine is a process there, and each thread of its agent and its workers a thread. What the recovery waited
for is a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swift_ft.offline.recovery_spans import TracedRecovery

_PATH = 0
"""The process that shows what recoveries waited for. Machine 0 is process 1."""
_SPARES = 1 << 20
"""Process of the first machine without a slot."""


def trace_events(traced: Sequence[TracedRecovery]) -> dict[str, Any]:
    """The content of a trace file.

    Args:
        traced: recoveries of one run.
    """
    rows = _Rows()
    events: list[dict[str, Any]] = []
    # Not in Unix times, of which a float keeps no more than a quarter of a microsecond.
    after_us = [(recovery.zero - traced[0].zero) * 1e6 for recovery in traced]
    first_us = min((us + _first_ms(one) * 1e3 for us, one in zip(after_us, traced, strict=True)), default=0.0)
    for number, recovery in enumerate(traced, 1):
        shift_us = after_us[number - 1] - first_us
        path = rows.of(_PATH, "recoveries", "what it waits for")
        for part in recovery.path:
            facts = {"recovery": number, "last": part.by, **part.spans}
            events.append(_complete(part.name, shift_us + part.began_ms * 1e3, part.ms * 1e3, path, facts))
        for one in recovery.participants:
            process, name = rows.process(one.slot, one.machine)
            for span in one.spans:
                row = rows.of(process, name, f"{one.by}: {span.thread}" if span.thread else one.by)
                facts = {"recovery": number, **span.facts}
                if one.uncertainty_ms != 0:
                    facts["times_wrong_by_at_most_ms"] = one.uncertainty_ms
                at = shift_us + span.began_ms * 1e3
                events.append(_complete(span.name, at, span.ms * 1e3, row, facts))
    return {"displayTimeUnit": "ms", "traceEvents": [*rows.names(), *events]}


def _first_ms(recovery: TracedRecovery) -> float:
    begins = [span.began_ms for one in recovery.participants for span in one.spans]
    return min([*begins, *(part.began_ms for part in recovery.path)], default=0.0)


def _complete(
    name: str, at_us: float, us: float, row: tuple[int, int], facts: Mapping[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(at_us, 3), "dur": round(us, 3)}
    return {"name": name, "ph": "X", "pid": row[0], "tid": row[1], **times, "args": dict(facts)}


class _Rows:
    """Numbers for processes and threads, and their names."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], tuple[int, int]] = {}
        self._processes: dict[int, str] = {}
        self._spares: dict[str, int] = {}

    def process(self, slot: int | None, machine: str) -> tuple[int, str]:
        """Of a machine: its number, and its name."""
        if slot is not None:
            return slot + 1, f"machine {slot}"
        return self._spares.setdefault(machine, _SPARES + len(self._spares)), f"spare {machine}"

    def of(self, process: int, name: str, thread: str) -> tuple[int, int]:
        """The number of a process and of one of its threads."""
        self._processes[process] = name
        return self._rows.setdefault((process, thread), (process, len(self._rows)))

    def names(self) -> Iterator[dict[str, Any]]:
        """The events that give all rows their names, and their order: by machine."""
        for process, name in sorted(self._processes.items()):
            yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
            sort = {"sort_index": process}
            yield {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": sort}
        for (_, thread), (process, number) in self._rows.items():
            yield {"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": thread}}
