"""Chooses the membership of a server in a group of servers that answer as one."""

from __future__ import annotations

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.fleet.member.supervisor_link import Membership, SupervisorLink


def membership(link: SupervisorLink | None, core: InferenceCore) -> Membership:
    """Membership of the server that `link` belongs to; without a link or a shared folder, the server is on its own."""
    if link is None or not link.given.folder:
        return Membership()
    # Imported here, because they need modules that a server imports only when it is scraped, or that Windows lacks.
    if link.given.member:
        from halfserve.serve.fleet.member.cluster_member import ClusterMember  # noqa: PLC0415  (see above)

        return ClusterMember(link.given, core)
    from halfserve.serve.fleet.member.process_member import ProcessMember  # noqa: PLC0415  (see above)

    return ProcessMember(link, core)
