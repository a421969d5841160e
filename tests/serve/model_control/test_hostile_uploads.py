"""A token that may load models tries to run code on the server, and to read its files."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import Trust
from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.model_control.control_options import ControlMode
from tests.models import save_mlp
from tests.serve.hostile_files import PICKLES, READERS, Payload, reading_model, save_hostile_archive
from tests.serve.http.running_http import running_http
from tests.serve.model_control.controlled import ask, controlled_server
from tests.serve.running_server import RunningServer

Load: TypeAlias = Callable[..., None]
PARTS = "expected an ONNX model, a data file that one names, or text such as labels"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One that takes uploads, and trusts the torch archives of its own repository."""
    runtimes = Runtimes(trust=Trust(torch_archives=True))
    folder = tmp_path_factory.mktemp("repository")
    with controlled_server(folder, ControlMode.EXPLICIT, runtime=runtimes, uploads=True) as server:
        yield server


@pytest.fixture(scope="module", params=["gRPC", "REST"])
def load(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Load]:
    """Triton's own `load_model`."""
    if request.param == "gRPC":
        with triton.InferenceServerClient(server.address) as client:
            yield client.load_model
    else:
        with (
            running_http(server, HttpOptions(port=0)) as rest,
            triton_http.InferenceServerClient(f"127.0.0.1:{rest.port}") as http,
        ):
            yield http.load_model


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that a payload makes."""
    return tmp_path_factory.mktemp("marker") / "ran"


@pytest.fixture(scope="module")
def archives(marker: Path) -> list[bytes]:
    return [save_hostile_archive(marker.with_name("m.pt2"), place, marker).read_bytes() for place in PICKLES]


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    return save_mlp(tmp_path / "mlp.onnx").read_bytes()


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as client:
        yield client


def as_twin() -> str:
    guard = {"halfserve.precision_guard": "fallback", "halfserve.fp32_twin": "fp32/model.onnx"}
    return json.dumps({"parameters": {key: {"string_value": value} for key, value in guard.items()}})


def refused(load: Load, config: str, files: dict[str, bytes]) -> str:
    with pytest.raises(InferenceServerException) as error:
        load("new", config=config, files={f"file:{path}": content for path, content in files.items()})
    return str(error.value.message())


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("1/model.pt2", "{}"),
        ("1/model.onnx", "{}"),
        ("1/model.onnx/model.onnx", "{}"),
        ("1/model.pt", '{"default_model_filename": "model.pt"}'),
        ("1/model.bin", '{"default_model_filename": "model.bin", "backend": "pytorch"}'),
        ("labels.txt", '{"output": [{"name": "y", "label_filename": "labels.txt"}]}'),
        ("1/fp32/model.onnx", as_twin()),
    ],
)
def test_a_torch_archive_is_refused_under_every_name(
    load: Load, archives: list[bytes], marker: Path, model: bytes, name: str, config: str
) -> None:
    good = {} if name.startswith("1/model.onnx") else {"1/model.onnx": model}
    for archive in archives:
        text = refused(load, config, {name: archive, **good})
        assert not marker.exists(), "the server ran it"
        what = "a zip archive, as torch writes them, which can run code when it is loaded"
        assert text.endswith(f"file {name!r} is {what}; {PARTS}; put other files into the repository itself")


def test_a_torch_archive_is_refused_as_data_of_a_model(load: Load, archives: list[bytes], marker: Path) -> None:
    text = refused(load, "{}", {"1/model.onnx": reading_model("initializer", "w.bin"), "1/w.bin": archives[0]})
    assert "file '1/w.bin' is a zip archive" in text
    assert not marker.exists()


@pytest.mark.parametrize("name", ["1/model.onnx", "1/model.pt", "labels.txt"])
def test_a_pickle_is_refused_under_every_name(load: Load, marker: Path, name: str) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        text = refused(load, "{}", {name: pickle.dumps(Payload(marker), protocol=protocol)})
        assert f"file {name!r} is a pickle, which can run code when it is loaded; {PARTS}" in text
        assert not marker.exists()


@pytest.mark.parametrize("content", [b"\x00", b"\xff\xfe", b"\x7fELF\x02\x01\x01\x00"])
def test_a_data_file_that_no_model_names_is_refused(load: Load, model: bytes, content: bytes) -> None:
    text = refused(load, "{}", {"1/model.onnx": model, "1/weights.bin": content})
    assert f"file '1/weights.bin' is no ONNX model; {PARTS}" in text


def test_a_model_is_served_with_its_data_files_and_labels(
    load: Load, client: triton.InferenceServerClient, model: bytes, tmp_path: Path
) -> None:
    load("new", config="{}", files={"file:1/model.onnx": model})
    answer = ask(client, "new")
    onnx.save(onnx.load_from_string(model), tmp_path / "m.onnx", save_as_external_data=True, location="w", size_threshold=0)
    labels = [f"Straße {number}" for number in range(10)]
    output = {"name": "y", "data_type": "TYPE_FP16", "dims": [10], "label_filename": "labels.txt"}
    files = {"1/model.onnx": (tmp_path / "m.onnx").read_bytes(), "1/w": (tmp_path / "w").read_bytes()}
    files["labels.txt"] = "\n".join(labels).encode()
    config = json.dumps({"max_batch_size": 4, "output": [output]})
    load("new", config=config, files={f"file:{path}": content for path, content in files.items()})
    assert ask(client, "new") == answer


@pytest.mark.parametrize("place", READERS)
def test_an_uploaded_model_reads_nothing_of_the_server(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "secret").write_bytes(b"TOP-SECRET-BYTES" * 16)
    monkeypatch.chdir(tmp_path)
    for location in ("secret", str(tmp_path / "secret"), "../../../secret"):
        text = refused(load, "{}", {"1/model.onnx": reading_model(place, location)})
        assert "keeps weights in" in text or "its external data cannot be read" in text


def with_parameter(key: str, value: str) -> dict[str, Any]:
    return {"parameters": {key: {"string_value": value}}}


def with_accelerator(name: str, key: str, value: str) -> dict[str, Any]:
    accelerator = {"name": name, "parameters": {key: value}}
    return {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [accelerator]}}}


@pytest.mark.parametrize(
    "config",
    [
        with_parameter("session.collect_node_memory_stats_to_file", "written"),
        with_parameter("session.node_partition_config_file", "written"),
        with_parameter("session.model_external_initializers_file_folder_path", "/etc"),
        with_parameter("session.load_model_format", "ORT"),
        with_accelerator("tensorrt", "trt_extra_plugin_lib_paths", "written"),
        with_accelerator("cuda", "gpu_external_alloc", "1"),
    ],
)
def test_a_config_does_not_have_the_runtime_use_files(
    load: Load, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = refused(load, json.dumps(config), {"1/model.onnx": model})
    assert "has the runtime use files, which no model decides" in text or "names files or memory of the server" in text
    assert not (tmp_path / "written").exists()
