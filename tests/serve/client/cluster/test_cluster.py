"""Both clients of a cluster: joins, leaves, drains and kills that the caller does not see, and errors that it does."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfserve import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    RetryPolicy,
    ServerUnavailable,
    Unsupported,
)
from tests.models import mlp_weights
from tests.serve.client.cluster.cluster import DRAINING, Cluster, answered, answered_at, cluster_of, member
from tests.serve.client.conftest import Connect
from tests.serve.client.scripted_server import ScriptedServer
from tests.serve.faults.server_process import WAIT_S, under_load

X = np.ones((1, 64), np.float16)
RETRY = RetryPolicy(retries=3)
NOT_THERE = "127.0.0.1:1"


def exact(x: Any) -> Any:
    first, second = (weights.astype(np.float32) for weights in mlp_weights())
    return np.maximum(x.astype(np.float32) @ first, 0) @ second


def until(condition: Callable[[], bool], ask: Callable[[], object]) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_s, "it never came about"
        ask()


@pytest.fixture
def cluster(repository: Path) -> Iterator[Cluster]:
    """Two members."""
    with cluster_of(repository, 2) as running:
        yield running


def test_calls_are_spread_and_streams_stay_together(cluster: Cluster, connect: Connect) -> None:
    client = connect(f"cluster://{NOT_THERE},{cluster.servers[0].address}")
    for _ in range(40):
        np.testing.assert_allclose(client.infer("mlp", {"x": X})["y"], exact(X), atol=0.02)
    before = [answered(server) for server in cluster.servers]
    assert sum(before) == 40
    assert min(before) > 0
    for answer in client.stream_infer("mlp", [{"x": X}] * 10):
        np.testing.assert_allclose(answer.outputs["y"], exact(X), atol=0.02)
    after = [answered(server) for server in cluster.servers]
    assert sorted(a - b for a, b in zip(after, before, strict=True)) == [0, 10]


def test_a_model_is_asked_where_the_directory_has_it(cluster: Cluster, connect: Connect) -> None:
    one, other = cluster.servers
    cluster.board.publish(member(one.address, models=["picky"]), member(other.address, models=["mlp"]))
    client = connect(cluster.address)
    handle = client.model("mlp")
    for _ in range(10):
        handle.infer(X)
        client.infer("mlp", {"x": X})
    assert (answered(one), answered(other)) == (0, 20)


def test_members_come_and_go_unseen_under_load(cluster: Cluster) -> None:
    with under_load([cluster.address], askers=4, streams=0, retry=RETRY) as load:
        for _ in range(2):
            joined = cluster.start()
            cluster.publish_all()
            until(lambda joined=joined: answered(joined) > 20, load.wait_for_more)  # type: ignore[misc]
            leaving = cluster.servers.pop(0)
            draining = member(leaving.address, DRAINING)
            cluster.board.publish(draining, *(member(server.address) for server in cluster.servers))
            leaving.run(leaving.core.drain())
            cluster.publish_all()
            load.wait_for_more()


def test_a_drain_that_the_directory_does_not_tell_is_unseen(cluster: Cluster) -> None:
    with under_load([cluster.address], askers=4, streams=0, retry=RETRY) as load:
        leaving = cluster.servers[0]
        leaving.run(leaving.stop())
        load.wait_for_more(100)


@contextmanager
def server_process(repository: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "halfserve", "serve", str(repository), "--grpc-port", "0", "--no-http", "--cpu", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, f"127.0.0.1:{json.loads(process.stdout.readline())['grpc_port']}"
        finally:
            process.kill()


async def ask_until(over: threading.Event, address: str, right: list[int]) -> None:
    """Ask from a task for each of the counts; every answer is checked."""
    async with AsyncClient(address) as client:

        async def ask(seed: int) -> None:
            random = np.random.default_rng(seed)
            while not over.is_set():
                x = random.standard_normal((1, 64)).astype(np.float16)
                np.testing.assert_allclose((await client.infer("mlp", {"x": x}))["y"], exact(x), atol=0.02, rtol=0.02)
                right[seed] += 1

        await asyncio.gather(*map(ask, range(len(right))))


def test_a_kill_is_unseen_under_load(cluster: Cluster, repository: Path) -> None:
    """The directory lists the killed one to the end."""
    right, over = [0] * 8, threading.Event()
    with server_process(repository) as (process, address), ThreadPoolExecutor(1) as pool:
        cluster.board.publish(*(member(one) for one in (address, cluster.servers[0].address)))
        asking = pool.submit(lambda: asyncio.run(ask_until(over, cluster.address, right)))
        try:
            with under_load([cluster.address], streams=0, retry=RETRY) as load:
                until(lambda: min(right) > 5, load.wait_for_more)
                process.kill()
                before = list(right)
                until(lambda: min(map(int.__sub__, right, before)) > 2, load.wait_for_more)
        finally:
            over.set()
        asking.result(WAIT_S)


@pytest.fixture(scope="module")
def machine(repository: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process that may be stopped, and goes on after the test."""
    with server_process(repository) as running:
        yield running


