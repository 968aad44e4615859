"""A replay without its job has the variables of the run, as far as the run's facts tell them."""

from __future__ import annotations

import pytest

from swift_ft.errors import UsageError
from swift_ft.launch.rendezvous.setup import environment_facts
from swift_ft.offline.replay import environment_of


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_CBWR", "WIDTH"):
        monkeypatch.delenv(name, raising=False)


def facts(*read: str, **env: str) -> tuple[str, ...]:
    """As a launcher notes them that had these variables."""
    found = environment_facts(read, env=env)
    return ("torch: 2.13.0", *(f"{name}: {value}" for name, value in found.items()))


def test_what_swift_run_sets_is_set() -> None:
    assert environment_of(facts(OMP_NUM_THREADS="1")) == {"OMP_NUM_THREADS": "1"}


def test_one_worker_on_a_host_has_all_threads() -> None:
    """Then swift-run sets nothing, and the user could not do as in the run otherwise."""
    assert environment_of(facts("WIDTH")) == {}


@pytest.mark.parametrize("setup", [(), ("torch: 2.13.0",)])
def test_a_run_that_tells_no_variables_refuses_none(
    setup: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal is not in the store."""
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert environment_of(setup) == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("run", "here", "line"),
    [
        ({"OMP_NUM_THREADS": "4"}, {}, "OMP_NUM_THREADS is 1 here and was 4 in the run"),
        ({"WIDTH": "8"}, {}, "WIDTH is not set here and was 8 in the run"),
        ({}, {"WIDTH": "8"}, "WIDTH is 8 here and was not set in the run"),
        ({}, {"MKL_CBWR": "AUTO"}, "MKL_CBWR is AUTO here and was not set in the run"),
    ],
)
def test_another_value_is_refused(
    run: dict[str, str], here: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=line):
        environment_of(facts("WIDTH", **run))
