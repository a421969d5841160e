"""Members that serve one model each, asked for both."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from halfserve import Client, InvalidRequest, ModelNotFound
from halfserve.serve.cluster.agent import Agent
from halfserve.serve.cluster.controller import ControllerOptions
from halfserve.serve.security.roles import Role
from halfserve.serve.security.tokens import new_token
from tests.models import save_mlp
from tests.serve.cluster.local_cluster import ONCE, WAIT_S, LocalCluster, Watch, local_cluster
from tests.serve.security.guarded import write_tokens

X = np.ones((1, 64), np.float16)
NAMES = ("first", "second")


class Tokens:
    def __init__(self, folder: Path) -> None:
        self.file = folder / "tokens"
        made = (new_token("all", [Role.INFER, Role.METRICS]), new_token("one", [Role.INFER], models=["first"]))
        self.all, self.one = write_tokens(folder / "tokens", *made)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory, tokens: Tokens) -> Iterator[LocalCluster]:
    repository = tmp_path_factory.mktemp("repository")
    for name in NAMES:
        save_mlp(repository / name / "1" / "model.onnx")
    with local_cluster(folder, repository, ControllerOptions(models_per_member=1)) as made:
        for agent in made.start(2, "--token-file", str(tokens.file)):
            with Watch(agent, tokens.all) as watch:  # at the start models may move
                watch.until(lambda found: sorted(map(len, found.values())) == [1, 1])
        yield made


@pytest.fixture
def clients(cluster: LocalCluster, tokens: Tokens) -> Iterator[list[Client]]:
    """One of each member."""
    opened = [Client(agent.address, token=tokens.all, timeout_s=WAIT_S, retries=ONCE) for agent in cluster.agents]
    yield opened
    for client in opened:
        client.close()


def ask(agent: Agent, path: str, token: str, body: bytes | None = None) -> object:
    request = urllib.request.Request(f"http://{agent.http_address}{path}", body, {"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:  # noqa: S310  (the test's own URL)
        return json.load(answer)


def forwarded(agent: Agent, token: str) -> float:
    """Requests, of all members."""
    asked = urllib.request.Request(f"http://{agent.http_address}/metrics", headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=WAIT_S) as answer:  # noqa: S310  (the test's own URL)
        (line,) = re.findall(r"^halfserve_requests_forwarded_total (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(line)


def counted(client: Client) -> dict[str, int]:
    return {one.name: one.inference_count for one in client.statistics()}


def test_each_member_answers_for_every_model(cluster: LocalCluster, clients: list[Client], tokens: Tokens) -> None:
    before, forwarded_before = counted(clients[0]), forwarded(cluster.agents[0], tokens.all)
    for name in NAMES:
        answers = [client.infer(name, {"x": X})["y"] for client in clients]
        np.testing.assert_array_equal(answers[0], answers[1])
        assert [client.model_metadata(name).name for client in clients] == [name, name]
        assert [client.model_config(name).name for client in clients] == [name, name]
    assert counted(clients[1]) == {name: before[name] + 2 for name in NAMES}
    assert forwarded(cluster.agents[1], tokens.all) == forwarded_before + 2


def test_streams_and_rest_reach_every_model(cluster: LocalCluster, clients: list[Client], tokens: Tokens) -> None:
    expected = clients[0].infer("first", {"x": X})["y"]
    tensor = {"name": "x", "datatype": "FP16", "shape": [1, 64], "data": [1.0] * 64}
    body = json.dumps({"inputs": [tensor]}).encode()
    for name in NAMES:
        for agent, client in zip(cluster.agents, clients, strict=True):
            for streamed in client.stream_infer(name, [{"x": X}, {"x": X}]):
                np.testing.assert_array_equal(streamed.outputs["y"], expected)
            answer = ask(agent, f"/v2/models/{name}/infer", tokens.all, body)
            assert isinstance(answer, dict)
            np.testing.assert_allclose(answer["outputs"][0]["data"], expected[0], rtol=1e-3)


def test_errors_of_the_other_member_come_back_as_they_are(clients: list[Client]) -> None:
    for client in clients:
        for name in NAMES:
            with pytest.raises(InvalidRequest, match="input 'x' of model '.*' has the shape"):
                client.infer(name, {"x": np.ones((1, 63), np.float16)})
        with pytest.raises(ModelNotFound, match="model 'third' is not served here"):
            client.infer("third", {"x": X})


def test_a_token_for_one_model_sees_no_other_one(cluster: LocalCluster, tokens: Tokens) -> None:
    for agent in cluster.agents:
        with Client(agent.address, token=tokens.one, timeout_s=WAIT_S, retries=ONCE) as client:
            client.infer("first", {"x": X})
            assert [one.name for one in client.models()] == ["first"]
            assert [one.name for one in client.statistics()] == ["first"]
            assert not client.is_ready("second")
            with pytest.raises(ModelNotFound, match="model 'second' is not served here"):
                client.infer("second", {"x": X})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(agent, "/v2/models/second/infer", tokens.one, b"{}")
