"""The events of a run as JSON lines, written by a launcher's real console process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swift_ft.cli.event_stream import EventFile, EventStream
from swift_ft.cli.journal_news import news_of
from swift_ft.cli.news import News
from swift_ft.launch.log_handlers import EventPipe, _PipeHandler
from swift_ft.recovery import events as ev
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History
from tests.support.event_lines import checked_lines

TELLER = Path(__file__).parent / "scripts" / "tells_a_story.py"


def story(*flags: str) -> str:
    done = subprocess.run([sys.executable, str(TELLER), *flags], capture_output=True, timeout=120, check=True)
    return done.stderr.decode()


def test_events_go_on_where_nobody_reads_the_console(tmp_path: Path) -> None:
    """As in ``swift-run ... 2>&1 | head``."""
    reader, writer = os.pipe()
    os.close(reader)
    path = tmp_path / "events.jsonl"
    command = [sys.executable, str(TELLER), "--events-log", str(path)]
    subprocess.run(command, stderr=writer, timeout=120, check=True)
    os.close(writer)
    told = [line["event"] for line in checked_lines(path.read_text()) if line["source"] == "journal"]
    assert told[-1] == "run_ended"


def test_a_file_gets_journal_log_and_launcher_in_one_schema(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("")
    assert "{" not in story("--quiet", "--events-log", str(path))
    lines = checked_lines(path.read_text())
    assert {line["run"] for line in lines} == {"story"}
    journal = [line for line in lines if line["source"] == "journal"]
    assert [line["event"] for line in journal] == [
        "run_opened",
        "spare_joined",
        "run_live",
        "checkpoint_committed",
        "machine_lost",
        "spares_used_up",
        "recovery_planned",
        "fell_back",
        "recovery_finished",
        "incident",
        "run_ended",
    ]
    lost = journal[4]
    assert (lost["machine"], lost["level"], lost["generation"]) == (1, "warning", 2)
    fallback = journal[7]["fields"]
    assert (journal[7]["level"], fallback["way"], fallback["resume"]) == ("error", "fallback", 40)
    finished = journal[8]["fields"]
    assert (finished["way"], finished["iterations_lost"], finished["machines"]) == ("fallback", 7, [1])
    incident = journal[9]["fields"]
    assert (incident["cause"], incident["slots"], incident["way"]) == ("machine", [1], "fallback")
    assert journal[10]["fields"]["ok"] is True
    [record] = [line for line in lines if line["source"] == "log"]
    assert (record["event"], record["rank"]) == ("log_suspended", 1)
    assert record["message"] == "the log is suspended"
    assert record["fields"] == {"logger": "swift_ft.logging", "until": "x"}
    [failed] = [line for line in lines if line["source"] == "launcher"]
    assert (failed["event"], failed["message"]) == ("launcher_failed", "the rendezvous store died")


def test_what_is_logged_just_before_the_end_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv("LATE", "4")
    story("--quiet", "--events-log", str(path))
    late = [line["message"] for line in checked_lines(path.read_text()) if line["event"] == "log_resumed"]
    assert late == [f"late {number}" for number in range(4)]


def test_a_minus_means_stderr() -> None:
    lines = [line for line in story("--quiet", "--events-log", "-").splitlines() if line.startswith("{")]
    assert {line["source"] for line in checked_lines("\n".join(lines))} == {"journal", "log", "launcher"}


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gone" / "events.jsonl"
    file = EventFile(str(path))
    file({"event": "x"})
    file({"event": "x"})
    assert [vars(record)["event"] for record in caplog.records] == ["events_not_written"]
    path.parent.mkdir()
    file({"event": "y"})
    assert path.read_text() == '{"event": "y"}\n'


def test_a_line_says_when_and_where_it_was() -> None:
    lines: list[dict[str, Any]] = []
    history = History()
    history.apply(Entry(0, ev.JobOpened(machines=1), 1.0, "a"))
    history.apply(Entry(1, ev.MachineJoined(machine="a"), 2.0, "a"))
    last = Entry(2, ev.JobClosed(reason="stopped by SIGINT", exit_code=130), 3.5, "a")
    EventStream(history, lines.append).add_news(news_of(history.apply(last), history), last)
    [line] = lines
    assert (line["event"], line["position"], line["level"]) == ("run_ended", 2, "error")
    assert (line["time"], line["generation"]) == ("1970-01-01T00:00:03.500Z", 1)


# ------------------------------------------------------------------------------------------- what is an event


def told(*events: ev.Event) -> list[News]:
    """What JSON lines tell of the last event."""
    *earlier, last = (Entry(n, event, float(n), "test") for n, event in enumerate(events))
    history = History.of(earlier)
    return [one for one in news_of(history.apply(last), history) if one.level]


STARTED: tuple[ev.Event, ...] = (
    ev.JobOpened(machines=2, max_failures=9),
    *(ev.MachineJoined(machine=name) for name in "ab"),
    *(ev.StatusReported(rank=rank, generation=1, iteration=None) for rank in range(2)),
    *(ev.WorkerReady(rank=rank, generation=1) for rank in range(2)),
)
LOST = ev.MachineLost(machine="b", reason="its agent's connection ended")


def test_a_loss_without_a_spare_waits_for_a_machine() -> None:
    lost, awaited = told(*STARTED, LOST)
    assert (lost.event, lost.machine) == ("machine_lost", 1)
    assert (awaited.event, awaited.fields) == ("machine_awaited", {"slots": [1]})
    assert [notice.event for notice in told(*STARTED, LOST, ev.MachineLost(machine="a", reason="gone"))] == [
        "machine_lost",
        "machine_awaited",
    ]
    assert told(*STARTED, LOST, LOST) == [], "a second report of the same loss is no news"


def test_spares_come_and_go() -> None:
    joined = ev.MachineJoined(machine="c")
    [notice] = told(*STARTED, joined)
    assert (notice.event, notice.fields) == ("spare_joined", {"name": "c", "spares": 1})
    gone = told(*STARTED, joined, ev.MachineLost(machine="c", reason="gone"))
    assert [notice.event for notice in gone] == ["spare_lost", "spares_used_up"]
    assert [notice.event for notice in told(*STARTED, joined, LOST)] == ["machine_lost", "spares_used_up"]


def test_a_restart_of_all_processes_is_a_fallback() -> None:
    notices = told(*STARTED[:3], ev.SessionlessWorkers(machine="a", generation=1))
    assert [(notice.event, notice.fields["way"]) for notice in notices] == [("fell_back", "restart")]


def test_batches_that_are_dealt_anew_are_no_recovery() -> None:
    asked = ev.SharesRequested(rank=0, generation=1, iteration=5, shares=(24, 8))
    stopped = [ev.LayoutBoundaryReached(rank=rank, generation=1, iteration=5) for rank in range(2)]
    changed = told(*STARTED, asked, *stopped)
    assert [(notice.event, notice.fields) for notice in changed] == [
        ("shares_changed", {"shares": [24, 8], "iteration": 5})
    ]
    reports = [ev.StatusReported(rank=rank, generation=2, iteration=5, live=True) for rank in range(2)]
    assert told(*STARTED, asked, *stopped, *reports) == []


def test_what_comes_too_late_is_no_event() -> None:
    assert told(*STARTED, ev.ReplayFailed(rank=0, generation=0, reason="a log is torn")) == []
    committed = ev.CheckpointCommitted(iteration=4, epoch=1)
    assert [notice.event for notice in told(*STARTED, committed)] == ["checkpoint_committed"]


# ------------------------------------------------------------------------------------------------ log events


@pytest.fixture
def logger() -> Any:
    """A logger of the package; what a test adds to the package's logger is taken back."""
    own = logging.getLogger("swift_ft")
    handlers = own.handlers[:]
    yield logging.getLogger("swift_ft.test")
    for handler in own.handlers:
        if isinstance(handler, _PipeHandler):
            handler._writer.close()
    own.handlers = handlers


