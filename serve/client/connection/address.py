"""Whom to ask: one server, several replicas, or a socket file."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from serve.client.checks import check_text
from serve.client.errors import InvalidRequest

Balancing = Literal["pick_first", "round_robin"]
BALANCINGS = ("pick_first", "round_robin")
UNIX = "unix:"


@dataclass(frozen=True)
class Target:
    """What gRPC connects to.

    Attributes:
        uri: in gRPC's notation.
        shown: for error texts.
        is_local: whether nothing that is said leaves this machine.
    """

    uri: str
    shown: str
    is_local: bool


def checked_balancing(balancing: Balancing) -> Balancing:
    """The choice as it is, if it is one.

    Raises:
        InvalidRequest: it is anything else.
    """
    if balancing not in BALANCINGS:
        raise InvalidRequest(f"balancing must be one of {', '.join(BALANCINGS)}, not {balancing!r}")
    return balancing


def target_of(address: str | Sequence[str]) -> Target:
    """The target for HOST:PORT, "unix:/path" or a sequence of IP:PORT.

    A name may stand for several replicas (a headless service): its addresses are found by DNS. A sequence lists replicas
    itself; gRPC takes only IP addresses there.

    Raises:
        InvalidRequest: an address has a scheme, or no host, or no port between 1 and 65535, or is not UTF-8, or is IPv6 without
            brackets; or names stand in a sequence.
    """
    for one in [address] if isinstance(address, str) else address:
        check_text(one, "the address")
    if isinstance(address, str):
        if address.startswith(UNIX):
            return Target(address, address, is_local=True)
        host, _ = _split(address)
        return Target(address, address, is_local=_is_loopback(host))
    if not address:
        raise InvalidRequest("the addresses must be HOST:PORT, at least one of them, not an empty sequence")
    if len(address) == 1:
        return target_of(address[0])
    parts = [_split(one) for one in address]
    resolved = [_as_ip(host, port, one) for (host, port), one in zip(parts, address, strict=True)]
    versions = {ip.version for ip, _ in resolved}
    if len(versions) > 1:
        raise InvalidRequest(f"the addresses must be all IPv4 or all IPv6, not both: {', '.join(address)}")
    if versions == {4}:
        uri = "ipv4:" + ",".join(f"{ip}:{port}" for ip, port in resolved)
    else:
        uri = "ipv6:" + ",".join(f"[{ip}]:{port}" for ip, port in resolved)
    return Target(uri, ", ".join(address), is_local=all(ip.is_loopback for ip, _ in resolved))


def _split(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not (port.isdecimal() and port.isascii()) or not 0 < int(port) < 2**16:
        raise InvalidRequest(f"the address must be HOST:PORT, such as 127.0.0.1:8001, not {address!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise InvalidRequest(f"an IPv6 address stands in brackets, such as [::1]:8001, not {address!r}")
    return host, port


def _as_ip(host: str, port: str, address: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    name = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        return ipaddress.ip_address(name), port
    except ValueError:
        raise InvalidRequest(
            f"{address!r} among several addresses must be IP:PORT; or give one name that DNS resolves to all of them"
        ) from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
