"""The files of Lightning's loggers: after a loss they end where the state does, so no record is there twice.

Worker 0 writes them. At the end of each step it notes how much it has written; whoever is worker 0 after a
loss cuts the files there and goes on. Its replacement is silent until it knows where that is: it begins no
folder of a new version, and logs nothing of what the script does before its first step.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_ft.integrations.lightning.host import part

_csv_logs = part("loggers.csv_logs")
_CSVLogger = _csv_logs.CSVLogger
_TensorBoardLogger = part("loggers.tensorboard").TensorBoardLogger

_EVENTS = "events.out.tfevents.*"


class LogFiles:
    """The files of all loggers of a Trainer.

    Args:
        loggers: the Trainer's.
        writes: this is worker 0.
    """

    def __init__(self, loggers: Sequence[Any], *, writes: bool) -> None:
        self._loggers = {
            str(number): logger
            for number, logger in enumerate(loggers)
            if isinstance(logger, _CSVLogger | _TensorBoardLogger)
        }
        self._writes = writes
        self.versions: dict[str, int | str] = {}

    def be_silent(self) -> None:
        """Write nothing until :meth:`go_to`."""
        for logger in self._loggers.values():
            logger._experiment = _Silent()

    def own_versions(self) -> dict[str, int | str]:
        """The folders that this worker's loggers write into."""
        return {name: logger.version for name, logger in self._loggers.items()}

    def begin(self) -> None:
        """The loop begins: from here on it is counted what is written."""
        if self._writes:
            for logger in self._loggers.values():
                if isinstance(logger, _CSVLogger) and not isinstance(logger._experiment, _Silent):
                    _continue(logger.experiment)

    def place(self) -> dict[str, Any]:
        """The sizes of all files, on worker 0."""
        return {name: _written(logger) for name, logger in self._loggers.items()} if self._writes else {}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Go on from there."""
        for name, version in self.versions.items():
            vars(self._loggers[name]).update(_version=version)
        if self._writes:
            for name, logger in self._loggers.items():
                cut = _cut_rows if isinstance(logger, _CSVLogger) else _cut_events
                cut(logger, place.get(name) or {})


class _Silent:
    """A writer that writes nothing."""

    def __getattr__(self, name: str) -> _Silent:
        return self

    def __call__(self, *_: Any, **__: Any) -> _Silent:
        return self


def _written(logger: Any) -> dict[str, Any]:
    if isinstance(logger._experiment, _Silent):
        return {}
    logger.save()
    if isinstance(logger, _CSVLogger):
        return {"rows": logger.experiment.rows, "keys": [*logger.experiment.metrics_keys]}
    return {"bytes": {str(path.relative_to(logger.log_dir)): path.stat().st_size for path in _events(logger)}}


# ----------------------------------------------------------------------------------------------------- CSV


class _Continued(_csv_logs.ExperimentWriter):  # type: ignore[misc,name-defined]
    """Lightning's writer, which counts rows, and does not delete those of the worker that it replaces."""

    rows: int

    def save(self) -> None:
        added = len(self.metrics)
        super().save()
        self.rows += added

    def _check_log_dir_exists(self) -> None:
        pass

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self.keep(self.read()[1], fieldnames)

    def read(self) -> tuple[list[str], list[dict[str, str]]]:
        """The header and the rows of the file."""
        if not self._fs.isfile(self.metrics_file_path):
            return [], []
        with self._fs.open(self.metrics_file_path, "r", newline="") as file:
            reader = csv.DictReader(file, restval="")
            return [*(reader.fieldnames or [])], [*reader]

    def keep(self, rows: Sequence[Mapping[str, str]], keys: Sequence[str]) -> None:
        """Let these be all that is in the file. A worker that dies in it leaves the old content."""
        beside = f"{self.log_dir}/.{self.NAME_METRICS_FILE}.new"
        with self._fs.open(beside, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=keys, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        self._fs.mv(beside, self.metrics_file_path)


def _continue(writer: Any) -> None:
    if not isinstance(writer, _Continued):
        writer.__class__ = _Continued
        writer.rows = len(writer.read()[1])


def _cut_rows(logger: Any, place: Mapping[str, Any]) -> None:
    writer = _Continued(logger.log_dir)
    writer.hparams = (
        getattr(logger._experiment, "hparams", {}) if not isinstance(logger._experiment, _Silent) else {}
    )
    writer.rows, writer.metrics_keys = place.get("rows", 0), [*place.get("keys", [])]
    header, rows = writer.read()
    if not writer.rows and header:
        writer._fs.rm_file(writer.metrics_file_path)
    elif header != writer.metrics_keys or len(rows) != writer.rows:
        writer.keep(rows[: writer.rows], writer.metrics_keys)
    logger._experiment = writer


# --------------------------------------------------------------------------------------------- TensorBoard


def _events(logger: Any) -> list[Path]:
    return sorted(Path(logger.log_dir).rglob(_EVENTS))


def _cut_events(logger: Any, place: Mapping[str, Any]) -> None:
    if logger._experiment is not None:
        logger._experiment.close()
        logger._experiment = None  # the next record opens another file, beside those
    noted = place.get("bytes", {})
    for path in _events(logger):
        size = noted.get(str(path.relative_to(logger.log_dir)), 0)
        if size:
            os.truncate(path, size)
        else:
            path.unlink()
