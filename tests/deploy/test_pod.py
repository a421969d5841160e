"""What the manifests rely on is true of the server: it starts as the pod starts it, answers the probes, and ends unseen."""

from __future__ import annotations

import signal
import socket
import ssl
import urllib.request
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from halfserve.serve.protocol.rpc import Role
from tests.deploy.manifests import Manifest, container, example
from tests.deploy.running_pod import RunningPod, can_start_pods, running_pod
from tests.models import save_mlp
from tests.serve.faults.server_process import under_load
from tests.serve.security.guarded import tokens_in

pytestmark = [pytest.mark.long, can_start_pods]
WAIT_S = 60.0


@pytest.fixture
def models(tmp_path: Path) -> Path:
    save_mlp(tmp_path / "models" / "mlp" / "1" / "model.onnx")
    return tmp_path / "models"


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    (tmp_path / "secrets").mkdir()
    return tmp_path / "secrets"


@pytest.fixture
def free_ports() -> list[dict[str, int]]:
    """Ports of 127.0.0.1 for two servers."""
    probes = [socket.socket() for _ in range(6)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    numbers = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return [dict(zip(("grpc", "http", "metrics"), numbers[at : at + 3], strict=True)) for at in (0, 3)]


def fetch(url: str, token: str = "") -> int:
    """The status of a GET; the certificate is not looked at, as by the kubelet."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:  # noqa: S310  (the test's own URL)
            return int(answer.status)
    except HTTPError as error:
        return error.code


def is_serving(running: RunningPod) -> bool:
    """What the kubelet's gRPC probe finds."""
    with grpc.insecure_channel(running.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def probes_of(manifests: list[Manifest], running: RunningPod) -> list[int]:
    """The statuses that the pod's HTTP probes get."""
    names = {port["containerPort"]: port["name"] for port in container(manifests)["ports"]}
    probes = [container(manifests)[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
    return [
        fetch(f"{probe['scheme'].lower()}://127.0.0.1:{running.ports[names[probe['port']]]}{probe['path']}") for probe in probes
    ]


def test_a_replica_ends_under_load_and_fails_no_request(models: Path, secrets: Path, free_ports: list[dict[str, int]]) -> None:
    manifests, changes = example("cpu"), {"--lame-duck-seconds": "2"}
    assert all("grpc" in container(manifests)[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe"))
    first_ports, second_ports = free_ports
    with (
        running_pod(manifests, models, secrets, first_ports, changes) as first,
        running_pod(manifests, models, secrets, second_ports, changes) as second,
        # Without retries. A stream's later requests would be refused, as they have only this server.
        under_load([first.address, second.address], streams=0) as load,
    ):
        assert is_serving(first)
        first.process.send_signal(signal.SIGTERM)
        while is_serving(first):  # the supervisor passes the signal on
            pass
        load.wait_for_more()  # it serves on, until the endpoints are without it
        assert fetch(f"http://127.0.0.1:{first.ports['http']}/v2/health/ready") == HTTPStatus.SERVICE_UNAVAILABLE
        assert fetch(f"http://127.0.0.1:{first.ports['http']}/v2/health/live") == HTTPStatus.OK
        assert first.process.wait(WAIT_S) == 0
        assert is_serving(second)
        load.wait_for_more()


def test_probes_and_prometheus_reach_a_hardened_server(models: Path, secrets: Path, free_ports: list[dict[str, int]]) -> None:
    manifests = example("hardened")
    for name in ("tokens", "tls"):
        (secrets / name).mkdir()
    tokens = tokens_in(secrets / "tokens" / "tokens", prometheus=Role.METRICS)
    certificate = trustme.CA().issue_cert("halfserve.models.svc")
    certificate.cert_chain_pems[0].write_to_path(str(secrets / "tls" / "tls.crt"))
    certificate.private_key_pem.write_to_path(str(secrets / "tls" / "tls.key"))
    with running_pod(manifests, models, secrets, free_ports[0]) as running:
        assert probes_of(manifests, running) == [HTTPStatus.OK] * 3
        metrics = f"https://127.0.0.1:{running.ports['metrics']}/metrics"
        assert fetch(metrics) == HTTPStatus.UNAUTHORIZED
        assert fetch(metrics, tokens["prometheus"]) == HTTPStatus.OK
