"""The example training with a log in many small segments."""

import functools
import importlib
from typing import Any

import train_swift

settings: Any = importlib.import_module("swift_ft.runtime.settings")
settings.LogOptions = functools.partial(settings.LogOptions, segment_bytes=1 << 17)
train_swift.main()