def test_a_machine_that_falls_silent_is_unseen(
    cluster: Cluster, machine: tuple[subprocess.Popen[str], str], connect: Connect
) -> None:
    process, address = machine
    cluster.board.publish(*(member(one) for one in (address, cluster.servers[0].address)))
    client, before = connect(cluster.address, keepalive_s=0.2), answered_at(address)
    until(lambda: answered_at(address) > before, lambda: client.infer("mlp", {"x": X}))
    process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(20):
            np.testing.assert_allclose(client.infer("mlp", {"x": X})["y"], exact(X), atol=0.02)
    finally:
        process.send_signal(signal.SIGCONT)


def test_the_directory_is_asked_elsewhere_when_its_member_is_lost(cluster: Cluster, connect: Connect) -> None:
    """Also of a member that the client learned from another one; the last directory is valid meanwhile."""
    first, learned = cluster.servers
    client = connect(f"cluster://{first.address}")
    client.infer("mlp", {"x": X})
    first.run(first.stop())
    client.infer("mlp", {"x": X})
    joined = cluster.start()
    cluster.board.publish(member(learned.address, DRAINING), member(joined.address))
    until(lambda: answered(joined) > 0, lambda: client.infer("mlp", {"x": X}))


def test_former_members_are_asked_when_all_present_ones_are_lost(cluster: Cluster, connect: Connect) -> None:
    """Members that are cut off from the others name themselves alone, and then they end."""
    given, other = cluster.servers
    client = connect(f"cluster://{given.address}", retries=RetryPolicy(retries=8, wait_for_server=True))
    client.infer("mlp", {"x": X})
    cut_off = [cluster.start(), cluster.start()]
    cluster.board.publish(member(other.address, DRAINING), member(cut_off[0].address))
    given.run(given.stop())
    until(lambda: cluster.board.watched == {cut_off[0].address}, lambda: client.infer("mlp", {"x": X}))
    cluster.board.publish(*(member(server.address) for server in cut_off))
    until(lambda: answered(cut_off[1]) > 0, lambda: client.infer("mlp", {"x": X}))
    for server in reversed(cut_off):  # the one that is watched at last: nothing connects to a server that is ending
        server.run(server.stop())
    before = answered(other)
    cluster.board.publish(member(other.address), version=2)
    until(lambda: answered(other) > before, lambda: client.infer("mlp", {"x": X}))


@pytest.mark.long
def test_clients_end_their_watch_after_all_members_have_gone(repository: Path) -> None:
    with cluster_of(repository, 3) as cluster:
        clients = [Client(cluster.address) for _ in range(40)]
        for client in clients:
            client.server_metadata()

    def wait_and_close(client: Client) -> None:
        with pytest.raises(DeadlineExceeded):  # meanwhile the members are asked for the directory, again and again
            client.wait_until_ready(timeout_s=8)
        client.close()

    closing = [threading.Thread(target=wait_and_close, args=(client,), daemon=True) for client in clients]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in closing)


def test_an_older_directory_is_not_taken(cluster: Cluster, connect: Connect) -> None:
    """A member that is asked after another one may be behind; a cluster that began again has other members."""
    first, second = cluster.servers
    client = connect(f"cluster://{first.address}")
    client.infer("mlp", {"x": X})
    joined = cluster.start()
    cluster.board.publish(member(joined.address), member(second.address, models=[]), version=9)
    until(lambda: answered(joined) > 0, lambda: client.infer("mlp", {"x": X}))
    before = answered(second)
    cluster.board.publish(member(second.address), version=3)
    for _ in range(10):
        client.infer("mlp", {"x": X})
    assert answered(second) == before
    cluster.board.publish(member(first.address), version=1)
    before = answered(first)
    until(lambda: answered(first) > before, lambda: client.infer("mlp", {"x": X}))


