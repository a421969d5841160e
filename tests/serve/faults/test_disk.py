"""A disk that is full, and files that are gone, while clients use the server."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from onnx import TensorProto, helper

from serve.client import InferenceClient, InvalidRequest, ModelNotFound
from tests.models import save_mlp, save_model
from tests.serve.faults.load import Load
from tests.serve.faults.processes import ServerProcess

SIDE = 2048  # 8 MiB of weights


@contextmanager
def full_disk(server: ServerProcess, client: InferenceClient, spare_bytes: int) -> Iterator[None]:
    """No file of the server's gets longer than the access log is now, but for some bytes."""
    server.until(server.access_log.exists, client.is_live)
    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (server.access_log.stat().st_size + spare_bytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_log_lines_and_nothing_else(mad_process: ServerProcess, load: Load, client: InferenceClient) -> None:
    with full_disk(mad_process, client, spare_bytes=100):  # less than a line: one is torn
        mad_process.until(lambda: "access log" in mad_process.error_text(), client.is_live)
        load.wait_for_more()
    full = mad_process.access_log.stat().st_size
    mad_process.until(lambda: b"}\n" in mad_process.access_log.read_bytes()[full:], client.is_live)
    assert "access log: " in mad_process.error_text()
    assert "lost: [Errno 27] File too large" in mad_process.error_text()
    written = mad_process.access_log.read_bytes()
    # A line that could not be finished is ended before the next one; there is none if lines came just before the disk was full.
    assert written[:full].endswith(b"\n") or written[full:].startswith(b"\n")
    assert json.loads(written[full:].lstrip(b"\n").split(b"\n")[0])["model"]


def test_a_model_can_be_loaded_while_the_disk_is_full(mad_process: ServerProcess, load: Load, client: InferenceClient) -> None:
    load.wait_for_more()
    second = mad_process.repository / "picky" / "2"
    shutil.copytree(mad_process.repository / "picky" / "1", second)
    try:
        with full_disk(mad_process, client, spare_bytes=100):
            client.load_model("picky")
            assert client.infer_detailed("picky", {"i": np.array([[1]])}).version == "2"
    finally:
        shutil.rmtree(second)
        client.load_model("picky")


def test_a_model_that_the_disk_has_no_room_for_is_refused_and_the_old_one_serves(
    mad_process: ServerProcess, load: Load, client: InferenceClient
) -> None:
    load.wait_for_more()
    version = mad_process.repository / "picky" / "2"
    weights = {"w": np.zeros((SIDE, SIDE), np.float16)}
    nodes, half = [helper.make_node("MatMul", ["x", "w"], ["y"])], TensorProto.FLOAT16
    save_model(version / "model.onnx", nodes, [("x", half, ["batch", SIDE])], [("y", half, ["batch", SIDE])], weights)
    try:
        with (
            full_disk(mad_process, client, spare_bytes=100),
            pytest.raises(InvalidRequest, match=r"picky/2/model.onnx: its weights could not be written .*File too large"),
        ):
            client.load_model("picky")
        assert client.infer_detailed("picky", {"i": np.array([[1]])}).version == "1"
    finally:
        shutil.rmtree(version)
        client.load_model("picky")


def test_a_model_folder_that_is_deleted_goes_on_serving(
    mad_process: ServerProcess, load: Load, client: InferenceClient
) -> None:
    folder = mad_process.repository / "mlp"
    shutil.rmtree(folder)
    try:
        load.wait_for_more()
        with pytest.raises(ModelNotFound, match="the repository has no model 'mlp'"):
            client.load_model("mlp")
        load.wait_for_more()
        (entry,) = [model for model in client.models() if model.name == "mlp"]
        assert entry.state == "READY"
    finally:
        save_mlp(folder / "1" / "model.onnx")
    client.load_model("mlp")
