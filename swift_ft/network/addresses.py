"""At which addresses this host's servers listen, and under which one others find them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

_LOOPBACK = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "::1": "::1"}
_LINK_LOCAL = "fe80:"
"""Such an address means nothing without the name of an interface, which each host has its own of."""


def endpoint(host: str, port: int) -> str:
    """``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_endpoint(text: str) -> tuple[str, int]:
    """Host and port of what :func:`endpoint` gives, or of an IPv6 address without brackets.

    Raises:
        ValueError: it has no port.
    """
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def own_address(towards: str) -> str:
    """Under which address other hosts find this one, since they may not know its name.

    Args:
        towards: a host that all of them reach, such as that of the rendezvous store.

    Returns:
        The address that this host has on the way there. If it is that host itself and has only an address of
        its own for it, ``towards``. The name of this host where there is no way.
    """
    if towards in _LOOPBACK:
        return _LOOPBACK[towards]
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                own: str = probe.getsockname()[0]
                if ipaddress.ip_address(own.partition("%")[0]).is_loopback:
                    return towards
                if not own.startswith(_LINK_LOCAL):
                    return own
    return socket.getfqdn()


def is_this_host(host: str) -> bool:
    """Whether a name or an address is one of this host."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def create_server(address: str, port: int, *, backlog: int) -> socket.socket:
    """Listen at an address of :func:`listen_address`; at an empty one for IPv4 and IPv6 alike.

    Raises:
        OSError: it cannot listen there.
    """
    if not address and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel may have IPv6 switched off
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    return socket.create_server((address, port), family=family_of(address), backlog=backlog)


def listen_address(host: str) -> str:
    """The address on which a server listens that others reach at a host.

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
