"""Where launchers get the job's secret from, and how machines with another one are told apart."""

from __future__ import annotations

import pytest

from swift_ft.config.run_config import RunConfig
from swift_ft.coordination.store_client import connect
from swift_ft.launch.rendezvous.job_secret import agreed_secret, given_secret
from swift_ft.launch.rendezvous.setup import setup_of
from swift_ft.network import JobSecret
from swift_ft.recovery.events import JobOpened
from tests.support.store_processes import store_process


def test_launchers_without_a_token_agree_on_a_secret_and_warn(caplog: pytest.LogCaptureFixture) -> None:
    with store_process() as service:
        agreed = [agreed_secret(connect(service.address, run), RunConfig()) for run in ("a", "a", "b")]
    assert agreed[0] == agreed[1] != agreed[2]
    warnings = [record for record in caplog.records if getattr(record, "event", "") == "no_token"]
    assert len(warnings) == 3
    assert "--token-file" in warnings[0].getMessage()


def test_the_variable_gives_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWIFT_FT_TOKEN", raising=False)
    assert given_secret(RunConfig()) is None
    monkeypatch.setenv("SWIFT_FT_TOKEN", "0123456789abcdef")
    assert given_secret(RunConfig()) == JobSecret.of_token("0123456789abcdef")


def test_a_machine_with_another_secret_differs_and_the_facts_tell_nothing_about_it() -> None:
    one, same, other = (JobSecret.of_token(token) for token in ("a" * 16, "a" * 16, "b" * 16))
    facts = [
        setup_of(JobOpened(machines=2), RunConfig(), "script", "train.py", secret)
        for secret in (one, same, other)
    ]
    assert facts[0] == facts[1]
    (mine, theirs), *rest = [pair for pair in zip(facts[0], facts[2], strict=True) if pair[0] != pair[1]]
    assert rest == []
    assert mine.startswith("the job's secret (--token-file): ")
    assert mine.rpartition(" ")[2] not in one.key.hex()
    assert theirs != mine
