"""Writes down which samples every iteration was given."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash


class SampleLog:
    """A line of JSON for each batch that a replica asks for, in a file of its own.

    A line has ``iteration``, ``samples``, ``start`` (where these begin in the global batch), ``shares`` (a
    digest of those of all replicas) and ``time`` (seconds since 1970). A repeated or replayed iteration has a
    further line. A line is written at once, so that a SIGKILL loses none that a batch was given for.

    Args:
        folder: of all replicas' logs. It is made if need be.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._file: int | None = None

    def write(self, iteration: int, samples: Sequence[int], shares: Sequence[int], replica: int) -> None:
        """Add a batch.

        Args:
            iteration: it is of.
            samples: indices of the replica's samples.
            shares: samples of all replicas in a global batch.
            replica: its number.

        Raises:
            OSError: if the file cannot be written.
        """
        said = {
            "iteration": iteration,
            "start": sum(shares[:replica]),
            "samples": list(samples),
            "shares": xxhash.xxh32_hexdigest(repr(list(shares)).encode()),
            "time": time.time(),
        }
        line = json.dumps(said)
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"replica{replica}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            line = "\n" + line  # whatever a killed worker had begun is a line of its own
        os.write(self._file, f"{line}\n".encode())


def samples_by_iteration(folder: str | Path) -> dict[int, list[int]]:
    """The samples of each iteration in the order of its global batch, from the logs of all replicas.

    What counts is an iteration's last repetition, which other replicas may have shared than the first one.

    Raises:
        ValueError: if an iteration's parts overlap, or leave a gap.
    """
    lines: dict[int, list[dict[str, Any]]] = {}
    for path in Path(folder).glob("replica*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # not one that a SIGKILL has cut off
                said = json.loads(line)
                lines.setdefault(said["iteration"], []).append(said)
    return {iteration: _joined(iteration, lines[iteration]) for iteration in sorted(lines)}


def _joined(iteration: int, lines: list[dict[str, Any]]) -> list[int]:
    lines.sort(key=lambda said: said["time"])
    parts = {said["start"]: said["samples"] for said in lines if said["shares"] == lines[-1]["shares"]}
    samples: list[int] = []
    for start in sorted(parts):
        if start != len(samples):
            raise ValueError(f"Iteration {iteration} has {len(samples)} samples before place {start}.")
        samples += parts[start]
    return samples
