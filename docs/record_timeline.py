"""Draws the pictures of docs/timeline.md: ``python -m docs.record_timeline`` (needs Chromium).

Four machines train. One gets SIGKILL, and a spare replays it while others help; then two more, one right
after the other. ``swift-recover timeline`` reads the store of that real run, and a browser without a window
shows its report.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from examples.disturbed import Failure, train  # before torch: it sets how much torch logs

# isort: split
from PIL import Image

from swift_ft.cli.recover.main import main as swift_recover

PICTURES = Path(__file__).parent / "timeline"
FAILURE = Failure(checkpoint_every=10)
FAULTS = (
    "kill machine=1 iteration=18 point=forward microbatch=3; "
    "kill machine=2 iteration=33 point=backward microbatch=2; kill machine=3 iteration=33 point=forward"
)
ITERATIONS = 45

_COLOURS = 96
_LIGHT: tuple[str, ...] = ()
_DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")


def main() -> None:
    """Runs the training, and writes the pictures."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("there is no Chromium: apt-get install chromium")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="swift-timeline-") as name:
        folder = Path(name)
        train(FAILURE, ITERATIONS, folder / "run", inject=FAULTS)
        page, store = folder / "report.html", str(folder / "run" / "store")
        _check(swift_recover(["timeline", store, "--plot", str(page)]))
        _check(swift_recover(["timeline", store, "--plot", str(PICTURES / "gantt.png")]))
        _shrink(PICTURES / "gantt.png")
        _photograph(browser, page, PICTURES / "report.png", 1100, 1225, _LIGHT)
        _photograph(browser, page, PICTURES / "report-dark.png", 1100, 1225, _DARK)
        _photograph(browser, page, PICTURES / "report-narrow.png", 500, 1100, _LIGHT)
    for picture in sorted(PICTURES.glob("*.png")):
        print(f"{picture}: {picture.stat().st_size} bytes")


def _check(code: int) -> None:
    if code:
        raise SystemExit(f"swift-recover timeline ended with {code}")


def _photograph(
    browser: str, page: Path, picture: Path, width: int, height: int, options: tuple[str, ...]
) -> None:
    """What a window of that size shows."""
    with tempfile.TemporaryDirectory(prefix="swift-browser-") as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
        command += [f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        subprocess.run(
            [*command, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True, timeout=120
        )
    _shrink(picture)


def _shrink(picture: Path) -> None:
    """Use few colours, so that the file is small."""
    Image.open(picture).convert("RGB").quantize(_COLOURS).save(picture, optimize=True)


if __name__ == "__main__":
    main()
