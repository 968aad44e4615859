"""The example, and which modules this process had before it began: a line in `imported.txt` for each life."""

import os
import runpy
import sys
from pathlib import Path

MODULES = ("wave", "xml.dom.minidom", "turtledemo")

rank, folder = os.environ["RANK"], Path(sys.argv[sys.argv.index("--store") + 1]).parent
with (folder / "imported.txt").open("a") as file:
    print(rank, *(module for module in MODULES if module in sys.modules), file=file)
runpy.run_path(str(Path(__file__).parents[3] / "examples" / "train_swift.py"), run_name="__main__")
