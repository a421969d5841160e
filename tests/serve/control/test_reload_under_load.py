"""Models are replaced while clients use them: nobody notices."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from serve.control.options import ControlMode
from tests.models import save_mlp
from tests.serve.control.controlled import ask, controlled_server, wait_for
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import running_server

RELOADS = 20
CLIENTS = 4


class Load:
    """Clients that ask one after the other until they are stopped.

    Attributes:
        answers: what they got, and from which version.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._asked = threading.Condition()
        self.answers: list[tuple[str, tuple[float, ...]]] = []

    def run(self) -> None:
        x = triton.InferInput("x", [1, 64], "FP16").set_data_from_numpy(np.ones((1, 64), np.float16))
        with triton.InferenceServerClient(self._address) as client:
            while not self._stop.is_set():
                result = client.infer("mlp", [x], client_timeout=20)
                answer = (result.get_response().model_version, tuple(float(v) for v in result.as_numpy("y")[0]))
                with self._asked:
                    self.answers.append(answer)
                    self._asked.notify_all()

    def wait_for_more(self, count: int) -> None:
        """Until so many more answers have come."""
        with self._asked:
            enough = len(self.answers) + count
            assert self._asked.wait_for(lambda: len(self.answers) >= enough, 20)

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def under_load(address: str) -> Iterator[Load]:
    load = Load(address)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(load.run) for _ in range(CLIENTS)]
        try:
            yield load
        finally:
            load.stop()
    for client in clients:
        client.result()  # raises what the client met


def test_twenty_reloads_fail_no_request(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    with (
        controlled_server(tmp_path, ControlMode.EXPLICIT, load_at_start=("mlp",)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        expected = tuple(ask(client))
        with under_load(server.address) as load:
            for reload in range(RELOADS):
                load.wait_for_more(2 * CLIENTS)
                if reload % 2:
                    client.load_model("mlp", config=f'{{"max_batch_size": {reload + 2}}}')  # the same version, another way
                else:
                    save_mlp(tmp_path / "mlp" / str(reload + 2) / "model.onnx")
                    client.load_model("mlp")
            load.wait_for_more(2 * CLIENTS)
    assert {answer for _, answer in load.answers} == {expected}
    assert {version for version, _ in load.answers} >= {"1", str(RELOADS)}


def test_a_broken_version_under_load_is_not_noticed_either(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    (tmp_path / "mlp" / "2").mkdir()
    (tmp_path / "mlp" / "2" / "model.onnx").write_bytes(b"this is no model")
    specific = '{"version_policy": {"specific": {"versions": [1]}}}'
    with (
        controlled_server(tmp_path, ControlMode.EXPLICIT) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        client.load_model("mlp", config=specific)
        with under_load(server.address) as load:
            for _ in range(5):
                load.wait_for_more(CLIENTS)
                with pytest.raises(InferenceServerException, match="mlp/2/model.onnx: is not"):
                    client.load_model("mlp")
            load.wait_for_more(CLIENTS)
    assert {version for version, _ in load.answers} == {"1"}


def test_an_unloaded_model_answers_what_it_had_taken(tmp_path: Path) -> None:
    backend = HeldBackend(held=True)
    x = triton.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
    with (
        running_server(lambda: [held_model(backend)]) as server,
        triton.InferenceServerClient(server.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        taken = pool.submit(client.infer, "held", [x])
        assert backend.entered.wait(20)
        (leaving,) = server.call(lambda: server.core.replace("held", []))
        assert [(m.version, m.state) for m in client.get_model_repository_index().models] == [("1", "UNLOADING")]
        with pytest.raises(InferenceServerException, match="model 'held' is not served now"):
            client.infer("held", [x])
        assert not leaving.done()
        backend.release.set()
        assert taken.result(20).as_numpy("y").tolist() == [[2]]
        wait_for(server, [("held", "1", "UNAVAILABLE", "unloaded")])
        assert leaving.done()


def test_what_was_replaced_is_freed_without_the_collectors_help(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    with (
        controlled_server(tmp_path, ControlMode.EXPLICIT, load_at_start=("mlp",)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        ask(client)
        model, backend = server.call(
            lambda: (weakref.ref(server.core.model("mlp")), weakref.ref(server.core.model("mlp").backends[0]))
        )
        gc.disable()
        try:
            client.load_model("mlp", config='{"max_batch_size": 3}')
            ask(client)
            client.unload_model("mlp")
            client.load_model("mlp")
            server.call(lambda: None)
            assert (model(), backend()) == (None, None)
        finally:
            gc.enable()
