"""Every method of tritonclient.http against our server."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as tc
from tritonclient.utils import InferenceServerException, shared_memory

from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.protocol import shared_memory_regions
from tests.models import mlp_weights, save_mlp
from tests.serve.cuda_emulator.library import driver_of, library_path
from tests.serve.cuda_emulator.owner import owner
from tests.serve.http.running_http import running_http
from tests.serve.model_control.controlled import controlled_server


@pytest.fixture(scope="module")
def client(rest: RestServer) -> Iterator[Any]:
    with tc.InferenceServerClient(f"127.0.0.1:{rest.port}") as client:
        yield client


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    first, second = (w.astype(np.float32) for w in mlp_weights())
    return np.asarray(np.maximum(x.astype(np.float32) @ first, 0) @ second).astype(np.float16)


def tensor(name: str, array: np.ndarray[Any, Any], datatype: str, *, binary: bool = True) -> Any:
    made = tc.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


X = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float16)


def test_the_server_and_its_models_are_ready(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mlp")
    assert client.is_model_ready("mlp", "1")
    assert not client.is_model_ready("mlp", "2")
    assert not client.is_model_ready("nobody")


def test_metadata_and_configuration(client: Any) -> None:
    assert client.get_server_metadata()["name"] == "halfserve"
    metadata = client.get_model_metadata("mlp", "1")
    assert metadata["versions"] == ["1", "3"]
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP16", "shape": [-1, 64]}]
    for ask in (client.get_model_metadata, client.get_model_config):
        with pytest.raises(InferenceServerException, match="model 'mlp' has no version 7; served: 1, 3"):
            ask("mlp", "7")
    config = client.get_model_config("mlp")
    assert config["max_batch_size"] == 16
    assert config["input"][0]["dims"] == [64]


def test_statistics_count(client: Any) -> None:
    def count() -> int:
        (entry,) = client.get_inference_statistics("mlp", "3")["model_stats"]
        return int(entry["inference_stats"]["success"]["count"])

    before = count()
    client.infer("mlp", [tensor("x", X, "FP16")])
    assert count() == before + 1
    names = {entry["name"] for entry in client.get_inference_statistics()["model_stats"]}
    assert names == {"mlp", "echo_types", "picky", "unbatched"}


def test_statistics_have_every_field_of_the_protocol(client: Any) -> None:
    (entry,) = client.get_inference_statistics("mlp", "3")["model_stats"]
    assert set(entry["inference_stats"]) == {
        *("success", "fail", "queue", "compute_input", "compute_infer", "compute_output"),
        *("cache_hit", "cache_miss"),
    }
    assert entry["inference_stats"]["cache_hit"] == {"count": 0, "ns": 0}


def test_the_index_lists_everything(client: Any) -> None:
    index = client.get_model_repository_index()
    runs = {"halfserve.provider": "CPUExecutionProvider", "halfserve.precision": "fp32 (the fp16 model, upcast)"}
    assert {"name": "mlp", "version": "3", "state": "READY", "reason": "", "properties": runs} in index


@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_fp16_goes_both_ways(client: Any, coding: str | None, binary: bool) -> None:
    outputs = [tc.InferRequestedOutput("y", binary_data=binary)]
    result = client.infer(
        "mlp",
        [tensor("x", X, "FP16")],
        outputs=outputs,
        request_id="17",
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )
    np.testing.assert_allclose(result.as_numpy("y"), expected(X), rtol=2e-3, atol=2e-3)
    assert result.as_numpy("y").dtype == np.float16
    assert result.get_response()["id"] == "17"


def test_large_answers_are_compressed(client: Any) -> None:
    x = np.zeros((1, 200_000), np.float32)
    inputs = [tensor("in_FP32", x, "FP32")]
    rest = [(n, w) for n, w in everything().items() if n != "in_FP32"]
    inputs += [tensor(name, array, name.removeprefix("in_")) for name, array in rest]
    result = client.infer(
        "echo_types",
        inputs,
        outputs=[tc.InferRequestedOutput("out_FP32", binary_data=True)],
        request_compression_algorithm="gzip",
        response_compression_algorithm="gzip",
    )
    np.testing.assert_array_equal(result.as_numpy("out_FP32"), x)


def everything() -> dict[str, np.ndarray[Any, Any]]:
    """One input of every datatype for "echo_types"."""
    kinds = {"BOOL": "?", "FP16": "f2", "FP32": "f4", "FP64": "f8"}
    kinds |= {
        f"{prefix}INT{bits}": f"{kind}{bits // 8}" for prefix, kind in (("", "i"), ("U", "u")) for bits in (8, 16, 32, 64)
    }
    arrays: dict[str, np.ndarray[Any, Any]] = {f"in_{name}": np.array([[0, 1, 1]], kind) for name, kind in kinds.items()}
    arrays["in_BYTES"] = np.array([["a", "", "ä€"]], object)
    return arrays


@pytest.mark.parametrize("sent", [True, False], ids=["sent-binary", "sent-json"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked-binary", "asked-json"])
def test_every_datatype_goes_both_ways(client: Any, sent: bool, asked: bool) -> None:
    arrays = everything()
    inputs = [
        tensor(name, array, wire, binary=sent or wire == "FP16")  # tritonclient cannot write FP16 as JSON
        for name, array in arrays.items()
        for wire in [name.removeprefix("in_")]
    ]
    outputs = [tc.InferRequestedOutput(name.replace("in_", "out_"), binary_data=asked) for name in arrays]
    result = client.infer("echo_types", inputs, outputs=outputs)
    for name, array in arrays.items():
        got = result.as_numpy(name.replace("in_", "out_"))
        if name == "in_BYTES":
            got = np.array([e if isinstance(e, str) else e.decode() for e in got.ravel()], object).reshape(got.shape)
        np.testing.assert_array_equal(got, array)


def test_classes_are_named(client: Any) -> None:
    result = client.infer("mlp", [tensor("x", X, "FP16")], outputs=[tc.InferRequestedOutput("y", class_count=2)])
    best = expected(X)[0].argmax()
    assert result.as_numpy("y").shape == (3, 2)
    assert result.as_numpy("y")[0, 0].decode().split(":")[1] == str(best)


def test_tensors_may_lie_in_shared_memory(client: Any) -> None:
    x = np.arange(3, dtype=np.float32)
    inward = shared_memory.create_shared_memory_region("in", "/halfserve_test_http_in", x.nbytes)
    outward = shared_memory.create_shared_memory_region("out", "/halfserve_test_http_out", x.nbytes)
    try:
        shared_memory.set_shared_memory_region(inward, [x])
        client.register_system_shared_memory("in", "/halfserve_test_http_in", x.nbytes)
        client.register_system_shared_memory("out", "/halfserve_test_http_out", x.nbytes)
        names = {region["name"] for region in client.get_system_shared_memory_status()}
        assert names == {"in", "out"}
        given, wanted = tc.InferInput("x", [3], "FP32"), tc.InferRequestedOutput("y")
        given.set_shared_memory("in", x.nbytes)
        wanted.set_shared_memory("out", x.nbytes)
        result = client.infer("unbatched", [given], outputs=[wanted])
        assert result.get_output("y") == {"name": "y", "datatype": "FP32", "shape": [3]}
        np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(outward, np.float32, [3]), x + x)
        client.unregister_system_shared_memory("in")
        with pytest.raises(InferenceServerException, match="region 'in' is not registered"):
            client.get_system_shared_memory_status("in")
        client.unregister_system_shared_memory()
        assert client.get_system_shared_memory_status() == []
    finally:
        for region in (inward, outward):
            shared_memory.destroy_shared_memory_region(region)


def test_tensors_may_lie_on_a_cuda_device(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library_path("emulated", tmp_path)
    driver = driver_of(path)
    monkeypatch.setattr(shared_memory_regions, "cuda_driver", lambda: driver)
    x = np.array([1, 2, 3], np.float32)
    with owner(path, 2 * x.nbytes) as memory:
        memory.write(0, x.tobytes())
        client.register_cuda_shared_memory("c", b64encode(memory.handle).decode(), 0, 2 * x.nbytes)
        assert client.get_cuda_shared_memory_status("c") == [{"name": "c", "device_id": 0, "byte_size": 24}]
        given, wanted = tc.InferInput("x", [3], "FP32"), tc.InferRequestedOutput("y")
        given.set_shared_memory("c", x.nbytes)
        wanted.set_shared_memory("c", x.nbytes, offset=x.nbytes)
        client.infer("unbatched", [given], outputs=[wanted])
        assert memory.read(x.nbytes, x.nbytes) == (x + x).tobytes()
        client.unregister_cuda_shared_memory("c")
        assert client.get_cuda_shared_memory_status() == []
        with pytest.raises(InferenceServerException, match=r"\[400\] .*; expected the 64 bytes"):
            client.register_cuda_shared_memory("c", b64encode(b"handle").decode(), 0, 64)


@pytest.mark.usefixtures("log_settings_of_one_test")
def test_settings_are_read_and_changed(client: Any) -> None:
    assert client.get_log_settings()["log_info"] is True
    before = client.get_log_settings().get("access_log_every", 100)
    for every in (before + 7, before):
        assert client.update_log_settings({"access_log_every": every})["access_log_every"] == every
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_trace_settings("mlp", {"trace_rate": "500"})["trace_rate"] == "500"
    assert client.update_trace_settings("mlp", {"trace_rate": None})["trace_rate"] == client.get_trace_settings()["trace_rate"]
    with pytest.raises(InferenceServerException, match=r"\[400\]"):
        client.update_log_settings({"no_such_setting": True})


def test_models_are_not_loaded_by_request_where_that_is_off(client: Any) -> None:
    for name in ("load_model", "unload_model"):
        with pytest.raises(InferenceServerException, match=r"\[503\] models are not loaded by request here"):
            getattr(client, name)("mlp")


def test_models_are_loaded_and_unloaded_by_their_names(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_mlp(tmp_path / name / "1" / "model.onnx")
    with (
        controlled_server(tmp_path, ControlMode.EXPLICIT) as server,
        running_http(server) as rest,
        tc.InferenceServerClient(f"127.0.0.1:{rest.port}") as client,
    ):
        client.load_model("one")
        client.load_model("two", config='{"max_batch_size": 4}')
        assert [client.is_model_ready(name) for name in ("one", "two")] == [True, True]
        assert client.get_model_config("two")["max_batch_size"] == 4
        client.unload_model("one")
        assert [client.is_model_ready(name) for name in ("one", "two")] == [False, True]


def test_errors_reach_the_user(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"\[404\] model 'nobody' is not served here"):
        client.infer("nobody", [tensor("x", X, "FP16")])
    with pytest.raises(InferenceServerException, match=r"\[400\] input 'x' has datatype 'FP32', expected 'FP16'"):
        client.infer("mlp", [tensor("x", X.astype(np.float32), "FP32")])
    with pytest.raises(InferenceServerException, match=r"\[500\] the model failed on this request"):
        client.infer("picky", [tensor("i", np.array([[9]], np.int64), "INT64")])


def test_requests_may_run_side_by_side(client: Any) -> None:
    waiting = [client.async_infer("mlp", [tensor("x", X[i : i + 1], "FP16")]) for i in range(3)]
    for row, request in enumerate(waiting):
        np.testing.assert_allclose(request.get_result().as_numpy("y"), expected(X[row : row + 1]), rtol=2e-3, atol=2e-3)
