"""What a server needs of the members that it is one of; a server that serves alone needs nothing."""

from __future__ import annotations

from typing import Protocol

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.protocol.service import Service
from halfserve.serve.security.tls import ServerTls
from halfserve.serve.supervisor.launch import SupervisorLink
from halfserve.serve.transports.listener import ConnectionLimit


class Membership(Protocol):
    """A server's place among others. Lives on the event loop."""

    def connections(self, most: float, reason: str) -> ConnectionLimit:
        """The limit of the server's connections, and why, for the log."""

    async def join(self, service: Service) -> None:
        """Have the service answer for all; to be called before the server listens.

        Raises:
            FailedPreconditionError: there is no memory for so many servers.
            BindError: the folder of all members cannot be written to.
        """

    async def all_here(self) -> None:
        """The server accepts connections. Wait until it is time to report that: of several servers, one reports for all."""

    def retire(self) -> None:
        """Accept no more connections."""

    async def leave(self) -> None:
        """Be no member any more; to be called when all requests are answered."""


class Alone:
    """The membership of a server that serves alone."""

    def connections(self, most: float, reason: str) -> ConnectionLimit:
        return ConnectionLimit(most, reason)

    async def join(self, service: Service) -> None: ...
    async def all_here(self) -> None: ...
    def retire(self) -> None: ...
    async def leave(self) -> None: ...


def membership(link: SupervisorLink | None, core: InferenceCore, tls: ServerTls | None = None) -> Membership:
    """The place of the server that this link is of; without a link, or a folder to share, it serves alone.

    `tls`: of its ports.
    """
    if link is None or not link.given.folder:
        return Alone()
    # Imported here: they need what a server imports only when it is scraped, and what Windows does not have.
    if link.given.member:
        from halfserve.serve.members.cluster_member import ClusterMember  # noqa: PLC0415  (see above)

        return ClusterMember(link.given, core, tls)
    from halfserve.serve.members.member import Member  # noqa: PLC0415  (see above)

    return Member(link, core)
