"""Options of an agent: the server that it starts, and the address."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halfserve.serve.cluster.server_process import AgentError

# Options that the agent sets itself, or that have no meaning for a server started by an agent.
NOT_HERE = {
    "--host": "AgentOptions.host sets it",
    "--grpc-port": "AgentOptions.first_port sets it",
    "--http-port": "AgentOptions.first_port sets it",
    "--metrics-port": "AgentOptions.first_port sets it",
    "--model-control": "the controller decides what is served",
    "--load-model": "the controller decides what is served",
    "--processes": "a cluster's servers are its members",
    "--supervise": "the agent starts and replaces the server",
    "--transport": "members of a cluster use nghttp2",
}


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Options of an agent.

    Attributes:
        path: model repository: a folder, or a URL of object storage.
        cluster: name that distinguishes clusters on one machine. Counters that a dead server left behind belong to the cluster
            of this name, so a new cluster needs a new name.
        arguments: further options of `halfserve serve`, such as ("--cpu", "--threads", "2").
        host: address to listen on.
        advertised_host: host under which clients reach this machine; "" for `host`.
        first_port: first of the server's three consecutive ports (gRPC, HTTP, metrics), or its single port with --no-http. If
            taken, the next free row of ports is used, among 31 further rows; 0 for any free ports.
        machine: name that distinguishes machines, for placement and users; "" for the host name.
        folder: root folder of all clusters of this user on this machine; None for one in the system's temporary folder.
    """

    path: str
    cluster: str
    arguments: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    advertised_host: str = ""
    first_port: int = 8001
    machine: str = ""
    folder: Path | None = None

    def check(self) -> None:
        """Check the arguments.

        Raises:
            AgentError: an option is not allowed for a member of a cluster.
        """
        for argument in self.arguments:
            option = argument.partition("=")[0]
            if option in NOT_HERE:
                raise AgentError(f"{option} is not for a server of a cluster: {NOT_HERE[option]}; leave it out")
