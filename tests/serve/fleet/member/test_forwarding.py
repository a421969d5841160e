"""Members that serve one model each, asked for both: over TLS, with certificates on both sides, and tokens."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from halfserve import Client, InvalidRequest, ModelNotFound, RetryPolicy, ServerUnavailable, Tls
from halfserve.protos import inference_pb2 as pb
from halfserve.protos.cluster_pb2 import Directory
from halfserve.serve.client.channel_settings import ChannelSettings, parse_address
from halfserve.serve.engine.errors import UnavailableError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.fleet.control.controller import ControllerOptions
from halfserve.serve.fleet.member.forwarder import Forwarder
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.tokens import new_token
from tests.models import save_mlp
from tests.serve.backends.python.python_models import save_python_model
from tests.serve.backends.python.test_decoupled_models import COUNTS, DECOUPLED
from tests.serve.client.cluster.cluster import member
from tests.serve.fleet.fleet import WAIT_S
from tests.serve.fleet.local_cluster import ONCE, LocalCluster, Watch, local_cluster
from tests.serve.security.guarded import write_tokens

X = np.ones((1, 64), np.float16)
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP16", "shape": [1, 64], "data": [1.0] * 64}]}).encode()
NAMES = ("first", "second")
NAME = "members.example.org"  # in the certificate of each member


class Secrets:
    """Certificates and tokens, in files."""

    def __init__(self, folder: Path) -> None:
        made = (new_token("all", [Role.INFER, Role.METRICS]), new_token("one", [Role.INFER], models=["first"]))
        self.all, self.one = write_tokens(folder / "tokens", *made)
        authority = trustme.CA()
        self.authority, self.certificate, self.key = (str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem"))
        authority.cert_pem.write_to_path(self.authority)
        issued = authority.issue_cert(NAME)
        issued.cert_chain_pems[0].write_to_path(self.certificate)
        issued.private_key_pem.write_to_path(self.key)
        self.tls = Tls(authorities=self.authority, certificate=self.certificate, key=self.key, server_name=NAME)
        files = {"tls-cert": self.certificate, "tls-key": self.key, "tls-client-ca": self.authority}
        files |= {"tls-peer-ca": self.authority, "token-file": str(folder / "tokens")}
        self.arguments = [f"--{option}={file}" for option, file in files.items()]

    def client(self, address: str, token: str, retries: RetryPolicy = ONCE) -> Client:
        return Client(address, tls=self.tls, token=token, timeout_s=WAIT_S, retries=retries)

    def ask(self, address: str, path: str, token: str, body: bytes | None = None) -> object:
        return json.loads(self.read(address, path, token, body))

    def read(self, address: str, path: str, token: str = "", body: bytes | None = None) -> bytes:
        """Ask over HTTPS; the certificate has another name than 127.0.0.1."""
        context = ssl.create_default_context(cafile=self.authority)
        context.check_hostname = False
        context.load_cert_chain(self.certificate, self.key)
        request = urllib.request.Request(f"https://{address}{path}", body, {"authorization": f"Bearer {token or self.all}"})
        with urllib.request.urlopen(request, timeout=WAIT_S, context=context) as answer:  # noqa: S310  (the test's own URL)
            read: bytes = answer.read()
            return read


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("repository")
    for name in NAMES:
        save_mlp(made / name / "1" / "model.onnx")
    return made


@pytest.fixture(scope="module")
def cluster(folder: Path, repository: Path, secrets: Secrets) -> Iterator[LocalCluster]:
    with one_model_each(folder, repository, secrets, "--tls-peer-name", NAME) as made:
        yield made


@contextmanager
def one_model_each(folder: Path, repository: Path, secrets: Secrets, *arguments: str) -> Iterator[LocalCluster]:
    with local_cluster(folder, repository, ControllerOptions(models_per_member=1)) as made:
        for agent in made.start(2, *secrets.arguments, *arguments):
            with Watch(agent, secrets.all, secrets.tls) as watch:  # at the start models may move
                watch.until(lambda found: sorted(map(len, found.values())) == [1, 1])
        yield made


@pytest.fixture
def clients(cluster: LocalCluster, secrets: Secrets) -> Iterator[list[Client]]:
    """One of each member."""
    opened = [secrets.client(agent.address, secrets.all) for agent in cluster.agents]
    yield opened
    for client in opened:
        client.close()


def forwarded(address: str, secrets: Secrets) -> float:
    """Requests, of all members."""
    found = re.findall(rb"^halfserve_requests_forwarded_total (\S+)$", secrets.read(address, "/metrics"), re.MULTILINE)
    assert len(found) == 1
    return float(found[0])


def counted(client: Client) -> dict[str, int]:
    return {one.name: one.inference_count for one in client.statistics()}


def test_each_member_answers_for_every_model(cluster: LocalCluster, clients: list[Client], secrets: Secrets) -> None:
    before, forwarded_before = counted(clients[0]), forwarded(cluster.agents[0].http_address, secrets)
    for name in NAMES:
        answers = [client.infer(name, {"x": X})["y"] for client in clients]
        np.testing.assert_array_equal(answers[0], answers[1])
        assert [client.model_metadata(name).name for client in clients] == [name, name]
        assert [client.model_config(name).name for client in clients] == [name, name]
    assert counted(clients[1]) == {name: before[name] + 2 for name in NAMES}
    assert forwarded(cluster.agents[1].http_address, secrets) == forwarded_before + 2


def test_the_health_of_a_model_is_that_of_any_member(cluster: LocalCluster, secrets: Secrets) -> None:
    metadata = [("authorization", f"Bearer {secrets.all}")]
    for agent in cluster.agents:
        target = parse_address(agent.address)
        settings = ChannelSettings(target=target, tls=secrets.tls, balancing="pick_first", compression=None, keepalive_s=None)
        with settings.open(grpc) as channel:
            for name, expected in (("", "SERVING"), *((name, "SERVING") for name in NAMES), ("third", "SERVICE_UNKNOWN")):
                watch = health_pb2_grpc.HealthStub(channel).Watch(
                    health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S, metadata=metadata
                )
                assert next(watch).status == health_pb2.HealthCheckResponse.ServingStatus.Value(expected)
                watch.cancel()


def test_streams_and_rest_reach_every_model(cluster: LocalCluster, clients: list[Client], secrets: Secrets) -> None:
    expected = clients[0].infer("first", {"x": X})["y"]
    for name in NAMES:
        for agent, client in zip(cluster.agents, clients, strict=True):
            for streamed in client.stream_infer(name, [{"x": X}, {"x": X}]):
                np.testing.assert_array_equal(streamed.outputs["y"], expected)
            answer = secrets.ask(agent.http_address, f"/v2/models/{name}/infer", secrets.all, BODY)
            assert isinstance(answer, dict)
            np.testing.assert_allclose(answer["outputs"][0]["data"], expected[0], rtol=1e-3)


def test_errors_of_the_other_member_come_back_as_they_are(clients: list[Client]) -> None:
    for client in clients:
        for name in NAMES:
            with pytest.raises(InvalidRequest, match="input 'x' of model '.*' has the shape"):
                client.infer(name, {"x": np.ones((1, 63), np.float16)})
        with pytest.raises(ModelNotFound, match="model 'third' is not served here"):
            client.infer("third", {"x": X})


def test_a_request_is_forwarded_twice_at_most(clients: list[Client]) -> None:
    for client in clients:
        client.infer(NAMES[0], {"x": X}, metadata={"halfserve-forwarded": "1"})
    refused = []
    for client in clients:
        try:
            client.infer(NAMES[0], {"x": X}, metadata={"halfserve-forwarded": "2"})
        except ModelNotFound as error:
            refused.append(str(error))
    assert len(refused) == 1
    assert "is not served now" in refused[0]


def test_a_token_for_one_model_sees_no_other_one(cluster: LocalCluster, secrets: Secrets) -> None:
    for agent in cluster.agents:
        with secrets.client(agent.address, secrets.one) as client:
            client.infer("first", {"x": X})
            assert [one.name for one in client.models()] == ["first"]
            assert [one.name for one in client.statistics()] == ["first"]
            assert not client.is_ready("second")
            with pytest.raises(ModelNotFound, match="model 'second' is not served here"):
                client.infer("second", {"x": X})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            secrets.ask(agent.http_address, "/v2/models/second/infer", secrets.one, b"{}")


def test_clients_of_the_whole_cluster_reach_every_model(cluster: LocalCluster, secrets: Secrets) -> None:
    with secrets.client(f"cluster://{cluster.agents[0].address}", secrets.all) as client:
        for name in NAMES:
            client.infer(name, {"x": X})


def test_a_request_at_a_member_that_the_directory_loses_is_answered() -> None:
    async def scene(address: str) -> None:
        elsewhere = Forwarder("this one", InferenceCore([]), None)
        await elsewhere.follow(Directory(version=1, members=[member(address)]))
        request = pb.ModelMetadataRequest(name="mlp")
        asking = asyncio.ensure_future(elsewhere.call("mlp", "/path", request, pb.ModelMetadataResponse, {}))
        await asyncio.sleep(0)  # it begins
        await elsewhere.follow(Directory(version=2))
        with pytest.raises(UnavailableError, match="the members that serve model 'mlp' cannot be reached"):
            await asking

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(scene(f"127.0.0.1:{silent.getsockname()[1]}"))


@pytest.mark.long
def test_decoupled_models_answer_from_elsewhere(folder: Path, tmp_path: Path, secrets: Secrets) -> None:
    for name in NAMES:
        save_python_model(tmp_path, name, COUNTS, DECOUPLED)
    requests = [{"x": np.array([n], np.float32)} for n in (9, 0, 1)]  # the first one waits for the last one
    expected = [*((0, [float(at)], False) for at in range(9)), (0, [], True), (1, [], True), (2, [0.0], False), (2, [], True)]
    with one_model_each(folder, tmp_path, secrets, "--tls-peer-name", NAME, "--trust-python-models") as made:
        for agent in made.agents:
            with secrets.client(agent.address, secrets.all) as client:
                for name in NAMES:
                    answers = client.stream_infer(name, requests, in_flight=3)
                    assert [
                        (one.index, [float(y[0]) for y in one.outputs.values()], one.is_final) for one in answers
                    ] == expected
                    (refused,) = client.stream_infer(name, [{"x": np.ones(2, np.float32)}])
                    assert isinstance(refused.error, InvalidRequest)
                    assert "has the shape" in str(refused.error)


@pytest.mark.long
def test_members_are_asked_once_their_certificates_are_trusted(
    folder: Path, repository: Path, tmp_path: Path, secrets: Secrets
) -> None:
    trusted = tmp_path / "peers.pem"
    trustme.CA().cert_pem.write_to_path(str(trusted))
    with one_model_each(folder, repository, secrets, "--tls-peer-name", NAME, f"--tls-peer-ca={trusted}") as made:
        agent = made.agents[0]
        with Watch(agent, secrets.all, secrets.tls) as watch:
            (elsewhere,) = {*NAMES} - watch.until(bool)[agent.address]
        with secrets.client(agent.address, secrets.all) as client, pytest.raises(ServerUnavailable, match="whose log says why"):
            client.infer(elsewhere, {"x": X})
        trusted.write_bytes(Path(secrets.authority).read_bytes())
        with secrets.client(agent.address, secrets.all, RetryPolicy(retries=10, initial_backoff_s=1.0)) as client:
            client.infer(elsewhere, {"x": X})
