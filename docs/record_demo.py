"""Records the demo as a moving picture: ``python -m docs.record_demo`` writes ``docs/demo.svg``.

Four machines train, one gets SIGKILL, and the live view of that real run is drawn again and again. The
picture shows each drawing for as long as it stood, so it plays at the run's own speed. It is one SVG file
with CSS and without a script.
"""

from __future__ import annotations

import io
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.disturbed import Failure, swift  # before torch: it sets how much torch logs

# isort: split
from rich.console import Console, Group, RenderableType
from rich.text import Text

from swift_ft.cli.live import render
from swift_ft.cli.watch import Watch

PICTURE = Path(__file__).parent / "demo.svg"
FAILURE = Failure(kill_iteration=17, checkpoint_every=10)
ITERATIONS = 24

_WIDTH = 132
_EVERY_S = 0.75
_SCREEN = "screen"
_LAST_S = 4.0
"""How long the end stands before the picture begins again."""


@dataclass(frozen=True)
class Frame:
    """One drawing of the view.

    Attributes:
        at: seconds since the recording began.
        drawing: what was drawn.
    """

    at: float
    drawing: RenderableType


def record(failure: Failure, iterations: int) -> list[Frame]:
    """Runs the training with the failure; returns what its live view showed."""
    frames: list[Frame] = []

    def watching(watch: Watch, running: Callable[[], bool]) -> None:
        began = time.monotonic()
        while running():
            watch.poll()
            now = time.monotonic() - began
            if watch.view.state.generation and (not frames or now - frames[-1].at >= _EVERY_S):
                frames.append(Frame(now, render(watch.view, time.time())))
            time.sleep(0.01)
        watch.poll()
        frames.append(Frame(time.monotonic() - began, render(watch.view, time.time())))

    with tempfile.TemporaryDirectory(prefix="swift-demo-") as folder:
        swift(failure, iterations, Path(folder) / "run", show=watching)
    return frames


def moving_picture(frames: Sequence[Frame], command: str) -> str:
    """One SVG that shows the frames one after the other, for ever.

    Args:
        frames: in order of time, at least one.
        command: what was typed, as the first line of each.
    """
    command_line = Text(f"$ {command}", style="bold")
    drawings = [Group(command_line, Text(), frame.drawing) for frame in frames]
    height = max(len(_recorder().render_lines(drawing)) for drawing in drawings)
    screens = [_screen(drawing) for drawing in drawings]
    shown = [i for i, screen in enumerate(screens) if i == 0 or screen != screens[i - 1]]
    ends = [frames[i].at for i in shown[1:]] + [frames[-1].at + _LAST_S]
    total_s = ends[-1] - frames[0].at
    styles, groups, begin = ["<style>.frame { visibility: hidden; }"], [], frames[0].at
    for number, (i, end) in enumerate(zip(shown, ends, strict=True)):
        first, last = (100 * (at - frames[0].at) / total_s for at in (begin, end))
        styles.append(_visible_between(number, first, last, total_s))
        own = screens[i].replace(_SCREEN, f"f{number}")  # colours are numbered in each frame anew
        groups.append(f'<g class="frame" id="frame-{number}">{own}</g>')
        begin = end
    terminal = _terminal(height)
    inside = terminal.rindex("</g>\n</svg>")
    return terminal[:inside] + "\n".join([*styles, "</style>", *groups]) + terminal[inside:] + "\n"


def _visible_between(number: int, first: float, last: float, total_s: float) -> str:
    """A style that shows a frame from one percentage of the whole to another."""
    steps = f"{first:.3f}% {{ visibility: visible; }} {last:.3f}%, 100% {{ visibility: hidden; }}"
    before = "" if first == 0 else "0% { visibility: hidden; } "
    return (
        f"@keyframes show-{number} {{ {before}{steps} }}\n"
        f"#frame-{number} {{ animation: show-{number} {total_s:.2f}s step-end infinite; }}"
    )


def _terminal(height: int) -> str:
    """An empty terminal with that many lines, as SVG."""
    console = _recorder()
    for _ in range(height):
        console.print()
    svg = console.export_svg(title="swift_ft", unique_id="demo")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # the picture makes no requests


def _screen(drawing: RenderableType) -> str:
    """What stands in the terminal, as a part of an SVG with its own colours."""
    console = _recorder()
    for line in console.render_lines(drawing, pad=False):
        console.print(Text.assemble(*((part.text, part.style or "") for part in line)), no_wrap=True)
    parts = '<style>{styles}</style>{backgrounds}<g class="demo-matrix">{matrix}</g>'
    return re.sub(r' clip-path="[^"]*"', "", console.export_svg(unique_id=_SCREEN, code_format=parts))


def _recorder() -> Console:
    return Console(
        file=io.StringIO(), record=True, width=_WIDTH, force_terminal=True, color_system="truecolor"
    )


def main() -> None:
    """Records, and writes the picture."""
    command = f'swift-run --standalone --machines 4 --spares 1 --inject "{FAILURE.fault}" train_swift.py'
    frames = record(FAILURE, ITERATIONS)
    PICTURE.write_text(moving_picture(frames, command))
    print(f"{PICTURE}: {len(frames)} frames, {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
