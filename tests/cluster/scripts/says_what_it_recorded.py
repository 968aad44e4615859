"""Any training, after which each worker writes how many recordings it ever began. ``SCRIPT`` names it."""

import atexit
import os
import runpy
import sys
from pathlib import Path

from swift_ft.observe.spans import recorder

SCRIPT = Path(os.environ["SCRIPT"])
BEGUN = Path(os.environ["SWIFT_TEST_FOLDER"]) / f"recordings{os.environ['RANK']}.txt"

atexit.register(lambda: BEGUN.write_text(str(recorder.begun)))
sys.argv[0] = str(SCRIPT)
runpy.run_path(str(SCRIPT), run_name="__main__")
