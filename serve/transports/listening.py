"""Open the sockets that a server listens on. Light: the supervisor's process imports it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from halfserve.serve.security.private_socket import private_socket

# Errors of an address family that the system lacks, such as IPv6 in a container.
NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
BACKLOG = 1024  # connections waiting for accept


class BindError(Exception):
    """The server cannot listen on the address; the text gives the reason and a remedy."""


def address_of(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Address(NamedTuple):
    """Where to listen."""

    host: str  # a name or address of this machine
    port: int  # 0 finds a free one
    option: str  # names the port in the text of a BindError
    path: Path | None = None  # Unix socket, in place of host and port
    is_shared: bool = False  # other servers of this user may listen there too, and the system deals out connections


def listen(address: Address) -> list[socket.socket]:
    """Open listening sockets, one per address of the host name, all on the same port.

    Raises:
        BindError: the address is in use, not this machine's, or not allowed.
    """
    where = address_of(address.host, address.port) if address.path is None else str(address.path)
    hint = "path" if address.path is not None else "(0 finds a free one) or --host"
    opened: list[socket.socket] = []
    try:
        if address.path is None:
            _bind(address, opened)
        else:
            opened.append(private_socket(address.path))
        for one in opened:
            one.listen(BACKLOG)
            one.setblocking(False)
    except (OSError, OverflowError, UnicodeError) as error:
        close(opened)
        number = getattr(error, "errno", None) or 0
        # Resolver errors have negative numbers.
        reason = os.strerror(number) if number > 0 else str(getattr(error, "strerror", None) or error)
        raise BindError(f"cannot listen on {where}: {reason}; choose another {address.option} {hint}") from None
    return opened


def close(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _bind(address: Address, opened: list[socket.socket]) -> None:
    """Bind to every address of the host that this machine has. Sockets are appended to `opened`, even before a failure."""
    port = address.port
    found = socket.getaddrinfo(address.host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    missing: OSError | None = None
    for family, _, _, _, where in dict.fromkeys(found):
        try:
            opened.append(_bound(family, (where[0], port, *where[2:]), is_shared=address.is_shared))
        except OSError as error:
            if error.errno not in NOT_HERE:
                raise
            missing = error
        else:
            port = port or int(opened[0].getsockname()[1])  # other addresses use the same port
    if missing is not None and not opened:
        raise missing


def _bound(family: socket.AddressFamily, where: tuple[Any, ...], *, is_shared: bool) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has its own socket
        one.bind(where)
    except BaseException:
        one.close()
        raise
    return one
