"""The training of `examples/train_swift.py` in a script that begins with more than torch."""

import runpy
import sys
from pathlib import Path

import datasets  # noqa: F401  (it takes its time)
import transformers.trainer  # noqa: F401  (as above)

EXAMPLES = Path(__file__).parents[3] / "examples"

sys.path.insert(0, str(EXAMPLES))
runpy.run_path(str(EXAMPLES / "train_swift.py"), run_name="__main__")
