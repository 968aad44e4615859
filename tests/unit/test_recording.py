"""The moving picture of the demo: frames in order, each for its own time and in its own colours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from rich.text import Text

from docs.record_demo import PICTURE, Frame, moving_picture

SVG = "{http://www.w3.org/2000/svg}"


def frames_of(picture: str) -> list[str]:
    """The text of each frame."""
    groups = [group for group in ET.fromstring(picture).iter(f"{SVG}g") if group.get("class") == "frame"]
    return [" ".join(text.text or "" for text in group.iter(f"{SVG}text")) for group in groups]


def test_frames_stand_for_their_own_time() -> None:
    frames = [
        Frame(10.0, Text("one")),
        Frame(11.0, Text("one")),
        Frame(13.0, Text("two")),
        Frame(15.0, Text("end")),
    ]
    picture = moving_picture(frames, "swift-run")
    shown = frames_of(picture)
    assert [word for text in shown for word in ("one", "two", "end") if word in text] == ["one", "two", "end"]
    begins = re.findall(r"([\d.]+)% \{ visibility: visible", picture)
    durations = {float(seconds) for seconds in re.findall(r"show-\d+ ([\d.]+)s", picture)}
    (total_s,) = durations
    assert [round(float(percent) * total_s / 100, 1) for percent in begins] == [0.0, 3.0, 5.0]
    assert total_s == 9.0  # the last frame stands for four seconds


def test_each_frame_keeps_its_colours() -> None:
    frames = [Frame(0.0, Text("a", style="red")), Frame(1.0, Text("b", style="green"))]
    picture = moving_picture(frames, "x")
    colours = dict(re.findall(r"\.(f\d+-r\d+) \{ fill: (#\w+)", picture))
    used = dict(re.findall(r'class="(f\d+-r\d+)"[^>]*>(a|b)<', picture))
    red, green = (colours[name] for name in sorted(used))
    assert red != green


def test_the_recorded_picture_shows_a_kill_and_a_replay() -> None:
    shown = frames_of(PICTURE.read_text())
    text = " ".join(shown).replace("\xa0", " ")
    for words in ("machine 1 is lost", "survivors keep their state", "worker 1 replays iterations 10 to 16"):
        assert words in text
    assert shown[-1].replace("\xa0", " ").count("finished") == 4
    assert "http" not in PICTURE.read_text().replace("http://www.w3.org/2000/svg", "").replace(
        "https://www.textualize.io", ""
    )