def test_a_forked_worker_writes_into_the_pipe(logger: logging.Logger) -> None:
    pipe = EventPipe()
    reader = os.fork()
    if reader == 0:
        pipe.read_from_here()
        first, last = pipe.receive(), pipe.receive()
        ok = first is not None and first["event"] == "log_waits" and first["message"] == "x" * 4000
        os._exit(0 if ok and last is not None and last["event"] == "log_resumed" else 1)
    pipe.write_from_here()
    writer = os.fork()
    if writer == 0:
        logger.warning("x" * 100_000, extra={"event": "log_waits"})
        logger.warning("fine", extra={"event": "log_resumed"})
        os._exit(0)
    assert os.waitpid(writer, 0)[1] == 0
    assert os.waitpid(reader, 0)[1] == 0


@pytest.mark.parametrize("names", [5_000, 50_000])  # longer than the reader takes, and than a socket does
def test_fields_that_are_too_long_are_named(logger: logging.Logger, names: int) -> None:
    pipe = EventPipe()
    kept = os.dup(pipe._reader.fileno())
    pipe.write_from_here()
    pipe._reader = type(pipe._reader)(fileno=kept)
    logger.warning("many", extra={"event": "log_waits", "names": ["a layer's name"] * names, "rank": 3})
    record = pipe.receive()
    assert record is not None
    assert (record["event"], record["message"], record["rank"]) == ("log_waits", "many", 3)
    assert record["fields"] == {"logger": "swift_ft.test", "left_out": ["names"]}
    pipe._reader.close()


def test_a_full_pipe_delays_nobody_and_what_is_missing_is_counted(logger: logging.Logger) -> None:
    pipe = EventPipe()
    kept = os.dup(pipe._reader.fileno())
    pipe.write_from_here()
    sent = 5000
    for _ in range(sent):
        logger.warning("x" * 1000, extra={"event": "log_waits"})
    pipe._reader = type(pipe._reader)(fileno=kept)
    pipe._reader.setblocking(False)
    arrived = 0
    while (record := _receive(pipe)) is not None:
        assert record["dropped"] == 0
        arrived += 1
    assert 0 < arrived < sent
    logger.warning("again", extra={"event": "log_resumed"})
    record = _receive(pipe)
    assert record is not None
    assert record["dropped"] == sent - arrived
    lines: list[dict[str, Any]] = []
    EventStream(History(), lines.append).add_record(record)
    assert [(line["event"], line["fields"].get("dropped")) for line in lines] == [
        ("events_dropped", sent - arrived),
        ("log_resumed", None),
    ]
    pipe._reader.close()


def _receive(pipe: EventPipe) -> dict[str, Any] | None:
    try:
        return pipe.receive()
    except BlockingIOError:
        return None
