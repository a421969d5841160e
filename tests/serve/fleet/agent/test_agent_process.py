"""How an agent starts its server, and what is left when either of them is killed."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from halfserve import Client
from halfserve.serve.fleet.agent.agent import Agent
from halfserve.serve.fleet.agent.server_process import AgentError, AgentOptions, Ports
from halfserve.serve.fleet.control.controller import Controller
from tests.models import save_mlp
from tests.serve.fleet.fleet import WAIT_S
from tests.serve.fleet.local_cluster import HOST, LocalStore, agent_options

X = np.ones((1, 64), np.float16)
PROGRAM = """
import asyncio, sys
from pathlib import Path
from halfserve.serve.fleet.agent.agent import Agent
from halfserve.serve.fleet.control.controller import Controller
from tests.serve.fleet.local_cluster import LocalStore, agent_options

async def main():
    agent = Agent(agent_options(Path(sys.argv[1]), Path(sys.argv[2])), Controller(LocalStore()))
    await agent.start()
    await agent.serve({})
    print("agent", agent.address, agent.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.long
def test_a_killed_agent_takes_its_server_along(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    save_mlp(repository / "mlp" / "1" / "model.onnx")
    command = [sys.executable, "-c", PROGRAM, str(folder), str(repository)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        _, address, pid = next(line for line in process.stdout if line.startswith("agent ")).split()
        with Client(address, timeout_s=WAIT_S) as client:
            client.infer("mlp", {"x": X})
        server = os.pidfd_open(int(pid))
        process.kill()
    assert select.select([server], [], [], WAIT_S)[0], "the server has outlived its agent"
    os.close(server)


def start(options: AgentOptions) -> None:
    async def work() -> None:
        agent = Agent(options, Controller(LocalStore()))
        try:
            await agent.start()
        finally:
            await agent.stop()

    asyncio.run(work())


def test_a_repository_that_cannot_be_served_is_one_line(folder: Path) -> None:
    with pytest.raises(AgentError, match=r"^the server cannot serve \S+/nothing: \S+/nothing: not found; expected") as raised:
        start(agent_options(folder, folder / "nothing"))
    assert "\n" not in str(raised.value)
    assert list(folder.glob("*")) == []


def test_the_next_row_of_ports_is_taken_where_one_is_in_use() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        ports = Ports(HOST, port, ("grpc", "http"))
        assert ports["grpc"] > port
        assert ports["http"] == ports["grpc"] + 1
        assert (ports["grpc"] - port) % 2 == 0
        ports.close()
    with pytest.raises(AgentError, match="no 1 ports in a row are free from 1 on.*cannot listen on 192.0.2.1:"):
        Ports("192.0.2.1", 1, ("grpc",))
