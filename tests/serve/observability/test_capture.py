"""Captured requests: what clients sent in every way is on the disk, within its bound, and no answer waits for it."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.shared_memory import SharedMemory as SystemMemory
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.captured_requests import CapturedMessage, CapturedRequest, read_capture
from halfserve.protos.datatypes import DATATYPES
from halfserve.serve.engine.errors import FailedPreconditionError
from halfserve.serve.observability.capture import MAX_WAITING_BYTES
from halfserve.serve.observability.capture_folder import MARKER, CaptureFolder
from halfserve.serve.observability.observe_options import ObserveOptions
from tests.captured import START_S, captured
from tests.models import save_mlp
from tests.serve.conftest import load_repository
from tests.serve.ensemble_folders import CHAIN, save_add, save_ensemble
from tests.serve.fleet.local_processes import processes
from tests.serve.http.running_http import running_http
from tests.serve.observability.conftest import Serving, index
from tests.serve.running_server import WAIT_S, RunningServer, running_server

INFER = "/inference.GRPCInferenceService/ModelInfer"
TEXTS = np.array([["über".encode(), b"\x00"]], object)


def everything(folder: Path) -> ObserveOptions:
    return ObserveOptions(capture=folder, capture_share=1)


def of_all_types() -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of the model "echo_types"."""
    types = [row for row in DATATYPES if row.numpy is not None]
    return {f"in_{row.wire}": TEXTS if row.wire == "BYTES" else np.array([[0, 1, 1]]).astype(row.numpy) for row in types}


def sent(arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[Any]:
    return [
        triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)
        for name, array in arrays.items()
    ]


