"""The agent beside each server of a cluster: starts the server, reports to the controller, and carries out its orders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halfserve.serve.cluster.reports import ControllerLink


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """What an agent starts, and where.

    Attributes:
        path: of the model repository: a folder, or a URL of object storage.
        cluster: what tells clusters on one machine apart. Counters that a server left behind belong to the cluster of this name,
            so a new cluster needs a new one.
        arguments: further options of `halfserve serve`, such as ("--cpu", "--threads", "2").
        host: to listen on.
        advertised_host: where clients reach this machine; "" stands for `host`.
        first_port: the server gets three ports (gRPC, HTTP, metrics) in a row: these, or of the next 31 rows the first free one;
            0 takes any free ports.
        machine: what tells machines apart, for placement and people; "" stands for the host's name.
        folder: of all clusters of this user on this machine; None is one in the system's temporary folder.
    """

    path: str
    cluster: str
    arguments: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    advertised_host: str = ""
    first_port: int = 8001
    machine: str = ""
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy a server was in the last LOAD_S seconds.

    Attributes:
        computing: share of time in which models computed, of all that could compute at once: 0 to 1.
        queue_s: mean seconds that a request waited for its batch; 0 without requests.
        refused: share of requests that were refused, as queues were full: 0 to 1.
    """

    computing: float = 0.0
    queue_s: float = 0.0
    refused: float = 0.0


class AgentError(Exception):
    """The server cannot be started, or has ended; the text is one line that says why."""


class Agent:
    """One server, and its place in the cluster. Lives on one event loop.

    Attributes:
        member: id of the server process in the cluster.
        address: HOST:PORT of gRPC, as clients reach it; "" before `start`.
        http_address: HOST:PORT of REST; "" before `start`, and with --no-http.
        metrics_address: HOST:PORT of the metrics; "" likewise.
        pid: of the server process; 0 before `start`.
    """

    member: str
    address: str
    http_address: str
    metrics_address: str
    pid: int

    def __init__(self, options: AgentOptions, link: ControllerLink) -> None:
        """An agent without a server."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start the server, and report until `stop`. Returns once the server has carried out the controller's first orders: it
        serves the models that it shall serve. While the controller cannot be reached, this waits.

        Raises:
            AgentError: the server cannot be started, or has ended.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Check that the server runs.

        Raises:
            AgentError: it has ended.
        """
        raise NotImplementedError

    @property
    def load(self) -> Load:
        """How busy the server was lately."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Leave the cluster: take no new requests, answer those taken, end the server, and report its last counters.

        Returns when all that is done, at the latest when the server's own limits for it have passed. Safe to call twice, and
        after a failed start.
        """
        raise NotImplementedError
