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
from halfserve.serve.fleet.agent.member_folders import MemberFolders
from halfserve.serve.fleet.agent.server_process import AgentError, AgentOptions, Ports
from halfserve.serve.fleet.control.controller import Controller
from tests.models import save_mlp
from tests.serve.fleet.fleet import WAIT_S
from tests.serve.fleet.local_cluster import HOST, agent_options, local_cluster

X = np.ones((1, 64), np.float16)
PROGRAM = """
import asyncio, sys
from pathlib import Path
from halfserve.serve.fleet.agent.agent import Agent
from halfserve.serve.fleet.control.controller import Controller
from tests.serve.fleet.local_cluster import agent_options

async def main():
    agent = Agent(agent_options(Path(sys.argv[1]), Path(sys.argv[2])), Controller())
    await agent.start()
    print("agent", agent.address, agent.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.long
def test_a_killed_agent_takes_its_server_along_and_another_one_reports_what_was_counted(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    save_mlp(repository / "mlp" / "1" / "model.onnx")
    command = [sys.executable, "-c", PROGRAM, str(folder), str(repository)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        _, address, pid = next(line for line in process.stdout if line.startswith("agent ")).split()
        with Client(address, timeout_s=WAIT_S) as client:
            for _ in range(5):
                client.infer("mlp", {"x": X})
        server = os.pidfd_open(int(pid))
        process.kill()
    assert select.select([server], [], [], WAIT_S)[0], "the server has outlived its agent"
    os.close(server)
    with local_cluster(folder, repository) as cluster:
        (agent,) = cluster.start(1)
        (counters,) = cluster.client(agent).statistics("mlp")
        assert counters.inference_count == 5
        assert [path.name for path in folder.glob("*/*")] == [agent.member]


def test_of_two_agents_one_reports_what_a_dead_server_has_left(folder: Path) -> None:
    dead, first, second = (MemberFolders(folder, "test", name) for name in ("dead", "first", "second"))
    assert first.claim_left() == {}
    dead.close(keep_own=True)
    assert set(first.claim_left()) == {"dead"}
    assert second.claim_left() == {}
    first.close(keep_own=False)  # it ends before the controller knows
    assert set(second.claim_left()) == {"dead"}
    second.forget("dead")
    assert not dead.own.exists()
    second.close(keep_own=False)


def start(options: AgentOptions) -> None:
    async def work() -> None:
        agent = Agent(options, Controller())
        try:
            await agent.start()
        finally:
            await agent.stop()

    asyncio.run(work())


def test_a_repository_that_cannot_be_served_is_one_line(folder: Path) -> None:
    with pytest.raises(AgentError, match=r"^the server cannot serve \S+/nothing: \S+/nothing: not found; expected") as raised:
        start(agent_options(folder, folder / "nothing"))
    assert "\n" not in str(raised.value)
    assert list(folder.glob("*/*")) == []


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
