"""``swift-recover timeline``: tables, JSON, pictures and pages, and what bad input gets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from swift_ft.cli.recover.main import main
from swift_ft.cli.timeline.chart import run_chart, ticks
from swift_ft.cli.timeline.picture import COLOURS
from swift_ft.offline.run_store import open_run_store
from swift_ft.offline.timeline import run_timeline
from swift_ft.recovery import events as ev
from swift_ft.recovery.occupancy import Doing
from swift_ft.storage.store import Store
from tests.support.journals import ENDED, RECOVERED, RUN, machine, opening, store_with, work_of_recovered
from tests.support.stored_run import change_record

EVIL = '<script>alert("1")</script>&$run'
PAGE = Path(__file__).parents[4] / "swift_ft" / "cli" / "timeline" / "page.html"
_VOID = {"meta", "link", "br", "img", "hr", "input"}


class Checker(HTMLParser):
    """Collects what a page consists of, and whether its tags match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


def read_page(path: Path) -> Checker:
    checker = Checker()
    checker.feed(path.read_text(encoding="utf-8"))
    checker.close()
    assert checker.open == []
    return checker


@pytest.fixture
def store(tmp_path: Path) -> Path:
    work_of_recovered(store_with(str(tmp_path / "store"), [*RECOVERED, *ENDED], machines=2))
    return tmp_path / "store"


