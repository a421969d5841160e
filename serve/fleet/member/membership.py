"""Interface between a server and the group of servers that it belongs to; a server on its own belongs to none."""

from __future__ import annotations

from typing import Protocol

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.fleet.member.supervisor_link import SupervisorLink
from halfserve.serve.protocol.service import Service
from halfserve.serve.security.tls import ServerTls
from halfserve.serve.transports.listener import ConnectionLimit


class Membership(Protocol):
    """A server's membership in a group of servers that answer as one. Lives on the event loop."""

    def connections(self, most: float, reason: str) -> ConnectionLimit:
        """Create the limit of the server's connections; `reason` explains it in the log."""

    async def join(self, service: Service) -> None:
        """Have the service answer for all members; must be called before the server listens.

        Raises:
            FailedPreconditionError: there is not enough memory for this number of servers.
            BindError: the members' folder is not writable.
        """

    async def all_here(self) -> None:
        """Start accepting connections, and wait until the start may be reported; one of several servers reports for all."""

    def retire(self) -> None:
        """Stop accepting connections."""

    async def leave(self) -> None:
        """Leave the group; must be called after all requests are answered."""


class StandaloneMembership:
    """Membership of a server on its own."""

    def connections(self, most: float, reason: str) -> ConnectionLimit:
        return ConnectionLimit(most, reason)

    async def join(self, service: Service) -> None: ...
    async def all_here(self) -> None: ...
    def retire(self) -> None: ...
    async def leave(self) -> None: ...


def membership(link: SupervisorLink | None, core: InferenceCore, tls: ServerTls | None = None) -> Membership:
    """Membership of the server that `link` belongs to; without a link or a shared folder, the server is on its own.

    `tls` is the TLS of its ports.
    """
    if link is None or not link.given.folder:
        return StandaloneMembership()
    # Imported here, because they need modules that a server imports only when it is scraped, or that Windows lacks.
    if link.given.member:
        from halfserve.serve.fleet.member.cluster_member import ClusterMember  # noqa: PLC0415  (see above)

        return ClusterMember(link.given, core, tls)
    from halfserve.serve.fleet.member.process_member import ProcessMember  # noqa: PLC0415  (see above)

    return ProcessMember(link, core)
