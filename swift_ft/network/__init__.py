"""Connections between members of a job: bounded frames, a secret that both sides prove, optional TLS."""

from swift_ft.network.channel import Channel
from swift_ft.network.client import connect
from swift_ft.network.errors import BadFrameError, RefusedError
from swift_ft.network.port import Handler, Port
from swift_ft.network.secret import JobSecret, held_secret, hold_secret
from swift_ft.network.tls import Certificates

__all__ = [
    "BadFrameError",
    "Certificates",
    "Channel",
    "Handler",
    "JobSecret",
    "Port",
    "RefusedError",
    "connect",
    "held_secret",
    "hold_secret",
]
