"""Lines of the package's log are shown once, whatever the user has configured."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swift_ft.launch.log_handlers import show_log

logger = logging.getLogger("swift_ft.launch.test")


@pytest.fixture(autouse=True)
def own() -> Iterator[logging.Logger]:
    """The package's logger in the state of a new process; restored after the test."""
    own = logging.getLogger("swift_ft")
    handlers, level, propagates = own.handlers[:], own.level, own.propagate
    own.handlers, own.level = [], logging.NOTSET
    yield own
    own.handlers, own.level, own.propagate = handlers, level, propagates


@pytest.fixture
def set_root(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives the root logger these handlers only. pytest adds its own after all fixtures."""

    def set_handlers(*handlers: logging.Handler) -> None:
        monkeypatch.setattr(logging.getLogger(), "handlers", [*handlers])

    return set_handlers


def test_info_and_above_is_shown(set_root: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    set_root()
    show_log("swift_ft")
    logger.debug("a detail")
    logger.info("%d machines", 4)
    logger.warning("one is lost", extra={"event": "machine_lost"})
    assert capsys.readouterr().err == "swift_ft: 4 machines\nswift_ft: one is lost\n"


def test_a_second_call_replaces_the_first(
    set_root: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker is forked from an agent, which is forked from swift-run."""
    set_root()
    show_log("swift-run")
    show_log("swift_ft")
    logger.info("hello")
    assert capsys.readouterr().err == "swift_ft: hello\n"


def test_a_handler_of_the_users_shows_lines_alone(
    set_root: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    show_log("swift_ft")
    theirs = io.StringIO()
    set_root(logging.StreamHandler(theirs))
    logger.info("hello")
    assert theirs.getvalue() == "hello\n"
    assert capsys.readouterr().err == ""


def test_a_log_file_of_the_users_does_not_hide_lines(
    set_root: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_log("swift_ft")
    file = logging.FileHandler(tmp_path / "log.txt")
    set_root(file)
    logger.info("hello")
    file.close()
    assert (tmp_path / "log.txt").read_text() == "hello\n"
    assert capsys.readouterr().err == "swift_ft: hello\n"


def test_what_a_script_logs_is_its_own(
    set_root: Callable[..., None],
    own: logging.Logger,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a worker, whose lines differ where machines are lost. A script may ask for them."""
    show_log("swift_ft", apart=True)
    file, theirs = logging.FileHandler(tmp_path / "log.txt"), io.StringIO()
    set_root(file, logging.StreamHandler(theirs))
    logger.info("hello")
    logging.getLogger("script").warning("its own")
    assert (tmp_path / "log.txt").read_text() == theirs.getvalue() == "its own\n"
    assert capsys.readouterr().err == "swift_ft: hello\n"
    own.propagate = True
    logger.info("asked for")
    file.close()
    assert (tmp_path / "log.txt").read_text() == theirs.getvalue() == "its own\nasked for\n"
    assert capsys.readouterr().err == ""


def test_a_level_of_the_users_stays(own: logging.Logger) -> None:
    own.setLevel(logging.ERROR)
    show_log("swift_ft")
    assert own.level == logging.ERROR
