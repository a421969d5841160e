"""Picture files over every route while they are decoded: who waits, who does not, and what the log gets."""

from __future__ import annotations

import asyncio
import threading
import warnings
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, current_thread
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin
from tritonclient.utils import InferenceServerException

from halfserve import Client
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from halfserve.protos.pictures import EncodedPicture, PicturePreparation, prepared_pixels
from halfserve.serve.engine.caching.response_cache import ResponseCache
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.protocol.service import INFER_PATH
from tests.serve.conftest import load_repository
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.ensemble_folders import save_ensemble
from tests.serve.http.running_http import running_http
from tests.serve.http.tasks.small_picture_models import COLOURS, PHOTO, PREPARATION, encoded, save_picture_model
from tests.serve.http.tasks.test_pictures import CLASSIFY, PICTURES, logits_of
from tests.serve.model_control.controlled import controlled_server
from tests.serve.running_server import TRANSPORTS, WAIT_S, MakeTransport, RunningServer, running_server


@pytest.fixture(scope="module")
def picture_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models "net" and "vectors"."""
    repository = tmp_path_factory.mktemp("picture-models")
    save_picture_model(repository)
    save_picture_model(repository, "vectors", "image-embeddings")
    return repository


@pytest.fixture(scope="module")
def picture_server(picture_repository: Path) -> Iterator[RunningServer]:
    with running_server(lambda: load_repository(picture_repository)) as running:
        yield running


@pytest.fixture(scope="module")
def rest(picture_server: RunningServer) -> Iterator[RestServer]:
    with running_http(picture_server) as running:
        yield running


class HeldDecoder:
    """Lets no picture be decoded until its release.

    Attributes:
        begun: set when a thread has begun a picture.
        release: lets pictures be decoded.
        threads: names of the threads that decode.
    """

    def __init__(self) -> None:
        self.begun, self.release = Event(), Event()
        self.threads: set[str] = set()


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDecoder]:
    decoder, decode = HeldDecoder(), EncodedPicture.pixels

    def pixels(picture: EncodedPicture, preparation: PicturePreparation) -> NDArray[np.uint8]:
        decoder.threads.add(current_thread().name)
        decoder.begun.set()
        assert decoder.release.wait(WAIT_S)
        return decode(picture, preparation)

    monkeypatch.setattr(EncodedPicture, "pixels", pixels)
    yield decoder
    decoder.release.set()


def send_by_grpc(address: str, rest: str, data: bytes) -> NDArray[np.float32]:
    del rest
    tensor = tritonclient.grpc.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([data], object))
    with tritonclient.grpc.InferenceServerClient(address) as own:
        result: Any = own.infer("net", [tensor])
        answer: NDArray[np.float32] = result.as_numpy("logits")[0]
    return answer


def send_by_stream(address: str, rest: str, data: bytes) -> NDArray[np.float32]:
    del rest
    tensor = tritonclient.grpc.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([data], object))
    answers: SimpleQueue[Any] = SimpleQueue()
    with tritonclient.grpc.InferenceServerClient(address) as own:
        own.start_stream(lambda result, error: answers.put(error or result))
        own.async_stream_infer("net", [tensor])
        answer: NDArray[np.float32] = answers.get(timeout=WAIT_S).as_numpy("logits")[0]
    return answer


def send_contents(address: str, rest: str, data: bytes) -> NDArray[np.float32]:
    """Send the bytes as typed contents."""
    del rest
    message = ModelInferRequest(model_name="net")
    message.inputs.add(name="image", datatype="BYTES", shape=[1]).contents.bytes_contents.append(data)
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(INFER_PATH, ModelInferRequest.SerializeToString, ModelInferResponse.FromString)
        return np.frombuffer(call(message, timeout=WAIT_S).raw_output_contents[0], np.float32)


def send_by_rest(address: str, rest: str, data: bytes) -> NDArray[np.float32]:
    del address
    tensor = tritonclient.http.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([data], object))
    with tritonclient.http.InferenceServerClient(rest, network_timeout=WAIT_S) as own:
        result: Any = own.infer("net", [tensor])
        answer: NDArray[np.float32] = result.as_numpy("logits")[0]
    return answer


def send_to_classify(address: str, rest: str, data: bytes) -> NDArray[np.float32]:
    del address
    body = {"inputs": b64encode(data).decode(), "parameters": {"function_to_apply": "none"}}
    answer = httpx.post(f"http://{rest}{CLASSIFY}", json=body, timeout=WAIT_S).json()
    scores = {entry["label"]: entry["score"] for entry in answer}
    return np.array([scores[colour] for colour in COLOURS], np.float32)


SENDERS = (send_by_grpc, send_by_stream, send_contents, send_by_rest, send_to_classify)
LARGE = encoded("PNG", Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 90, 3), dtype=np.uint8)))  # read late


@pytest.mark.parametrize("send", SENDERS)
@pytest.mark.parametrize("make_transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_others_are_answered_while_a_picture_is_decoded(
    send: Callable[[str, str, bytes], NDArray[np.float32]],
    make_transport: MakeTransport,
    picture_repository: Path,
    decoder: HeldDecoder,
) -> None:
    pixels = np.zeros((1, 8, 8, 3), np.uint8)
    with (
        running_server(lambda: load_repository(picture_repository), make_transport) as server,
        running_http(server) as rest,
        ThreadPoolExecutor(2) as pool,
        Client(server.address) as other,
    ):
        rest_address = f"127.0.0.1:{rest.port}"
        sent = [pool.submit(send, server.address, rest_address, data) for data in (PICTURES[0], LARGE)]
        assert decoder.begun.wait(WAIT_S)
        for model in ("net", "vectors"):
            assert other.infer(model, {"image": pixels}, timeout_s=WAIT_S)["logits"].tolist() == [[0, 0, 0]]
        assert httpx.get(f"http://{rest_address}/v2/health/ready").status_code == 200
        assert server.call(current_thread).name == "server"
        decoder.release.set()
        for one, data in zip(sent, (PICTURES[0], LARGE), strict=True):
            np.testing.assert_allclose(one.result(WAIT_S), logits_of(data), rtol=1e-5)
        server.until(lambda: not server.core.pictures.held_bytes)
    assert {name.partition("-")[0] for name in decoder.threads} - {current_thread().name} == {"pictures"}


def test_a_client_that_has_gone_leaves_nothing_to_decode(picture_server: RunningServer, decoder: HeldDecoder) -> None:
    with tritonclient.grpc.InferenceServerClient(picture_server.address) as own:
        tensor = tritonclient.grpc.InferInput("image", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([PICTURES[0]], object))
        failed = picture_server.call(lambda: picture_server.core.model("net").statistics.totals.fail.count)
        call: Any = own.async_infer("net", [tensor], lambda result, error: None)
        assert decoder.begun.wait(WAIT_S)
        call.cancel()
        picture_server.until(lambda: picture_server.core.model("net").statistics.totals.fail.count > failed)
    decoder.release.set()
    picture_server.until(lambda: not picture_server.core.pictures.held_bytes)


def test_a_timeout_is_answered_while_the_picture_is_being_decoded(
    picture_server: RunningServer, rest: RestServer, decoder: HeldDecoder
) -> None:
    tensor = tritonclient.http.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([PICTURES[0]], object))
    with (
        tritonclient.http.InferenceServerClient(f"127.0.0.1:{rest.port}", network_timeout=WAIT_S) as own,
        pytest.raises(InferenceServerException, match="longer than its timeout allows"),
    ):
        own.infer("net", [tensor], timeout=1000)
    assert not decoder.release.is_set()
    decoder.release.set()
    picture_server.until(lambda: not picture_server.core.pictures.held_bytes)


def test_a_drain_ends_at_its_limit_though_a_picture_is_being_decoded(picture_repository: Path, decoder: HeldDecoder) -> None:
    tensor = tritonclient.grpc.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([PICTURES[0]], object))
    with (
        running_server(lambda: load_repository(picture_repository)) as server,
        tritonclient.grpc.InferenceServerClient(server.address) as own,
    ):
        call: Any = own.async_infer("net", [tensor], lambda result, error: None)
        assert decoder.begun.wait(WAIT_S)

        async def drain() -> bool:
            try:
                await asyncio.wait_for(server.core.drain(), 0.01)
            except TimeoutError:
                await server.core.clean_up()
                return False
            return True

        assert not server.run(drain())
        decoding = [thread for thread in threading.enumerate() if thread.name in decoder.threads]
        assert decoding
        assert all(thread.daemon for thread in decoding)  # they do not keep the process
        call.cancel()
        server.until(lambda: server.core.model("net").statistics.totals.fail.count > 0)
        decoder.release.set()
        server.until(lambda: not server.core.pictures.held_bytes)


BOMBS = {
    "scans": encoded("JPEG", progressive=True)[:-2] + bytes.fromhex("ffda0008010100013f21aa") * 9000 + b"\xff\xd9",
    "text": encoded("PNG", pnginfo=(texts := PngImagePlugin.PngInfo())),
    "cut short": encoded("PNG")[:-40],
    "palette": encoded("PNG", PHOTO.convert("P"), transparency=bytes(range(256))),
    "exif": encoded("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + bytes(range(250))),
}
texts.add_itxt("a", "b" * 2**20, zip=True)


@pytest.mark.parametrize("send", [send_by_grpc, send_by_rest, send_to_classify])
def test_no_picture_writes_more_than_lines_of_the_log(
    send: Callable[[str, str, bytes], NDArray[np.float32]],
    picture_server: RunningServer,
    rest: RestServer,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for data in (*BOMBS.values(), encoded("PNG", pnginfo=texts)):
            with suppress(InferenceServerException, TypeError):  # /classify answers with an error
                send(picture_server.address, f"127.0.0.1:{rest.port}", data)
    assert not [record for record in caplog.records if record.exc_info]
    assert not capfd.readouterr().err


def test_the_response_cache_knows_pixels_whichever_way_they_came(tmp_path: Path) -> None:
    save_picture_model(tmp_path, settings="response_cache { enable: true }")

    def serve_cached() -> None:
        server.core.response_cache = ResponseCache(2**20)
        server.core.replace("net", load_repository(tmp_path))

    with running_server(list) as server:
        server.call(serve_cached)
        first = send_by_grpc(server.address, "", PICTURES[0])
        np.testing.assert_array_equal(send_by_grpc(server.address, "", PICTURES[0]), first)
        with Client(server.address) as own:
            pixels = prepared_pixels(PICTURES[0], PREPARATION)[np.newaxis]
            np.testing.assert_array_equal(own.infer("net", {"image": pixels})["logits"][0], first)
        totals = server.call(lambda: server.core.model("net").statistics.totals)
        assert (totals.cache_miss.count, totals.cache_hit.count) == (1, 2)


def test_an_ensemble_sends_pixels_to_a_model_that_takes_pictures(tmp_path: Path) -> None:
    save_picture_model(tmp_path)
    photo, scores = "photo:UINT8:8,8,3", "scores:FP32:3"
    save_ensemble(tmp_path / "both", ensemble(step("net", "image=photo", "logits=scores"), input=photo, output=scores))
    with controlled_server(tmp_path, ControlMode.NONE) as server, Client(server.address) as own:
        pixels = prepared_pixels(PICTURES[0], PREPARATION)[np.newaxis]
        np.testing.assert_allclose(own.infer("both", {"photo": pixels})["scores"][0], logits_of(PICTURES[0]), rtol=1e-5)
        np.testing.assert_allclose(send_by_grpc(server.address, "", PICTURES[0]), logits_of(PICTURES[0]), rtol=1e-5)
