"""What the server asks of a transport."""

from __future__ import annotations

from typing import Protocol


class BindError(Exception):
    """The address cannot be listened on; the text says why and what to do."""


def address_of(host: str, port: int) -> str:
    """HOST:PORT as clients take it: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Transport(Protocol):
    """Carries the protocol's service over one listening address."""

    async def start(self) -> int:
        """Listen, and return the port (the free one that was found, where 0 was asked for).

        Raises:
            BindError: the address is in use, not this machine's, or not allowed.
        """

    async def give_notice(self) -> None:
        """Have clients take their next calls elsewhere, and serve those that are on their way; before `stop`, a moment long."""

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, give those in flight `grace_s` seconds to end, then close."""