def rows(value: float) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of the model "mlp"."""
    return {"x": np.full((2, 64), value, np.float16)}


def same(read: CapturedRequest, given: Mapping[str, np.ndarray[Any, Any]]) -> bool:
    return read.inputs.keys() == given.keys() and all(
        array.dtype == given[name].dtype and np.array_equal(array, given[name]) for name, array in read.inputs.items()
    )


def figure(server: RunningServer, name: str) -> float:
    return server.core.figures.readings[f"halfserve_capture{name}"].read()


def test_requests_are_captured_as_their_clients_sent_them(serving: Serving, tmp_path: Path) -> None:
    folder = tmp_path / "captured"
    with serving(everything(folder)) as server, triton.InferenceServerClient(server.address) as client:
        for number in range(5):  # repeated requests are not parsed by the server
            client.infer("mlp", sent(rows(number)), request_id=f"r{number}", model_version="1", priority=1)
        client.infer("echo_types", sent(of_all_types()), parameters={"user": "é"})
        with pytest.raises(InferenceServerException):
            client.infer("picky", index(7))
        with pytest.raises(InferenceServerException):
            client.infer("mlp", sent({"x": np.zeros((1, 3), np.float16)}))
        client.infer("unbatched", sent({"x": np.zeros(3, np.float32)}), parameters={"halfserve.capture": False})
        assert figure(server, "d_total") == 0  # nothing is counted before it is on the disk
    assert figure(server, "d_total") == 7
    found = read_capture(folder, model="mlp")
    assert [(read.request_id, read.version, read.status, read.latency_ms > 0) for read in found] == [
        (f"r{number}", 1, "OK", True) for number in range(5)
    ]
    assert all(same(read, rows(number)) for number, read in enumerate(found))
    (echoed,) = read_capture(folder, model="echo_types")
    assert same(echoed, of_all_types())
    assert (echoed.parameters, echoed.datatypes["in_BYTES"]) == ({"user": "é"}, "BYTES")
    (failed,) = read_capture(folder, model="picky")
    assert (failed.status, failed.inputs["i"].tolist()) == ("INTERNAL", [[7]])
    assert sorted(path.name for path in folder.iterdir()) == [MARKER, "echo_types", "mlp", "picky"]
    assert {path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))} == {0o700, 0o600}
    assert figure(server, "_bytes") == sum(path.stat().st_size for path in folder.glob("*/*.npz"))


def test_streamed_requests_and_typed_contents_are_captured(serving: Serving, tmp_path: Path) -> None:
    typed = pb.ModelInferRequest(model_name="picky", id="typed")
    typed.inputs.add(name="i", datatype="INT64", shape=[2, 1]).contents.int64_contents.extend([0, 1])
    with serving(everything(tmp_path)) as server, triton.InferenceServerClient(server.address) as client:
        answers: list[Any] = []
        client.start_stream(lambda result, error: answers.append(error or result))
        client.async_stream_infer("mlp", sent(rows(1)), request_id="streamed")
        client.stop_stream()
    with serving(everything(tmp_path)) as server, grpc.insecure_channel(server.address) as channel:
        channel.unary_unary(INFER)(typed.SerializeToString(), timeout=WAIT_S)
    assert len(answers) == 1
    (streamed,) = read_capture(tmp_path, model="mlp")
    assert streamed.request_id == "streamed"
    assert same(streamed, rows(1))
    (read,) = read_capture(tmp_path, model="picky")
    assert same(read, {"i": np.array([[0], [1]])})


def test_requests_over_rest_are_captured(repository: Path, tmp_path: Path) -> None:
    body = {"id": "json", "inputs": [{"name": "x", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]}]}
    private = {**body, "parameters": {"halfserve.capture": False}}
    with (
        running_server(lambda: load_repository(repository)) as server,
        running_http(server, observe=everything(tmp_path)) as rest,
        httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=WAIT_S) as client,
    ):
        for sent_body in (body, private, body):
            assert client.post("/v2/models/unbatched/infer", json=sent_body).status_code == 200
    for read in read_capture(tmp_path):
        assert (read.model, read.request_id) == ("unbatched", "json")
        assert same(read, {"x": np.array([1, 2, 3], np.float32)})
    assert len(read_capture(tmp_path)) == 2


def test_tensors_in_shared_memory_are_copied_before_the_answer(repository: Path, tmp_path: Path) -> None:
    name, given = f"halfserve_capture_{os.getpid()}", rows(0.5)["x"]
    memory = SystemMemory(name, create=True, size=1 << 23)
    tensor = triton.InferInput("x", list(given.shape), "FP16")
    tensor.set_shared_memory("region", given.nbytes)
    try:
        with (
            running_server(lambda: load_repository(repository), shared_memory=True, observe=everything(tmp_path)) as server,
            triton.InferenceServerClient(server.address) as client,
        ):
            client.register_system_shared_memory("region", f"/{name}", memory.size)
            view = memory.buf
            assert view is not None
            for value in (0.5, 2.0):
                view[: given.nbytes] = np.full_like(given, value).tobytes()
                client.infer("mlp", [tensor])
            view[: given.nbytes] = bytes(given.nbytes)
            huge = of_all_types() | {"in_FP32": np.zeros((1, memory.size // 4), np.float32)}
            inputs = sent(huge)
            inputs[list(huge).index("in_FP32")].set_shared_memory("region", memory.size)
            client.infer("echo_types", inputs)
        assert figure(server, "_dropped_total") == 1  # copying so much would hold up the event loop
    finally:
        memory.close()
        memory.unlink()
    assert [same(read, rows(value)) for read, value in zip(read_capture(tmp_path), (0.5, 2.0), strict=True)] == [True, True]


def test_a_model_has_its_own_share(tmp_path: Path) -> None:
    shares = {"never": 'parameters { key: "halfserve.capture" value { string_value: "0" } }', "some": ""}
    shares["always"] = shares["never"].replace('"0"', '"1"')
    for name, setting in shares.items():
        save_mlp(tmp_path / "models" / name / "1" / "model.onnx")
        (tmp_path / "models" / name / "config.pbtxt").write_text(f"max_batch_size: 16 {setting}")
    options = ObserveOptions(capture=tmp_path / "captured", capture_share=0.3)
    with (
        running_server(lambda: load_repository(tmp_path / "models"), observe=options) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        for _ in range(100):  # a fixed step through all requests would always hit the same model
            for name in shares:
                client.infer(name, sent(rows(1)))
    assert not (tmp_path / "captured" / "never").exists()
    assert len(read_capture(tmp_path / "captured" / "always")) == 100
    assert 5 <= len(read_capture(tmp_path / "captured" / "some")) <= 65  # within 5 standard deviations


def test_a_slow_disk_costs_captured_requests_and_no_answers(repository: Path, tmp_path: Path) -> None:
    size, count = 1 << 23, 12
    large = of_all_types() | {"in_FP32": np.zeros((1, size // 4), np.float32)}
    with (
        running_server(lambda: load_repository(repository), observe=everything(tmp_path)) as server,
        (tmp_path / MARKER).open() as held,
        triton.InferenceServerClient(server.address) as client,
    ):
        fcntl.flock(held, fcntl.LOCK_EX)  # as a process holds it that writes for long
        for _ in range(count):
            client.infer("echo_types", sent(large))
        dropped = figure(server, "_dropped_total")
    assert dropped == count - MAX_WAITING_BYTES // (size + 1)
    assert figure(server, "d_total") == len(read_capture(tmp_path)) == count - dropped


def ended(value: float, model: str = "m", size: int = 8) -> CapturedMessage:
    return captured({"x": np.full(size // 8, value)}, value, model=model, size=size)


def test_the_oldest_shards_of_all_processes_and_models_go(tmp_path: Path) -> None:
    bound, size = 100_000, 20_000
    writers = CaptureFolder(tmp_path, bound), CaptureFolder(tmp_path, bound)
    left = tmp_path / "m" / ".000001.npz.1a2b.tmp"
    for number in range(9):
        writers[number % 2].write([ended(number, model="mn"[number % 3 == 0], size=size)])
        left.parent.mkdir(exist_ok=True)
        left.touch()
        sizes = [path.stat().st_size for path in tmp_path.glob("*/*.npz")]
        assert sum(sizes) <= bound
        assert writers[number % 2].size == sum(sizes)
    assert not left.exists() or not left.stat().st_size
    assert sorted(path.name for path in tmp_path.glob("*/*.npz")) == [f"{number:06d}.npz" for number in range(6, 10)]
    assert [read.time_s - START_S for read in read_capture(tmp_path, model="m")] == [5, 7, 8]
    writers[0].write([ended(9, size=2 * bound)])
    assert (writers[0].dropped, writers[0].captured) == (1, 5)
    CaptureFolder(tmp_path, bound).write([ended(10)])  # a later start goes on counting
    assert (tmp_path / "m" / "000010.npz").exists()


def test_a_disk_that_fails_is_named_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = CaptureFolder(tmp_path / "captured", 1 << 20)
    (tmp_path / "captured" / "m").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            folder.write([ended(number), ended(number)])
        (tmp_path / "captured" / "m").unlink()
        folder.write([ended(3)])
    assert (folder.captured, folder.dropped) == (1, 6)
    assert folder.freed_bytes == 7 * ended(0).size
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 2
    assert "File exists; they are answered, but not captured until it can be written" in warnings[0]
    assert warnings[1].endswith("again")


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").touch()
    with pytest.raises(FailedPreconditionError, match=r"has other files, such as 'a\.npz'; expected a new or empty folder"):
        CaptureFolder(tmp_path, 1 << 20)
    with pytest.raises(FailedPreconditionError, match="File exists; choose a folder that this user can write"):
        CaptureFolder(tmp_path / "a.npz", 1 << 20)


def test_processes_share_a_folder_and_capture_what_clients_ask_of_an_ensemble(tmp_path: Path) -> None:
    save_add(tmp_path / "models" / "one", 1)
    save_add(tmp_path / "models" / "ten", 10)
    save_ensemble(tmp_path / "models" / "chain", CHAIN)
    folder, count = tmp_path / "captured", 5
    with processes(tmp_path / "models", "--capture", folder, "--capture-share", "1") as server:
        for number, client in enumerate(server.clients):  # over connections to both processes
            for _ in range(count):
                client.infer("chain", {"x": np.full((1, 4), number, np.float32)})
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
    found = read_capture(folder)
    assert {read.model for read in found} == {"chain"}
    assert sorted(read.inputs["x"][0, 0] for read in found) == sorted([*range(4)] * count)
    assert sorted(path.name for path in folder.glob("*/*.npz")) == ["000001.npz", "000002.npz"]


def test_a_server_does_not_start_without_its_folder(tmp_path: Path) -> None:
    save_mlp(tmp_path / "m.onnx")
    command = [sys.executable, "-m", "halfserve", "serve", str(tmp_path / "m.onnx"), "--cpu", "--capture", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 1
    assert f"requests cannot be captured in {tmp_path}: it has other files, such as 'm.onnx'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
