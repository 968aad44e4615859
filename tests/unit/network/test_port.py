"""Members of a job talk over real sockets; strangers get one log line and nothing else."""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from swift_ft.network import BadFrameError, Channel, JobSecret, Port, RefusedError, connect, port
from swift_ft.network import channel as channel_module
from tests.support.strangers import Wire, is_refused, stranger
from tests.support.waiting import wait_until

SECRET = JobSecret.of_token("a token that the members share")
OTHER = JobSecret.of_token("a token of another job")
WAIT_S = 30.0


class Echo:
    """Answers each message with itself, and remembers them all."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.errors: queue.Queue[Exception] = queue.Queue()
        self.channels: list[Channel] = []

    def __call__(self, channel: Channel) -> None:
        self.channels.append(channel)
        try:
            while (message := channel.receive(WAIT_S)) is not None:
                self.heard.append(message)
                channel.send(message)
        except OSError as error:
            self.errors.put(error)
        channel.close()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def served(echo: Echo) -> Iterator[Port]:
    listening = Port("127.0.0.1", SECRET, {"echo": echo})
    yield listening
    listening.close()


def served_once(channel: Channel) -> None:
    channel.send({"served": True})
    channel.close()


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "connection_refused"]


def test_messages_go_both_ways(served: Port) -> None:
    channel = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)
    for message in ({"a": 1}, {"text": "ü" * 100_000}, {}):
        channel.send(message)
        assert channel.receive(WAIT_S) == message
    channel.close()
    assert channel.ended


def test_any_thread_may_send(served: Port) -> None:
    channel = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)

    def send(by: int) -> None:
        for i in range(200):
            channel.send({"by": by, "i": i})

    senders = [threading.Thread(target=send, args=(n,)) for n in range(5)]
    for sender in senders:
        sender.start()
    got = [channel.receive(WAIT_S) for _ in range(1000)]
    for sender in senders:
        sender.join()
    for n in range(5):
        assert [m["i"] for m in got if m and m["by"] == n] == list(range(200))
    channel.close()


def test_a_loop_drains_without_waiting(served: Port) -> None:
    channel = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)
    assert channel.drain() == []
    for i in range(100):
        assert channel.try_send({"i": i})
    got: list[dict[str, Any]] = []
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while len(got) < 100:
            assert selector.select(WAIT_S)
            got += channel.drain()
    assert got == [{"i": i} for i in range(100)]
    channel.close()


def test_the_end_is_seen_by_both_ways_of_reading(served: Port, echo: Echo) -> None:
    waiting = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)
    draining = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)
    wait_until(lambda: len(echo.channels) == 2, "both are served")
    for channel in echo.channels:
        channel.close()
    assert waiting.receive(WAIT_S) is None
    wait_until(lambda: draining.drain() == [] and draining.ended, "the end is seen")
    draining.close()
    waiting.close()
    for channel in (waiting, draining):
        with pytest.raises(ConnectionError):
            channel.send({})


def test_nothing_in_time_leaves_the_channel_as_it_is(served: Port) -> None:
    channel = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)
    with pytest.raises(TimeoutError):
        channel.receive(0.05)
    channel.send({"a": 1})
    assert channel.receive(WAIT_S) == {"a": 1}
    channel.close()


def test_closing_ends_a_wait_in_another_thread(served: Port) -> None:
    channel = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)
    results: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=lambda: results.put(channel.receive(None)), daemon=True).start()
    channel.close()
    assert results.get(timeout=WAIT_S) is None


def test_closing_the_port_ends_its_channels(served: Port) -> None:
    channel = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)
    channel.send({"a": 1})
    assert channel.receive(WAIT_S) == {"a": 1}
    served.close()
    assert channel.receive(WAIT_S) is None
    channel.close()
    with pytest.raises(OSError):  # noqa: PT011  (refused or reset, by the system)
        connect(served.address, SECRET, "echo", timeout_s=1.0)


def test_purposes_are_added_later_and_unknown_ones_refused(
    served: Port, caplog: pytest.LogCaptureFixture
) -> None:
    early = connect(served.address, SECRET, "later", timeout_s=WAIT_S)
    assert early.receive(WAIT_S) is None
    assert refusals(caplog) == [
        f"the port {served.address} refused a connection from 127.0.0.1: nothing here serves 'later'"
    ]
    early.close()
    served.serve("later", served_once)
    with contextlib.closing(connect(served.address, SECRET, "later", timeout_s=WAIT_S)) as channel:
        assert channel.receive(WAIT_S) == {"served": True}


def test_a_wrong_secret_is_refused_by_either_side(served: Port, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RefusedError, match="the same secret"):
        connect(served.address, OTHER, "echo", timeout_s=WAIT_S)
    wait_until(lambda: len(refusals(caplog)) == 1, "one line is logged")
    assert "does not know this job's secret" in refusals(caplog)[0]


def test_a_port_that_does_not_know_the_secret_is_found_out() -> None:
    """It answers each proof with one of its own making: random bytes, or the client's own proof."""
    for own_proof in (os.urandom(32), None):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def impostor(own_proof: bytes | None = own_proof, listener: socket.socket = listener) -> None:
                line, _ = listener.accept()
                with line:
                    line.recv(4096)
                    line.sendall(struct.pack("!I", 32) + os.urandom(32))
                    proof = line.recv(4096)
                    line.sendall(proof if own_proof is None else struct.pack("!I", 32) + own_proof)
                    line.recv(1)

            threading.Thread(target=impostor, daemon=True).start()
            with pytest.raises(RefusedError, match="does not know this job's secret"):
                connect(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, "echo", timeout_s=WAIT_S)


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x01\x01" + b"x" * 257,
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x10" + b"y" * 16,
        bytes(range(256)) * 40,
    ],
    ids=["http", "4 GiB", "257 bytes", "empty", "not a hello", "bytes"],
)
def test_other_bytes_get_no_answer_and_one_line(
    served: Port, echo: Echo, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_refused(stranger(served.address, first))
    wait_until(lambda: len(refusals(caplog)) == 1, "one line is logged")
    assert echo.channels == []


def test_a_half_open_connection_ends_at_its_deadline(
    served: Port, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(port, "HANDSHAKE_S", 0.2)
    before = threading.active_count()
    silent, begun = stranger(served.address), stranger(served.address, b"\x00\x00")
    assert is_refused(silent)
    assert is_refused(begun)
    wait_until(lambda: len(refusals(caplog)) == 2, "each has its line")
    wait_until(lambda: threading.active_count() <= before, "no thread is left")


def test_members_come_through_a_crowd_of_strangers(served: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many that prove nothing, the oldest is refused: whoever comes has time to prove it."""
    monkeypatch.setattr(port, "MAX_NEWCOMERS", 8)
    threads = threading.active_count()
    crowd = [stranger(served.address) for _ in range(50)]
    channel = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)
    channel.send({"a": 1})
    assert channel.receive(WAIT_S) == {"a": 1}
    assert threading.active_count() <= threads + 1  # the member's; none for the strangers
    for line in crowd[:40]:
        assert is_refused(line)
    channel.close()
    for line in crowd[40:]:
        line.close()


def test_a_flood_of_strangers_fills_no_log(served: Port, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(200):
        assert is_refused(stranger(served.address, os.urandom(300)))
    served.close()  # it says now what it did not say
    lines = refusals(caplog)
    assert len(lines) == 6
    assert lines[-1] == f"the port {served.address} refused 195 more connections"


def test_a_recorded_conversation_proves_nothing(
    served: Port, echo: Echo, caplog: pytest.LogCaptureFixture
) -> None:
    with Wire(served.address) as wire:
        channel = connect(wire.address, SECRET, "echo", timeout_s=WAIT_S)
        channel.send({"order": "delete"})
        assert channel.receive(WAIT_S) == {"order": "delete"}
        channel.close()
        with stranger(served.address, bytes(wire.upward)) as replayer:
            first = replayer.recv(4 + 32)  # a nonce, and a new one
            assert first != bytes(wire.downward[:36])
            assert is_refused(replayer)
    wait_until(lambda: any("does not know" in line for line in refusals(caplog)), "it is refused")
    assert echo.heard == [{"order": "delete"}]


def _frames(data: bytes) -> list[bytes]:
    found = []
    while data:
        end = 4 + struct.unpack_from("!I", data)[0]
        found.append(data[:end])
        data = data[end:]
    return found


@pytest.mark.parametrize("fault", ["repeated", "swapped", "omitted", "changed", "oversized"])
def test_frames_that_are_not_the_next_ones_end_the_channel(served: Port, echo: Echo, fault: str) -> None:
    """Who sits on the wire can do no more than end the connection."""
    with Wire(served.address) as wire:
        channel = connect(wire.address, SECRET, "echo", timeout_s=WAIT_S)
        channel.send({"i": 0})
        assert channel.receive(WAIT_S) == {"i": 0}

        def change(data: bytes) -> bytes:
            first, *rest = _frames(data)
            if fault == "repeated":
                return first + first + b"".join(rest)
            if fault == "swapped":
                return rest[0] + first
            if fault == "omitted":
                return b"".join(rest)
            if fault == "oversized":
                return b"\xff\xff\xff\xff" + data
            return first[:-1] + bytes([first[-1] ^ 1]) + b"".join(rest)

        wire.change = change
        with channel._sending:  # two frames in one piece
            both = b"".join(channel._sealer.seal(body) for body in (b'{"i":1}', b'{"i":2}'))
            channel._line.send(both)
        assert isinstance(echo.errors.get(timeout=WAIT_S), BadFrameError)
        assert echo.heard in ([{"i": 0}], [{"i": 0}, {"i": 1}] if fault == "repeated" else [])
        assert channel.receive(WAIT_S) in (None, {"i": 1})
        channel.close()


def test_one_that_does_not_read_holds_a_sender_no_longer_than_its_deadline() -> None:
    kept: queue.Queue[Channel] = queue.Queue()
    listening = Port("127.0.0.1", SECRET, {"hold": kept.put})
    channel = connect(listening.address, SECRET, "hold", timeout_s=WAIT_S)
    big = {"data": "x" * 1_000_000}
    while channel.try_send(big):
        continue
    assert not channel.try_send({"small": 1})
    with pytest.raises(TimeoutError, match="has not read"):
        channel.send(big, timeout_s=0.2)
    with pytest.raises(ConnectionError):
        channel.send({}, timeout_s=0.2)
    reader = kept.get(timeout=WAIT_S)
    got = []
    while (message := reader.receive(WAIT_S)) is not None:
        got.append(message)
    assert got == [big] * len(got)  # what was begun is whole, or does not count
    listening.close()


def test_one_that_reads_late_gets_everything() -> None:
    kept: queue.Queue[Channel] = queue.Queue()
    listening = Port("127.0.0.1", SECRET, {"hold": kept.put})
    channel = connect(listening.address, SECRET, "hold", timeout_s=WAIT_S)
    sent = 0
    while channel.try_send({"i": sent, "data": "x" * 1_000_000}):
        sent += 1
    reader = kept.get(timeout=WAIT_S)
    sender = threading.Thread(target=channel.send, args=({"i": sent},))
    sender.start()
    for i in range(sent + 1):
        message = reader.receive(WAIT_S)
        assert message is not None
        assert message["i"] == i
    sender.join()
    channel.close()
    listening.close()


def test_a_message_that_is_never_finished_ends_the_channel(
    served: Port, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "_FRAME_S", 0.2)
    monkeypatch.setattr(channel_module, "_LOOK_S", 0.05)
    channel = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)
    channel.send({"i": 0})
    assert channel.receive(WAIT_S) == {"i": 0}
    channel._line.send(channel._sealer.seal(b'{"i":1}')[:-1])
    error = echo.errors.get(timeout=WAIT_S)
    assert "has not finished a message" in str(error)
    channel.close()


def test_connecting_has_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            connect(f"127.0.0.1:{silent.getsockname()[1]}", SECRET, "echo", timeout_s=0.2)
        assert time.monotonic() - began < WAIT_S


def test_a_message_that_is_too_long_is_not_sent(served: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)
    monkeypatch.setattr("swift_ft.network.frames.MAX_FRAME_BYTES", 1000)
    with pytest.raises(BadFrameError, match="too long"):
        channel.send({"data": "x" * 1000})
    channel.send({"data": "x"})
    assert channel.receive(WAIT_S) == {"data": "x"}
    channel.close()


def test_an_error_of_a_handler_ends_its_channel_only(served: Port, caplog: pytest.LogCaptureFixture) -> None:
    def fails(channel: Channel) -> None:
        raise ValueError("not today")

    served.serve("fails", fails)
    with contextlib.closing(connect(served.address, SECRET, "fails", timeout_s=WAIT_S)) as failing:
        assert failing.receive(WAIT_S) is None
    wait_until(lambda: "channel_failed" in [getattr(r, "event", "") for r in caplog.records], "it is logged")
    channel = connect(served.address, SECRET, "echo", timeout_s=WAIT_S)
    channel.send({"a": 1})
    assert channel.receive(WAIT_S) == {"a": 1}
    channel.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when the last bytes came")
def test_the_kernel_knows_when_the_last_message_came() -> None:
    """Also of one that was not read yet."""
    kept: queue.Queue[Channel] = queue.Queue()
    with contextlib.closing(Port("127.0.0.1", SECRET, {"hold": kept.put})) as listening:
        one = connect(listening.address, SECRET, "hold", timeout_s=WAIT_S)
        other = kept.get(timeout=WAIT_S)
        before = time.monotonic()
        one.send({"a": 1})
        wait_until(lambda: other.quiet_s() >= 0.05, "the kernel counts")
        assert other.drain() == [{"a": 1}]
        assert 0.05 <= other.quiet_s() <= time.monotonic() - before + 0.02  # a tick of the kernel's clock
        one.close()
