"""A server whose repository is in object storage."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.storage.repository_copy import RepositoryCopy
from halfserve.serve.storage.storage_options import ObjectStorage
from tests.models import save_mlp, save_table
from tests.s3_server import S3Server, s3_server
from tests.serve.conftest import load_repository
from tests.serve.model_control.controlled import ask, controlled_server, lines, wait_for

QUICKLY: dict[str, Any] = {"poll_interval_s": 0.05, "settle_s": 0.02, "warm_up_budget_s": 0.0}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def mlp(tmp_path: Path) -> bytes:
    return save_mlp(tmp_path / "mlp.onnx").read_bytes()


@pytest.fixture
def storage(tmp_path: Path) -> ObjectStorage:
    return ObjectStorage(url="s3://bucket/models", folder=tmp_path / "cache")


@pytest.mark.long
def test_new_versions_are_followed_and_an_outage_is_one_line(
    s3: S3Server, storage: ObjectStorage, mlp: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    s3.put("models/mlp/1/model.onnx", mlp)
    with (
        controlled_server(storage, ControlMode.POLL, **QUICKLY) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        first = ask(client)
        s3.put("models/mlp/2/notes.txt", b"no version yet")
        s3.put("models/mlp/2/model.onnx", mlp)
        wait_for(server, [("mlp", "2", "READY", "")])

        refused, seen = threading.Event(), []

        def refuse(method: str, path: str) -> int:
            seen.append(path)
            if len(seen) > 8:
                refused.set()
            return 403

        with caplog.at_level(logging.INFO):
            s3.fault = refuse
            assert refused.wait(60)
            assert ask(client, version="2") == first
            s3.fault = None
            s3.put("models/mlp/3/model.onnx", mlp)
            wait_for(server, [("mlp", "3", "READY", "")])
        texts = [record.getMessage() for record in caplog.records if record.name.endswith("watch")]
        assert len(texts) == 2
        assert texts[0].startswith("s3://bucket/models: cannot be read: ")
        assert texts[0].endswith("; what is loaded goes on serving")
        assert texts[1] == "the repository can be read again"


@pytest.mark.long
def test_a_model_that_cannot_be_copied_is_reported_once(
    s3: S3Server, storage: ObjectStorage, mlp: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    s3.put("models/mlp/1/model.onnx", mlp)
    with (
        controlled_server(storage, ControlMode.POLL, **QUICKLY) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        refused, seen = threading.Event(), []

        def refuse(_: str, path: str) -> int | None:
            if "/2/" not in path:
                return None
            seen.append(path)
            if len(seen) == 4:
                refused.set()
            return 403

        s3.fault = refuse
        s3.put("models/mlp/2/model.onnx", mlp)
        assert refused.wait(60)
        assert len(ask(client, version="1")) == 10
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert warnings[0].startswith("s3://bucket/models/mlp/2/model.onnx: cannot be read: ")
        s3.fault = None
        wait_for(server, [("mlp", "2", "READY", "")])


def test_weights_in_a_data_file_are_served(tmp_path: Path) -> None:
    model = onnx.load(save_table(tmp_path / "table.onnx", np.float32))
    (tmp_path / "store" / "table" / "1").mkdir(parents=True)
    onnx.save_model(
        model,
        tmp_path / "store" / "table" / "1" / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    copy = RepositoryCopy(ObjectStorage(url=f"file://{tmp_path}/store", folder=tmp_path / "cache"))
    copy.update()
    assert [(loaded.name, loaded.version) for loaded in load_repository(copy.path)] == [("table", 1)]
    copy.close()


def test_models_are_copied_when_they_are_loaded(s3: S3Server, storage: ObjectStorage, mlp: bytes) -> None:
    for name in ("a", "b"):
        s3.put(f"models/{name}/1/model.onnx", mlp)
    with (
        controlled_server(storage, ControlMode.EXPLICIT, warm_up_budget_s=0.0) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        assert [m.name for m in client.get_model_repository_index().models] == ["a", "b"]
        client.load_model("a")
        assert len(ask(client, "a")) == 10
        assert {path for _, path in s3.requests if path.endswith(".onnx")} == {"models/a/1/model.onnx"}
        s3.put("models/c/1/model.onnx", mlp)
        assert [m.name for m in client.get_model_repository_index().models] == ["a", "b", "c"]
        client.unload_model("a")
        client.get_model_repository_index()
        assert not list(storage.folder.glob("*/view-1/*/1/model.onnx"))
        s3.fault = lambda *_: 403
        with pytest.raises(InferenceServerException, match="UNAVAILABLE.*cannot be read now; the server's log says why"):
            client.load_model("b")


def test_requests_load_models_of_a_store(s3: S3Server, storage: ObjectStorage, mlp: bytes) -> None:
    for name in ("mlp", "other"):
        s3.put(f"models/{name}/1/model.onnx", mlp)
    with (
        controlled_server(storage, ControlMode.NONE, on_demand=True, max_loaded_bytes=int(1.5 * len(mlp))) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        assert not list(storage.folder.rglob("model.onnx"))
        assert ask(client, "mlp") == ask(client, "other") == ask(client, "mlp")
        assert [name for name, _, state, _ in lines(server) if state == "READY"] == ["mlp"]


def test_an_unreadable_store_ends_the_start(s3: S3Server, storage: ObjectStorage) -> None:
    s3.fault = lambda *_: 403
    with (
        pytest.raises(
            ModelLoadError, match=r"^s3://bucket/models: cannot be read: .*; give credentials that may do that: AWS_PROFILE"
        ),
        controlled_server(storage, ControlMode.NONE),
    ):
        pass


def test_the_command_says_in_one_line_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "halfserve", "serve", "oci://me:hunter22@bucket/models", "--storage-folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=Path(__file__).parents[3])
    assert (ended.returncode, ended.stdout) == (1, "")
    assert (
        ended.stderr == "halfserve serve: oci://***@bucket/models: what opens oci:// is not installed; run: pip install ocifs\n"
    )
