"""A recovery runtime for distributed training with stock PyTorch."""

from swift_ft.determinism import deterministic
from swift_ft.session import Session, Step

__all__ = ["Session", "Step", "deterministic"]
