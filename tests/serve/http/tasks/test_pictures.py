"""Picture files as requests: /classify as Hugging Face's clients ask it, and BYTES tensors as tritonclient sends them."""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from huggingface_hub import InferenceClient
from numpy.typing import NDArray
from PIL import Image
from tritonclient.utils import InferenceServerException

from halfserve.installation import install_hint
from halfserve.protos.pictures import PREPROCESSING, prepared_pixels
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.security.memory_budget import MemoryBudget
from tests.serve.conftest import load_repository
from tests.serve.http.running_http import running_http
from tests.serve.http.tasks.small_picture_models import COLOURS, PHOTO, PREPARATION, encoded, save_picture_model
from tests.serve.http.tasks.small_text_models import setting
from tests.serve.http.tasks.test_text_routes import served
from tests.serve.running_server import RunningServer, running_server

CLASSIFY = "/v2/models/net/classify"
FORMS = ("JPEG", "PNG", "WEBP")
LYING = Image.Exif()
LYING[0x112] = 6


@pytest.fixture(scope="module")
def picture_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models "net", "several" of several labels, "vectors" for another task, and "old" without preprocessing.json."""
    repository = tmp_path_factory.mktemp("picture-models")
    save_picture_model(repository)
    save_picture_model(repository, "several", settings=setting("halfserve.label_scores", "sigmoid"))
    save_picture_model(repository, "vectors", "image-embeddings")
    (save_picture_model(repository, "old") / "1" / PREPROCESSING).unlink()
    return repository


@pytest.fixture(scope="module")
def picture_server(picture_repository: Path) -> Iterator[RunningServer]:
    with running_server(lambda: load_repository(picture_repository)) as running:
        yield running


@pytest.fixture(scope="module")
def rest(picture_server: RunningServer) -> Iterator[RestServer]:
    with running_http(picture_server) as running:
        yield running


@pytest.fixture
def client(rest: RestServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=60) as client:
        yield client


def logits_of(data: bytes) -> NDArray[np.float64]:
    found: NDArray[np.float64] = prepared_pixels(data, PREPARATION).mean(axis=(0, 1)) / 32
    return found


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits)
    result: NDArray[np.float64] = powers / powers.sum()
    return result


def ranked(scores: NDArray[np.float64]) -> list[tuple[str, Any]]:
    return [(COLOURS[index], pytest.approx(scores[index], abs=1e-5)) for index in np.argsort(-scores)]


def pairs(answer: Any) -> list[tuple[str, float]]:
    return [(entry["label"], entry["score"]) for entry in answer]


@pytest.mark.parametrize("form", FORMS)
def test_a_picture_file_as_the_body_is_classified(form: str, client: httpx.Client) -> None:
    data = encoded(form, exif=LYING)
    answer = client.post(CLASSIFY, content=data, headers={"content-type": "application/x-www-form-urlencoded"})
    assert answer.status_code == 200
    assert pairs(answer.json()) == ranked(softmax(logits_of(data)))


def test_hugging_faces_client_gets_classes_with_scores(rest: RestServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded("PNG"))
    own = InferenceClient(model=f"http://127.0.0.1:{rest.port}{CLASSIFY}")
    expected = ranked(softmax(logits_of(encoded("PNG"))))
    assert pairs(own.image_classification(tmp_path / "a.png")) == expected
    assert pairs(own.image_classification(encoded("PNG"), top_k=2)) == expected[:2]
    raw = ranked(logits_of(encoded("PNG")))
    assert pairs(own.image_classification(encoded("PNG"), function_to_apply="none")) == raw


def test_classes_of_a_model_of_several_labels_have_scores_by_themselves(client: httpx.Client) -> None:
    answer = client.post("/v2/models/several/versions/1/classify", content=encoded("PNG"))
    assert pairs(answer.json()) == ranked(1 / (1 + np.exp(-logits_of(encoded("PNG")))))


REFUSED: dict[str, tuple[str, bytes, int, str]] = {
    "no picture": ("net", b"GIF89a", 400, "has a picture that is no JPEG, PNG or WebP picture that can be read"),
    "nothing": ("net", b"", 400, "has a picture that is no JPEG, PNG or WebP picture that can be read"),
    "cut short": ("net", encoded("JPEG")[:-20], 400, "has a picture that cannot be decoded: .*; expected a whole file"),
    "too large": ("net", encoded("PNG", Image.new("1", (9000, 9000))), 400, "has 9000 by 9000 pixels, expected at most"),
    "another task": ("vectors", encoded("PNG"), 400, "is for image-embeddings, expected one for image-classification"),
    "not prepared": ("old", encoded("PNG"), 409, "'old' has no preprocessing.json, which says .*; export it again, or send"),
    "unknown": ("none", encoded("PNG"), 404, "no model 'none' is served here|model 'none' is not served here"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_classified_is_refused_in_one_line(case: str, client: httpx.Client) -> None:
    name, body, status, message = REFUSED[case]
    answer = client.post(f"/v2/models/{name}/classify", content=body)
    assert answer.status_code == status
    with pytest.raises(ValueError, match=message):
        raise ValueError(answer.json()["error"])


def test_a_form_with_a_picture_is_refused_with_what_to_send(client: httpx.Client) -> None:
    answer = client.post("/v2/models/net/classify", files={"file": encoded("PNG")})
    assert "the body is a form, expected the picture file itself" in answer.json()["error"]


WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([1], "the body is a list of 1, expected a JSON object"),
    "no picture": ({}, "'inputs' is null, expected a text"),
    "a link": ({"inputs": "https://a/b.jpg"}, "expected the bytes of a picture in base64"),
    "parameters": ({"inputs": "aaaa", "parameters": 3}, "'parameters' is 3, expected an object"),
    "count": ({"inputs": "aaaa", "parameters": {"top_k": 0}}, "'top_k' is 0, expected a whole number"),
    "function": ({"inputs": "aaaa", "parameters": {"function_to_apply": "exp"}}, 'is "exp", expected one of sigmoid'),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_json_body_is_refused_in_one_line(case: str, client: httpx.Client) -> None:
    content, message = WRONG[case]
    answer = client.post(CLASSIFY, json=content)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_a_picture_beyond_the_memory_budget_is_refused(picture_repository: Path) -> None:
    budget = MemoryBudget(2**20)
    with running_server(lambda: load_repository(picture_repository)) as server, running_http(server, budget=budget) as rest:
        server.call(lambda: server.core.pictures.bound(2**20, budget.share(is_known=True)))
        url = f"http://127.0.0.1:{rest.port}{CLASSIFY}"
        answer = httpx.post(url, content=encoded("PNG", Image.new("L", (400, 400))), timeout=60)
        assert "400 by 400 pixels, which take 2 MiB while they are decoded" in answer.json()["error"]
        assert "--max-buffered-mib" in answer.json()["error"]
        assert httpx.post(url, content=encoded("PNG"), timeout=60).status_code == 200
        server.until(lambda: not budget.held_bytes)


def test_a_server_without_pillow_says_what_to_install(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded("PNG")
    monkeypatch.setitem(sys.modules, "PIL", None)
    answer = client.post(CLASSIFY, content=data)
    assert answer.status_code == 501
    assert answer.json()["error"].endswith(install_hint("pictures"))


def test_a_preparation_that_does_not_fit_its_model_is_refused(tmp_path: Path) -> None:
    path = save_picture_model(tmp_path) / "1" / PREPROCESSING
    path.write_bytes(PREPARATION.to_bytes().replace(b'"height": 8', b'"height": 7'))
    with pytest.raises(ModelLoadError, match=r"makes pixels of shape \[7, 8, 3\], which 0 inputs take, expected 1"):
        load_repository(tmp_path)


def test_a_broken_preparation_belongs_to_others_where_the_task_does(tmp_path: Path) -> None:
    path = save_picture_model(tmp_path, task="") / "1" / PREPROCESSING
    path.write_text("{}")
    with served(tmp_path) as client:
        assert "names no task" in client.post(CLASSIFY, content=encoded("PNG")).json()["error"]


PICTURES = [encoded(form) for form in FORMS] + [encoded("PNG", PHOTO.rotate(90, expand=True))]


@pytest.mark.parametrize("kind", ["grpc", "http"])
@pytest.mark.parametrize("shape", [(4,), (4, 1)])
@pytest.mark.parametrize("name", ["net", "vectors"])
def test_tritonclient_sends_picture_files(
    kind: str, shape: tuple[int, ...], name: str, rest: RestServer, picture_server: RunningServer
) -> None:
    module: Any = tritonclient.grpc if kind == "grpc" else tritonclient.http
    tensor = module.InferInput("image", list(shape), "BYTES")
    tensor.set_data_from_numpy(np.array(PICTURES, object).reshape(shape))
    target = picture_server.address if kind == "grpc" else f"127.0.0.1:{rest.port}"
    with module.InferenceServerClient(target) as own:
        answer = own.infer(name, [tensor])
        np.testing.assert_allclose(answer.as_numpy("logits"), [logits_of(data) for data in PICTURES], rtol=1e-5)
        wanted = module.InferRequestedOutput("logits", class_count=1)
        best = own.infer(name, [tensor], outputs=[wanted]).as_numpy("logits").ravel()
    assert [text.decode().split(":")[2] for text in best] == [COLOURS[logits_of(data).argmax()] for data in PICTURES]


@pytest.mark.parametrize(
    ("data", "shape", "message"),
    [
        ([PICTURES[0], b"GIF89a"], [2], "input 'image' has an element 1 that is no JPEG, PNG or WebP picture"),
        (PICTURES[:2], [1, 2], r"input 'image' has shape \[1, 2\], expected \[-1, 1\]"),
        (PICTURES[:1] * 9, [9], "the batch size is 9, expected 1 to 8"),
    ],
)
def test_picture_files_in_a_tensor_are_refused_by_name(
    data: list[bytes], shape: list[int], message: str, picture_server: RunningServer
) -> None:
    tensor = tritonclient.grpc.InferInput("image", shape, "BYTES")
    tensor.set_data_from_numpy(np.array(data, object).reshape(shape))
    with (
        tritonclient.grpc.InferenceServerClient(picture_server.address) as own,
        pytest.raises(InferenceServerException, match=message),
    ):
        own.infer("net", [tensor])


def test_picture_files_as_json_tensors_are_not_taken_without_a_preparation(client: httpx.Client) -> None:
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [b64encode(PICTURES[0]).decode()]}
    answer = client.post("/v2/models/old/infer", json={"inputs": [tensor]})
    assert "has datatype 'BYTES', expected 'UINT8'" in answer.json()["error"]