def test_tables(store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    before = Store(store).find("")
    assert main(["timeline", str(store)]) == 0
    assert Store(store).find("") == before
    out = capsys.readouterr().out
    assert "goodput: 22.4 %" in out
    rows = [
        [cell.strip() for cell in line.strip("│ ").split("│")] for line in out.splitlines() if "│" in line
    ]
    assert ["starting", "5.75 s", "33.8 %"] in rows
    assert ["1", "machine 1 lost, replay", "4", "4.50 s", "agreeing 2.00 s"] in [row[:5] for row in rows]
    assert ["machine 1", "m-2.0", "9.00 s", "17.0 s", "", "stage 1, replayed for 2.00 s"] in rows
    assert ["spare", "m-2.0", "3.00 s", "9.00 s", "took slot 1", "nothing: it waited"] in rows
    assert ["1", "at least 3", "4 in 1.50 s", "0", "500 B", "0.000 s", "0.000 s", "5"] in rows


def test_json(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(store), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found == json.loads(json.dumps(run_timeline(open_run_store(str(store))).to_dict()))
    assert (found["run_id"], found["phase"], found["ok"]) == (RUN, "ended", True)
    lost = {one["cause"]: one["seconds"] for one in found["goodput"]["lost"]}
    assert lost["rebuilding"] == 2.0
    assert [span["doing"] for span in found["occupancy"]["workers"] if span["rank"] == 1] == [
        *("starts", "starts", "joins", "trains", "starts", "waits", "replays", "joins", "trains", "done")
    ]
    assert found["recoveries"][0]["seconds"] == {"agreeing": 2.0, "rebuilding": 2.0, "regrouping": 0.5}


def test_a_page_needs_nothing_else(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["timeline", str(store), "--plot", str(out)]) == 0
    page = read_page(out)
    assert out.stat().st_size < 60_000
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "href", "onclick", "onload"} & {name for name, _ in page.attributes}
    assert not re.search(r"url\(|@import|https?:", out.read_text())
    assert page.tags.count("svg") == 2  # the run, and its recovery
    for words in (
        *(
            "22.4 %",
            "Recovery 1: machine 1 lost, its state was rebuilt from a checkpoint and logs, 4.50 s",
            "its agent's connection ended",
        ),
        *(
            "time since the run began",
            "time since the loss was detected",
            "the checkpoint of iteration 0 is committed",
        ),
        "worker 1 loads and replays: 2.00 s (m-2.0, generation 2)",
    ):
        assert words in page.text
    assert [path.name for path in tmp_path.iterdir() if path.name != "store"] == ["report.html"]


def test_everything_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of runs and machines, reasons and setups come from users, hosts and exceptions."""

    def evil(event: ev.Event) -> ev.Event:
        changes: dict[str, Any] = {}
        if getattr(event, "machine", "") == machine(1):
            changes["machine"] = EVIL
        if hasattr(event, "reason"):
            changes["reason"] = EVIL
        if isinstance(event, ev.StatusReported):
            changes |= {"holds": (EVIL,) * (event.rank + 1), "stages": ()}
        return replace(event, **changes)

    folder = tmp_path / "store"
    events = [evil(event) for event in RECOVERED]
    work_of_recovered(store_with(str(folder), [*events, ev.JobClosed(reason=EVIL)], machines=2))
    change_record(folder, earlier=["job.<b>0"])
    out = tmp_path / "report.html"
    assert main(["timeline", str(folder), "--plot", str(out)]) == 0
    page, text = read_page(out), out.read_text()
    assert "script" not in page.tags
    assert "alert(" in page.text
    assert EVIL in page.text  # nothing is lost, and a dollar sign is only that
    assert "<script" not in text
    assert main(["timeline", str(folder), "--plot", str(tmp_path / "picture.png")]) == 0
    assert EVIL in capsys.readouterr().out


def test_a_picture(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.png"
    assert main(["timeline", str(store), "--plot", str(out)]) == 0
    pixels = image.imread(out)[:, :, :3]
    shown = {tuple(colour) for colour in (pixels.reshape(-1, 3) * 255).round().astype(int).tolist()}
    expected = {Doing.TRAINS, Doing.WAITS, Doing.REPLAYS, Doing.STARTS, Doing.JOINS, Doing.DONE}
    for doing in set(Doing) - {Doing.ABSENT}:  # the line of a loss has its colour
        rgb = tuple(bytes.fromhex(COLOURS[doing][1:]))
        assert (rgb in shown) == (doing in expected), doing


@pytest.mark.parametrize("suffix", ["svg", "pdf"])
def test_other_pictures(suffix: str, store: Path, tmp_path: Path) -> None:
    out = tmp_path / f"run.{suffix}"
    assert main(["timeline", str(store), "--plot", str(out)]) == 0
    assert out.read_bytes()[:5] in (b"<?xml", b"%PDF-")


def test_what_is_unknown_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_with(str(tmp_path / "store"), RECOVERED, machines=2)  # nobody noted anything, and it goes on
    out = tmp_path / "report.html"
    assert main(["timeline", str(tmp_path / "store"), "--plot", str(out)]) == 0
    text = read_page(out).text
    assert "at most" in text
    assert "no end of this run is archived" in text
    assert "No end is known: live at the last sign of life" in text
    assert "not known: in generations 1, 2, when steps began" in capsys.readouterr().out


def test_a_run_without_a_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_with(str(tmp_path / "store"), [], machines=2)
    out = tmp_path / "report.html"
    assert main(["timeline", str(tmp_path / "store"), "--plot", str(out)]) == 1
    assert "the journal of this run is not archived" in read_page(out).text
    assert "problem: the journal of this run is not archived" in capsys.readouterr().out
    assert main(["timeline", str(tmp_path / "store"), "--plot", str(tmp_path / "a.png")]) == 2
    assert "can be drawn" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_a_large_run_shows_what_is_unusual(tmp_path: Path) -> None:
    events = [*opening(200, spares=1)]
    events.append(ev.MachineLost(machine=machine(150), reason="gone"))
    store_with(str(tmp_path), events, machines=200)
    chart = run_chart(run_timeline(open_run_store(str(tmp_path))))
    assert chart is not None
    assert len(chart.rows) == 48
    assert chart.left_out == 152


@pytest.mark.parametrize(
    ("begin", "end", "labels"),
    [
        (-0.1, 0.7, "-0.1 s, 0.0 s, 0.1 s, 0.2 s, 0.3 s, 0.4 s, 0.5 s, 0.6 s, 0.7 s"),
        (0, 17, "0 s, 5 s, 10 s, 15 s"),
        (0, 1500, "0 min, 5 min, 10 min, 15 min, 20 min, 25 min"),
        (0, 3 * 86400, "0 h, 12 h, 24 h, 36 h, 48 h, 60 h, 72 h"),
        (0, 40 * 86400, "0 d, 5 d, 10 d, 15 d, 20 d, 25 d, 30 d, 35 d, 40 d"),
        (5, 5, "0 s"),
    ],
)
def test_ticks_are_round(begin: float, end: float, labels: str) -> None:
    assert ", ".join(label for _, label in ticks(begin, end)) == labels


def test_bad_input(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign, newer = tmp_path / "foreign", tmp_path / "newer"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    shutil.copytree(store, newer)
    change_record(newer, format=99)
    for arguments, words in (
        ([str(tmp_path / "nothing")], "does not exist or is empty"),
        ([str(foreign)], "holds no run of swift_ft"),
        ([str(newer)], "A newer version of swift_ft wrote"),
        ([str(store), "--run", "job.9"], f"holds no run job.9: it has job.0-ffffffff, {RUN}"),
        ([str(store), "--plot", str(tmp_path / "report.txt")], "a name that ends in .html, .png, .svg, .pdf"),
        ([str(store), "--plot", str(tmp_path / "nowhere" / "a.html")], "cannot be written"),
        ([str(store), "--plot", str(tmp_path / "nowhere" / "a.png")], "cannot be written"),
        ([], "STORE"),
    ):
        assert main(["timeline", *arguments]) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert words in line
        assert captured.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "newer", "store"]


def test_colours_are_the_same_everywhere() -> None:
    light = PAGE.read_text().split("@media")[0]
    found = dict(re.findall(r"--(\w+): (#\w{6});", light))
    assert {doing.value: found[doing.value] for doing in Doing} == {d.value: c for d, c in COLOURS.items()}


@pytest.mark.parametrize("verb", ["timeline", "status", "export"])
def test_progress_is_shown_on_a_terminal_only(
    verb: str,
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def words(folder: Path) -> str:
        out = ["--out", str(folder / "bundle.tar.gz")] if verb == "export" else []
        assert main([verb, str(store), *out]) == 0
        return capsys.readouterr().err

    assert words(tmp_path) == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    (tmp_path / "again").mkdir()
    assert "reading the run: " in words(tmp_path / "again")


def chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    return found


@pytest.mark.parametrize(
    ("dark", "width", "height"), [(False, 1160, 1800), (True, 1160, 1800), (False, 500, 2600)]
)
def test_in_a_browser(dark: bool, width: int, height: int, store: Path, tmp_path: Path) -> None:
    browser, page, picture = chromium(), tmp_path / "report.html", tmp_path / "seen.png"
    assert main(["timeline", str(store), "--plot", str(page)]) == 0
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},{height}"]
    command += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    subprocess.run(
        [*command, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=120
    )
    pixels = (image.imread(picture)[:, :, :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (height, width)
    assert pixels[2, 2].tolist() == ([0x16, 0x18, 0x1C] if dark else [0xFB, 0xFA, 0xF7])
    shown = {tuple(colour) for colour in pixels.reshape(-1, 3).tolist()}
    for name in ("trains", "replays", "joins"):
        light, night = re.findall(rf"--{name}: #(\w{{6}});", PAGE.read_text())
        rgb = tuple(bytes.fromhex(night if dark else light))
        assert rgb in shown, name
