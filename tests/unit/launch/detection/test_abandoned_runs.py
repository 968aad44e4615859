"""Which runs are over without saying so: those whose machines give no sign of life and do not answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest

from swift_ft.config import detection_timings as timings
from swift_ft.config.run_config import RunConfig
from swift_ft.config.store_address import StoreAddress
from swift_ft.coordination.journal import open_journal
from swift_ft.coordination.life_signs import LifeSigns
from swift_ft.coordination.relay.lines import RELAY
from swift_ft.coordination.runs import find_run, is_ended
from swift_ft.coordination.store_client import connect
from swift_ft.launch.detection.abandoned_runs import closer_of_abandoned_runs
from swift_ft.launch.rendezvous.job_secret import agreed_secret
from swift_ft.network import JobSecret, Port
from swift_ft.recovery import events as ev
from swift_ft.torch_adapters.rendezvous_store import TCPStore

TOKEN = "0123456789abcdef0123456789abcdef"


class Job:
    """A run with one machine, in a store of its own."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.connect = partial(connect, StoreAddress.tcp("127.0.0.1", self.store.port))
        self.run = find_run(self.connect, "job")
        self.journal = open_journal(partial(self.connect, self.run), by="test")

    def join(self, address: str) -> None:
        self.journal.append(ev.JobOpened(machines=1), ev.MachineJoined(machine="m.0", address=address))

    def find(self, flag: str = "resume") -> str:
        config = replace(
            RunConfig(machine_silence_s=0.5),
            resume=flag == "resume",
            auto_resume=flag == "auto_resume",
            fresh=flag == "fresh",
        )
        return find_run(self.connect, "job", closer_of_abandoned_runs(self.connect, config, None))

    @contextmanager
    def signs(self) -> Iterator[None]:
        """A machine gives signs of life."""
        over, signs = threading.Event(), LifeSigns(self.connect(self.run))

        def give() -> None:
            while not over.wait(0.05):
                signs.give()

        thread = threading.Thread(target=give)
        thread.start()
        yield
        over.set()
        thread.join()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(timings, "SIGN_S", 0.1)
    return Job()


def nobodys_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("flag", ["resume", "auto_resume", "fresh"])
def test_a_run_that_nobody_lives_in_is_over(flag: str, job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.join(nobodys_address())
    new = job.find(flag)
    assert new != job.run
    assert is_ended(partial(job.connect, job.run))
    assert f"run {job.run} is over: none of its machines is there any more" in caplog.text
    assert job.find() == new  # no machine has joined it: it begins


@pytest.mark.parametrize("answers", [True, False])
def test_who_answers_lives_though_the_store_hears_nothing(answers: bool, job: Job) -> None:
    """A port of another job's machine, or of any other program, is none of its own."""
    config = RunConfig()
    secret = agreed_secret(job.connect(job.run), config)
    held = secret if answers else JobSecret.of_token(TOKEN, None)
    with ExitStack() as stack:
        port = Port("127.0.0.1", held, {RELAY: lambda channel: channel.close()})
        stack.callback(port.close)
        job.join(port.address)
        assert (job.find() == job.run) == answers


@pytest.mark.parametrize("lives", [True, False])
def test_a_run_that_lives_or_has_not_begun_goes_on(lives: bool, job: Job) -> None:
    if lives:
        job.join(nobodys_address())
    with job.signs() if lives else nullcontext():
        assert job.find() == job.run
    assert not is_ended(partial(job.connect, job.run))


@pytest.mark.parametrize("returns", [True, False])
def test_a_run_whose_machines_are_all_lost(returns: bool, job: Job) -> None:
    """It names none, and has begun. A machine that stays away for a while gives signs of life."""
    job.join(nobodys_address())
    job.journal.append(ev.MachineLost(machine="m.0", reason="gone"))
    with job.signs() if returns else nullcontext():
        assert (job.find() == job.run) == returns


def test_who_does_not_resume_closes_nothing(job: Job) -> None:
    job.join(nobodys_address())
    assert job.find("") == job.run


def test_several_machines_take_turns(job: Job) -> None:
    """Who sees that another one has given a sign gives none."""
    store = job.connect(job.run)
    first, second = LifeSigns(store), LifeSigns(job.connect(job.run))
    first.give()
    sign = store.get("sign-of-life")
    second.give()
    assert store.get("sign-of-life") == sign
    second.give()
    assert store.get("sign-of-life") != sign
