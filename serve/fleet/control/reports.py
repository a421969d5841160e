"""Messages between agents and the controller: an agent sends a report, and the answer contains its orders.

The controller keeps nothing that it cannot ask again: after a restart, it learns the members from their next reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from halfserve.serve.fleet.control.wanted import Order


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """State of a model at one member.

    Attributes:
        is_wanted: whether the member's wanted state has it loaded.
        is_changing: whether it is being loaded or unloaded.
        is_served: whether it answers requests.
        error: reason why its last load failed; "" if it did not.
        versions: numbers of the versions that it serves.
        requests, refusals: counts of answered and refused requests, over the versions that are served now.
        queue_ns, compute_ns: total queue time of requests, and total compute time of batches, of the same versions.
    """

    is_wanted: bool = False
    is_changing: bool = False
    is_served: bool = False
    error: str = ""
    versions: tuple[str, ...] = ()
    requests: int = 0
    refusals: int = 0
    queue_ns: int = 0
    compute_ns: int = 0


NOTHING = ModelReport()  # stands for a model that the member does not know


@dataclass(frozen=True, kw_only=True)
class CallAnswer:
    """Answer of a member to a call of the controller.

    Attributes:
        content: serialized answer.
        status: name of the gRPC status of a failure, such as NOT_FOUND; "" on success.
        error: reason of the failure.
    """

    content: bytes = b""
    status: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of an agent about its server.

    Attributes:
        member: id of the server process; a restarted server has a new id.
        group: name of the group of servers that share a wanted state.
        patterns: names, or patterns of names, of the models of the group.
        machine: name that distinguishes machines for users.
        grpc_address, http_address: HOST:PORT for clients; `http_address` may be "".
        is_draining: the server takes no new requests and is about to leave.
        models: all models that the group has, by name, and others that it serves.
        compute_slots: number of batches that can compute concurrently, to turn `compute_ns` into a fraction of time.
        taken: ids of the controller's calls that are being carried out.
        answers: answers to the controller's calls, by id; a report repeats them until it has been taken.
        has_ended: the server has ended; this is the agent's last report.
        directory_version: version of the directory that the server gives to clients.
        controller: the `Orders.controller` of the last orders; "" before the first.
    """

    member: str
    machine: str
    grpc_address: str
    group: str = ""
    patterns: tuple[str, ...] = ("*",)
    http_address: str = ""
    is_draining: bool = False
    models: Mapping[str, ModelReport] = field(default_factory=dict)
    compute_slots: int = 1
    taken: frozenset[str] = frozenset()
    answers: Mapping[str, CallAnswer] = field(default_factory=dict)
    has_ended: bool = False
    directory_version: int = 0
    controller: str = ""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Orders of the controller to one member.

    Attributes:
        controller: id of the controller process; a restarted controller has a new id.
        directory: serialized `cluster_pb2.Directory` for clients; None if the member has the current one.
        calls: calls that the member has not taken, each with the target that it changes; "" for a query.
        drain: take no new requests, and leave once the accepted ones are answered.
    """

    controller: str
    directory: bytes | None = None
    calls: Sequence[tuple[str, Order]] = ()
    drain: bool = False


class ControllerLink(Protocol):
    """An agent's connection to the controller, made by the launcher. Methods raise ConnectionError if it is unreachable."""

    async def exchange(self, report: Report) -> Orders:
        """Send a report and receive orders: at once if there are new ones, else within 4 * REPORT_S."""
        ...

    async def call(self, path: str, request: bytes) -> bytes:
        """Call a management method of the gRPC API for the whole cluster, by path, with serialized messages.

        Raises:
            InferenceError: the cluster refused the request, or could not carry it out.
        """
        ...


REPORT_S = 0.5  # an agent reports at least this often; with more than 100 members less often, as the controller answers later
LEASE_S = 2.0  # a member that has not reported for this long is removed from the directory
