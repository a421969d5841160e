"""Python models that say themselves whether they are ready."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton_http
from tritonclient.grpc import InferenceServerClient

from halfserve.serve.backends.python import readiness
from tests.serve.backends.python.python_models import save_python_model, serving
from tests.serve.backends.python.test_python_models import infer
from tests.serve.http.running_http import running_http
from tests.serve.running_server import TRANSPORTS

SAYS = """
import asyncio

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]

    DEF is_ready(self):
        return ANSWER
"""
ASKS = """
class TritonPythonModel:
    def execute(self, requests):
        ready = [pb_utils.is_model_ready(name) for name in ("yes", "no")]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(ready, np.float32))])]
"""
X = np.ones(2, np.float32)


def save(root: Path, name: str, answer: str, *, is_async: bool = False) -> None:
    save_python_model(root, name, SAYS.replace("ANSWER", answer).replace("DEF", "async def" if is_async else "def"))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_model_says_whether_it_is_ready(tmp_path: Path, transport: str, caplog: pytest.LogCaptureFixture) -> None:
    answers = {"yes": "True", "no": "False", "fails": "[][0]", "counts": "1", "later": "await asyncio.sleep(0, True)"}
    for name, answer in answers.items():
        save(tmp_path, name, answer, is_async=name == "later")
    save_python_model(tmp_path, "asks", ASKS)
    with (
        serving(tmp_path, TRANSPORTS[transport]) as server,
        running_http(server) as rest,
        InferenceServerClient(server.address) as client,
        triton_http.InferenceServerClient(f"127.0.0.1:{rest.port}") as over_http,
    ):
        for name in answers:
            for one in (client, over_http, client):
                assert one.is_model_ready(name) == (name in {"yes", "later"}), name
            np.testing.assert_array_equal(infer(client, name, X), X)
        assert client.is_server_ready()
        assert infer(client, "asks", X).tolist() == [1, 0]
    assert sorted(record.getMessage() for record in caplog.records if "is_ready" in record.getMessage()) == [
        "counts/1: is_ready failed: it returned int, expected bool",
        "fails/1: is_ready failed: IndexError: list index out of range",
    ]


def test_a_model_that_does_not_say_in_time_is_not_ready_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "READY_S", 0.1)
    asked, end = tmp_path / "asked", tmp_path / "end"
    has_ended = f"iter(lambda: os.path.exists({str(end)!r}), True)"
    waits = f"[open({str(asked)!r}, 'a').write('.'), [time.sleep(0.01) for _ in {has_ended}]] != []"
    save(tmp_path / "models", "slow", waits)
    with serving(tmp_path / "models") as server, InferenceServerClient(server.address) as client:
        for _ in range(2):
            assert not client.is_model_ready("slow")
            np.testing.assert_array_equal(infer(client, "slow", X), X)
        assert asked.read_text() == ".", "the first question has no answer yet"
        end.touch()
        while not client.is_model_ready("slow"):
            pass


def test_a_model_whose_process_has_ended_is_not_ready(tmp_path: Path) -> None:
    save(tmp_path, "ends", "os._exit(3)")
    with serving(tmp_path) as server, InferenceServerClient(server.address) as client:
        assert not client.is_model_ready("ends")
