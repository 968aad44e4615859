"""Errors between two members of a job. Each is a ConnectionError, too: the connection is over."""

from __future__ import annotations

from swift_ft.errors import SwiftError


class BadFrameError(SwiftError, ConnectionError):
    """Bytes that no member of this job has sent, or not in this place."""


class RefusedError(SwiftError, ConnectionError):
    """The two sides do not belong to the same job, as far as they can prove it."""
