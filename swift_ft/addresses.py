"""At which addresses of this host its servers listen."""

from __future__ import annotations

import ipaddress
import socket

__all__ = ["family_of", "listen_address"]


def listen_address(host: str) -> str:
    """Where a server listens that others reach at a host.

    A machine often resolves its own name to the loopback address, so a name stands for all addresses. So does
    an address that none of its interfaces has, because a router translates it.

    Args:
        host: a name or an address, at which others reach this host.

    Returns:
        The address; empty for all of them.
    """
    if host == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    return "" if address.is_unspecified or not _is_local(host) else host


def _is_local(address: str) -> bool:
    try:
        socket.create_server((address, 0), family=family_of(address)).close()
    except OSError:
        return False
    return True


def family_of(address: str) -> socket.AddressFamily:
    """Of what kind an address is; IPv4 for an empty one."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
