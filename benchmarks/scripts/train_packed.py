"""The example training with every message packed before it is written."""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_swift

import swift_ft

swift_ft.Session = functools.partial(swift_ft.Session, compress="always")  # type: ignore[misc]
train_swift.main()
