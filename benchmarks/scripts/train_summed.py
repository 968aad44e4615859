"""The example training where each helper adds its gradients up before it sends them."""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_swift

import swift_ft

swift_ft.Session.attach_pipeline = functools.partialmethod(  # type: ignore[assignment]
    swift_ft.Session.attach_pipeline, mode="allreduce"
)
train_swift.main()
