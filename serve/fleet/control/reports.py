"""Messages between agents and the controller: an agent sends a report, and the answer contains its orders.

The controller keeps nothing on disk. It gives the state that must survive it to the agents (`Orders.memory`), and a new
controller adopts the newest state that they report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """State of a model at one member.

    Attributes:
        generation: generation of the last load order that was carried out or failed; 0 for none.
        is_served: whether it answers requests.
        error: reason why that order failed; "" if it did not.
        status: name of the gRPC status of that failure, such as NOT_FOUND; "" if it did not fail.
        versions: numbers of the versions that it serves.
        size: approximate memory in bytes; 0 if unknown.
        requests, rows, failures, refusals: counts since the member's start; `requests` counts successful ones.
        queue_ns, compute_ns: total queue time of requests, and total compute time of batches, since the member's start.
    """

    generation: int = 0
    is_served: bool = False
    error: str = ""
    status: str = ""
    versions: tuple[str, ...] = ()
    size: int = 0
    requests: int = 0
    rows: int = 0
    failures: int = 0
    refusals: int = 0
    queue_ns: int = 0
    compute_ns: int = 0


NOTHING = ModelReport()  # stands for a model that the member does not know


@dataclass(frozen=True, kw_only=True)
class Report:
    """Report of an agent about its server.

    Attributes:
        member: id of the server process; a restarted server has a new id.
        machine: name that distinguishes machines, for placement and users.
        grpc_address, http_address: HOST:PORT for clients; `http_address` may be "".
        is_draining: the server takes no new requests and is about to leave.
        models: all models of the repository, by name, whether served or not.
        compute_slots: number of batches that can compute concurrently, to turn `compute_ns` into a fraction of time.
        memory_size: memory for models in bytes; 0 if unknown.
        counters: `MemberCounters.to_bytes()` of the server, if the last orders asked for it or the server has ended; else None.
        counters_number: the `Orders.counters_number` that the counters answer.
        has_ended: the server has ended; the counters are its last ones, and this is the agent's last report.
        left: counters of servers on this machine that ended without a last report, by member.
        directory_version: version of the directory that the server gives to clients.
        settings_number: number of the settings that the server has applied.
        controller: the `Orders.controller` of the last orders; "" before the first.
        memory: the newest `Orders.memory`, in the first report to a new controller; else None.
    """

    member: str
    machine: str
    grpc_address: str
    http_address: str = ""
    is_draining: bool = False
    models: Mapping[str, ModelReport] = field(default_factory=dict)
    compute_slots: int = 1
    memory_size: int = 0
    counters: bytes | None = None
    counters_number: int = 0
    has_ended: bool = False
    left: Mapping[str, bytes] = field(default_factory=dict)
    directory_version: int = 0
    settings_number: int = 0
    controller: str = ""
    memory: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class ModelOrder:
    """Order to serve a model.

    Attributes:
        generation: increases with each order; the agent loads or reloads the model when it changes.
        request: serialized RepositoryModelLoadRequest, with a configuration or files where the user gave them; empty if the
            member has reported this generation already.
    """

    generation: int
    request: bytes


@dataclass(frozen=True, kw_only=True)
class SettingsChanges:
    """Changes of log and trace settings that a member has not applied.

    Attributes:
        number: number of the last change.
        changes: path of the method, and serialized request, for each changed setting.
    """

    number: int
    changes: Sequence[tuple[str, bytes]]


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Orders of the controller to one member.

    Attributes:
        controller: id of the controller process; a restarted controller has a new id.
        models: orders of all models to serve, by name; the member unloads all others.
        directory: serialized `cluster_pb2.Directory` for clients; None if the member has the current one.
        counters_number: the member reports its counters at once if this is larger than the last number it answered.
        settings: settings to apply; None if the member has applied all.
        drain: take no new requests, and leave once the accepted ones are answered.
        memory: controller state to keep for the next controller; None if unchanged.
    """

    controller: str
    models: Mapping[str, ModelOrder] = field(default_factory=dict)
    directory: bytes | None = None
    counters_number: int = 0
    settings: SettingsChanges | None = None
    drain: bool = False
    memory: bytes | None = None


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
