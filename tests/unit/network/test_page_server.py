"""Pages for anyone: what is served, and how little strangers can take."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator

import pytest

from swift_ft.network.page_server import Page, PageServer
from tests.support.strangers import is_refused, stranger
from tests.support.waiting import wait_until

PAGE = Page(b"a page\n")
TOO_LARGE = b"Request Header Fields Too Large\n"


@pytest.fixture
def server() -> Iterator[PageServer]:
    pages = {"/page": lambda: PAGE, "/ill": lambda: Page(b"ill\n", 503)}
    with contextlib.closing(PageServer("127.0.0.1", 0, pages, name="test-pages")) as made:
        yield made


def address_of(server: PageServer) -> str:
    return f"127.0.0.1:{server.server_port}"


def ask(server: PageServer, path: str, method: str = "GET") -> tuple[int, bytes]:
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    with contextlib.closing(line):
        line.request(method, path)
        answer = line.getresponse()
        return answer.status, answer.read()


def threads_of(server: PageServer) -> int:
    return sum(thread.name.endswith("(process_request_thread)") for thread in threading.enumerate())


def test_known_paths_are_served(server: PageServer) -> None:
    assert ask(server, "/page") == (200, b"a page\n")
    assert ask(server, "/page?name=value") == (200, b"a page\n")
    assert ask(server, "/ill") == (503, b"ill\n")


@pytest.mark.parametrize("path", ["/", "/other", "/page/", "/../page"])
def test_no_other_path_is_served(server: PageServer, path: str) -> None:
    assert ask(server, path) == (404, b"/page or /ill\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "NONSENSE"])
def test_no_other_method_is_served(server: PageServer, method: str) -> None:
    assert ask(server, "/page", method) in ((405, b"Method Not Allowed\n"), (405, b""))


@pytest.mark.parametrize(
    ("request_", "refusal"),
    [
        (b"GET /page HTTP/1.1\r\n" + b"x-one: 1\r\n" * 5000 + b"\r\n", TOO_LARGE),
        (b"GET /page HTTP/1.1\r\nx-long: " + b"a" * 60_000 + b"\r\n\r\n", TOO_LARGE),
        (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\n\r\n", TOO_LARGE),
        (b"\xff" * 100 + b"\n", b"Bad Request\n"),
    ],
)
def test_a_request_that_is_none_or_too_long_is_refused(
    server: PageServer, request_: bytes, refusal: bytes
) -> None:
    with stranger(address_of(server), request_) as line:
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # the rest of the request is not read
            while piece := line.recv(65536):
                answer += piece
    assert not answer or answer.endswith(refusal)
    assert ask(server, "/page") == (200, b"a page\n")


def test_whoever_is_slow_is_ended(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline for the whole connection: a byte now and then does not extend it."""
    monkeypatch.setattr(server, "_limit_s", 0.3)
    lines = [stranger(address_of(server), first) for first in (b"", b"GET /pa", b"GET /page HTTP/1.1\r\n")]
    slow = stranger(address_of(server))
    with contextlib.suppress(ConnectionError):
        for letter in b"GET /page HTTP/1.1\r\nx: " + b"a" * 1000:
            slow.sendall(bytes([letter]))
            threading.Event().wait(0.01)
        pytest.fail("it was not ended")
    slow.close()
    for line in lines:
        assert is_refused(line)
    wait_until(lambda: threads_of(server) == 0, "the end of their threads")


def test_of_many_the_oldest_end(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus gets its answer, however many connections somebody holds open."""
    monkeypatch.setattr(server, "_most", 4)
    crowd = [stranger(address_of(server)) for _ in range(20)]
    assert ask(server, "/page") == (200, b"a page\n")
    for line in crowd[:10]:
        assert is_refused(line)
    wait_until(lambda: threads_of(server) <= 4, "the end of their threads")
    for line in crowd[10:]:
        line.close()


def test_a_page_that_cannot_be_computed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Page:
        raise ValueError("no\nnumbers")

    with contextlib.closing(PageServer("127.0.0.1", 0, {"/page": broken}, name="test-pages")) as server:
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            ask(server, "/page")
        wait_until(lambda: caplog.records, "a line")
    assert caplog.messages == ["a page could not be served: ValueError: no"]


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        PageServer("127.0.0.1", taken.getsockname()[1], {}, name="test-pages")
