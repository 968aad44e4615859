"""The detection's timings stand in one table, and the pages quote it."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from docs.house import MODULES, PACKAGE, ROOT
from docs.reference import detection_timings_table
from swift_ft.config import detection_timings as timings
from swift_ft.config.option import flag_of
from swift_ft.config.run_config import RunConfig
from swift_ft.recovery.job_state import MAX_PATIENCE

TABLE = {timing.name: timing for timing in detection_timings_table()}
DETECTS = ("launch.detection", "coordination.relay.upstream", "coordination.relay.worker_journal")


def constants_of(module: str) -> list[str]:
    """Names that a file gives at its top."""
    body = ast.parse(MODULES[module].read_text()).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def test_each_timing_says_why_and_is_read_somewhere() -> None:
    assert TABLE.keys() == {name for name in vars(timings) if name.isupper()}
    assert not [name for name, timing in TABLE.items() if len(timing.words.split()) < 8]
    read = " ".join((PACKAGE / "config" / "detection_timings.py").read_text().split())
    unused = [name for name, timing in TABLE.items() if not timing.users and f"* {name}" not in read]
    assert not unused


def test_what_detects_has_no_timing_of_its_own() -> None:
    rooms = [module for module in MODULES if module.startswith(DETECTS)]
    assert len(rooms) > len(DETECTS)
    own = {module: [n for n in constants_of(module) if n.endswith(("_S", "_MS"))] for module in rooms}
    assert not {module: names for module, names in own.items() if names}


def test_no_two_timings_have_one_name() -> None:
    public = Counter(
        name for module in MODULES for name in constants_of(module) if re.fullmatch(r"[A-Z]\w*_(S|MS)", name)
    )
    assert not [name for name, times in public.items() if times > 1]


SILENCE_S = timings.MACHINE_SILENCE_S
WORDS = {0.1: "a tenth of a second", 1.0: "a second", 10.0: "ten seconds", 600.0: "ten minutes"}
QUOTES = [
    ("reliability.md", f"lost after {WORDS[SILENCE_S]} of silence (`--machine-silence`)"),
    (
        "reliability.md",
        f"every {timings.STORE_NOTICE_S / 4:g} s. After {WORDS[timings.STORE_NOTICE_S]} without",
    ),
    ("reliability.md", f"one that is silent for {timings.STORE_CONNECTION_SILENCE_S:g} s is given up"),
    ("reliability.md", f"connected for {WORDS[timings.STORE_ENDED_ALONE_S]}, if the run has ended"),
    ("reliability.md", f"for {WORDS[timings.STORE_ALONE_S]} if it has not"),
    ("reliability.md", f"up to {MAX_PATIENCE and 'eight'} times what the flag says"),
    ("how-to/kubernetes.md", f"within `--machine-silence` ({WORDS[SILENCE_S]})"),
    ("faq.md", f"`--machine-silence` ({SILENCE_S:g} s)"),
    ("faq.md", f"`--heartbeat-timeout` ({timings.HEARTBEAT_TIMEOUT_S:g} s)"),
    ("decisions/0077-awake-clock.md", f"reports at {SILENCE_S * timings.SILENCE_SHARES[0]:g} s"),
    ("decisions/0077-awake-clock.md", f"heartbeats each {SILENCE_S / timings.BEATS:g} s"),
    ("decisions/0078-reports-count-on.md", f"is given {WORDS[timings.SETTLES_S]} to last"),
]


@pytest.mark.parametrize(("page", "words"), QUOTES)
def test_the_pages_quote_the_table(page: str, words: str) -> None:
    assert words in " ".join((ROOT / "docs" / page).read_text().split())


def test_the_page_of_timeouts_quotes_their_defaults() -> None:
    config = RunConfig()
    rows = re.findall(r"^\| `(--[\w-]+)` \| ([\d.]+) s \|", (ROOT / "docs" / "faq.md").read_text(), re.M)
    defaults = {flag_of(name): getattr(config, name) for name in config.__slots__}
    assert len(rows) > 5
    assert {flag: float(seconds) for flag, seconds in rows} == {flag: defaults[flag] for flag, _ in rows}