def test_a_draining_member_is_left_by_its_watchers(cluster: Cluster, connect: Connect) -> None:
    client = connect(f"cluster://{cluster.servers[0].address}")
    client.infer("mlp", {"x": X})
    leaving, staying = cluster.servers
    cluster.board.publish(member(leaving.address, DRAINING), member(staying.address))
    until(lambda: cluster.board.watched == {staying.address}, lambda: client.infer("mlp", {"x": X}))


def test_shared_memory_stays_with_one_member(repository: Path, connect: Connect) -> None:
    with cluster_of(repository, 3, shared_memory=True) as cluster:
        client = connect(cluster.address)
        with client.shared_region(1 << 16) as region:
            x, y = region.array((1, 64), np.float16), region.array((1, 10), np.float16)
            x[:] = 1
            for _ in range(20):
                client.infer("mlp", {"x": x}, into={"y": y})
            np.testing.assert_allclose(y, exact(x), atol=0.02)
            assert sorted(map(answered, cluster.servers)) == [0, 0, 20]
            (having,) = (server for server in cluster.servers if answered(server))
            cluster.board.publish(*(member(server.address) for server in cluster.servers if server is not having))
            y[:] = 0
            until(
                lambda: answered(having) < sum(map(answered, cluster.servers)),
                lambda: client.infer("mlp", {"x": x}, into={"y": y}),
            )
            np.testing.assert_allclose(y, exact(x), atol=0.02)


def test_shared_memory_is_refused_without_a_member_here(cluster: Cluster, connect: Connect) -> None:
    cluster.board.publish(member("192.0.2.1:8001"))
    client = connect(cluster.address)
    text = "shared memory needs a member of the cluster on this machine, and there is none; send the tensors"
    with pytest.raises(Unsupported, match=text), client.shared_region(100):
        pass


def test_a_token_goes_to_no_other_machine_unencrypted(cluster: Cluster, connect: Connect) -> None:
    cluster.board.publish(member("192.0.2.1:8001"))
    client = connect(cluster.address, token=lambda: "renewed")
    with pytest.raises(InvalidRequest, match="a token would go unencrypted to 192.0.2.1:8001"):
        client.infer("mlp", {"x": X})


def test_addresses_that_do_not_answer(connect: Connect) -> None:
    with pytest.raises(ServerUnavailable, match=r"no server answers at 127.0.0.1:1 \(connection refused\)"):
        connect(f"cluster://{NOT_THERE}", retries=0).models()
    text = r"none of the cluster's addresses answers \(127.0.0.1:1, 127.0.0.1:2\): no server answers at 127"
    with pytest.raises(ServerUnavailable, match=text):
        connect(f"cluster://{NOT_THERE},127.0.0.1:2", retries=0).models()
    assert not connect(f"cluster://{NOT_THERE}").is_live()


def test_a_server_that_is_no_member(scripted: ScriptedServer, connect: Connect) -> None:
    with pytest.raises(
        Unsupported, match=f"{scripted.address} is no member of a cluster; write its address without cluster://"
    ):
        connect(f"cluster://{NOT_THERE},{scripted.address}").models()


@pytest.mark.parametrize("address", ["cluster://", "cluster://host", "cluster://a:1,", "cluster://a:1/x"])
def test_malformed_addresses_are_refused(address: str, connect: Connect) -> None:
    with pytest.raises(InvalidRequest, match="the address must be HOST:PORT"):
        connect(address)


def test_a_cluster_without_members(cluster: Cluster, connect: Connect) -> None:
    cluster.board.publish()
    with pytest.raises(ServerUnavailable, match="no member of the cluster takes requests now"):
        connect(cluster.address, retries=0).infer("mlp", {"x": X})


def test_a_model_that_no_member_has(cluster: Cluster, connect: Connect) -> None:
    with pytest.raises(ModelNotFound, match="model 'nope' is not served here"):
        connect(cluster.address).infer("nope", {"x": X})


def test_a_directory_that_does_not_come_in_time(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = connect(f"cluster://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(DeadlineExceeded, match="cluster://.* did not answer Watch in time"):
            client.server_metadata()


def test_a_client_that_is_not_closed_ends_its_watch(cluster: Cluster) -> None:
    def use() -> None:
        assert Client(cluster.address).infer("mlp", {"x": X})

    use()
    gc.collect()
    with Client(cluster.servers[0].address) as other:
        until(lambda: not cluster.board.watched, other.is_live)
