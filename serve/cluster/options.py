"""What an agent starts, and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halfserve.serve.cluster.server_process import AgentError

# Set by the agent, or without meaning for a server that an agent starts.
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
    """What an agent starts, and where.

    Attributes:
        path: of the model repository: a folder, or a URL of object storage.
        cluster: what tells clusters on one machine apart. Counters that a server left behind belong to the cluster of this
            name, so a new cluster needs a new one.
        arguments: further options of `halfserve serve`, such as ("--cpu", "--threads", "2").
        host: to listen on.
        advertised_host: where clients reach this machine; "" stands for `host`.
        first_port: the server gets three ports (gRPC, HTTP, metrics) in a row, with --no-http one: these, or of the next 31
            rows the first free one; 0 takes any free ports.
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

    def check(self) -> None:
        """Check the arguments.

        Raises:
            AgentError: one of them is not for a member of a cluster.
        """
        for argument in self.arguments:
            option = argument.partition("=")[0]
            if option in NOT_HERE:
                raise AgentError(f"{option} is not for a server of a cluster: {NOT_HERE[option]}; leave it out")
