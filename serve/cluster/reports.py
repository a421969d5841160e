"""What an agent and the controller tell each other: the agent reports, and the answer is its orders.

The controller keeps nothing on disk. What it must not forget it gives to every agent (`Orders.memory`), and a new controller
takes the newest of what they report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """A model at one member.

    Attributes:
        generation: of the order to load that was last carried out or failed; 0 for none.
        is_served: whether it answers requests.
        error: why the order of that generation failed; "" if it did not.
        status: name of the gRPC status of that failure, like NOT_FOUND; "" if it did not fail.
        versions: numbers of the versions that it serves.
        size: bytes of memory that it takes, about; 0 if that is not known.
        requests, rows, failures, refusals: counts since the member's start; requests are those answered well.
        queue_ns, compute_ns: time of all requests in the queue, and of all batches in the model, since the member's start.
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


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an agent says of its server.

    Attributes:
        member: id of the server process; its successor has another one.
        machine: what tells machines apart, for placement and people.
        grpc_address, http_address: HOST:PORT, as clients reach it; the latter may be "".
        is_draining: the server is about to leave, and takes no new requests.
        models: all of the repository, by name, whether served or not.
        compute_slots: how many batches compute at once, to make shares of time of `compute_ns`.
        memory_size: bytes that models may take here; 0 if that is not known.
        figures: `Figures.to_bytes()` of the server, where the last orders asked for them or the server has ended.
        figures_number: the `Orders.figures_number` that they answer.
        has_ended: the server is gone; the figures are its last ones, and the agent reports no more.
        left: figures of servers that ended without a last report, by member; found on this machine.
        directory_version: of the directory that the server answers with.
        settings_number: of the settings that it has taken over.
        controller: the `Orders.controller` of the last orders; "" before the first.
        memory: the newest `Orders.memory`, in the first report to another controller; else None.
    """

    member: str
    machine: str
    grpc_address: str
    http_address: str = ""
    is_draining: bool = False
    models: Mapping[str, ModelReport] = field(default_factory=dict)
    compute_slots: int = 1
    memory_size: int = 0
    figures: bytes | None = None
    figures_number: int = 0
    has_ended: bool = False
    left: Mapping[str, bytes] = field(default_factory=dict)
    directory_version: int = 0
    settings_number: int = 0
    controller: str = ""
    memory: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class ModelOrder:
    """That a member shall serve a model.

    Attributes:
        generation: larger for each later order; the agent loads the model (again) when it has another one.
        request: serialized RepositoryModelLoadRequest, with a configuration or files where the user gave them; empty where
            the member has reported that generation already.
    """

    generation: int
    request: bytes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of logs and traces, as users have changed them.

    Attributes:
        number: larger after each change.
        changes: path of the method, and serialized request, for each setting that the member has not taken over.
    """

    number: int
    changes: Sequence[tuple[str, bytes]]


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a member shall do.

    Attributes:
        controller: id of the controller process; its successor has another one.
        models: all that it shall serve, by name; it unloads all others.
        directory: serialized `cluster_pb2.Directory` to answer clients with; None if it has the present one.
        figures_number: report the figures if this is larger than the last one's; at once.
        settings: to take over; None if it has them.
        drain: take no new requests, and leave when all are answered.
        memory: to be kept, and reported to another controller; None if unchanged.
    """

    controller: str
    models: Mapping[str, ModelOrder] = field(default_factory=dict)
    directory: bytes | None = None
    figures_number: int = 0
    settings: Settings | None = None
    drain: bool = False
    memory: bytes | None = None


class ControllerLink(Protocol):
    """How an agent reaches the controller; a launcher makes it. Methods raise ConnectionError where it is not there now."""

    async def exchange(self, report: Report) -> Orders:
        """Report, and have orders: at once where there are new ones, else within 4 * REPORT_S."""

    async def call(self, path: str, request: bytes) -> bytes:
        """Ask for the whole cluster: a management method of the gRPC API, by path, from serialized message to message.

        Raises:
            InferenceError: the cluster refuses, or could not do it.
        """

    async def metrics(self) -> tuple[bytes, str]:
        """The Prometheus metrics of the whole cluster, and their content type."""


REPORT_S = (
    0.5  # an agent reports at least this often; less often in a cluster of more than 100, as the controller answers later
)
LEASE_S = 2.0  # a member that has not reported for so long is in the directory no more
