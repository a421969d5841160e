"""`halfserve serve hf://ORG/NAME`: what is served of a repository on a hub, and what is said where nothing can be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import pytest

from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.hub_models import place_of
from halfserve.serve.storage.repository_copy import RepositoryCopy
from halfserve.serve.storage.storage_options import ObjectStorage
from tests.export.hugging_face_folders import sentence_folder, text_folder
from tests.hub_server import Fault, HubServer, hub_server
from tests.serve.running_server import WAIT_S

MODEL = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[n,2] x) => (float[n,2] y) { y = Neg(x) }')
URL = "hf://tests/encoder"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(monkeypatch, tmp_path / "cache") as server:
        yield server


@contextmanager
def serving(folder: Path, *arguments: str, **environment: str) -> Iterator[tuple[dict[str, Any], Path]]:
    """A server's ready line, and the file of its log."""
    command = [sys.executable, "-m", "halfserve", "serve", *arguments, "--grpc-port", "0", "--http-port", "0", "--json"]
    log = folder / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
    ):
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            assert line, log.read_text()
            yield json.loads(line), log
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(WAIT_S)


def embedding(ready: dict[str, Any]) -> Any:
    body = json.dumps({"inputs": "the train leaves at seven"}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{ready['http_port']}/embed", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:  # noqa: S310  (of this test's server)
        return json.load(answer)


@pytest.mark.long
def test_one_command_exports_a_commit_once_and_serves_its_text_endpoint(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.push("tests/encoder", sentence_folder(tmp_path / "encoder", "mean_tokens"))
    with serving(tmp_path, URL) as (ready, log):
        assert [model["name"] for model in ready["models"]] == ["encoder"]
        first = embedding(ready)
        assert len(first[0]) == 32
        assert f"exports tests/encoder@{commit}" in log.read_text()
        assert "halfserve export: fetching" in log.read_text()
    hub.push("tests/encoder", sentence_folder(tmp_path / "newer", "cls_token"))
    hub.stop()
    with serving(tmp_path, URL, "--supervise") as (ready, log):
        assert embedding(ready) == first
        assert f"main is commit {commit} as this machine's cache has it" in log.read_text()
        assert f"{URL}: serves commit {commit}" in log.read_text()
        assert "once for this commit" not in log.read_text()


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are listed in /proc")
def test_a_server_that_is_stopped_while_it_exports_leaves_no_process(hub: HubServer, tmp_path: Path) -> None:
    hub.push("tests/encoder", sentence_folder(tmp_path / "encoder", "mean_tokens"))
    fetching, stopped = threading.Event(), threading.Event()

    def fault(_method: str, path: str) -> Fault | None:
        if path.endswith("model.safetensors"):
            fetching.set()
            stopped.wait(WAIT_S)
        return None

    hub.fault = fault
    with subprocess.Popen([sys.executable, "-m", "halfserve", "serve", URL], stderr=subprocess.PIPE, text=True) as server:
        assert fetching.wait(WAIT_S)
        (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        server.terminate()
        assert server.wait(WAIT_S) == 128 + signal.SIGTERM
        assert not Path(f"/proc/{child}").exists()
        stopped.set()
    assert not list((tmp_path / "cache" / "assets").rglob("model.onnx"))


@pytest.mark.long
def test_a_failing_export_is_one_line_with_the_cure(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.push("tests/encoder", text_folder(tmp_path / "writer", "BertForMaskedLM"))
    with pytest.raises(ModelLoadError, match=f"{URL}: its weights cannot be exported: .*give its --task") as error:
        place_of(ObjectStorage(url=URL, folder=tmp_path))
    assert f"halfserve export tests/encoder@{commit} --repository FOLDER, then halfserve serve FOLDER" in str(error.value)
    monkeypatch.setenv("HALFSERVE_EXPORT_TASK", "feature-extraction")
    place = place_of(ObjectStorage(url=URL, folder=tmp_path))
    assert isinstance(place, Path)
    assert [path.name for path in place.iterdir()] == ["encoder"]
    monkeypatch.delenv("HALFSERVE_EXPORT_TASK")
    with pytest.raises(ModelLoadError, match="give its --task"):
        place_of(ObjectStorage(url=URL, folder=tmp_path))


def pushed(hub: HubServer, folder: Path, *paths: str) -> str:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(MODEL.SerializeToString() if path.endswith(".onnx") else b"")
    return hub.push("tests/encoder", folder)


def copied(place: Path | ObjectStorage) -> set[str]:
    """The files that a server copies of a place."""
    assert isinstance(place, ObjectStorage)
    copy = RepositoryCopy(place)
    try:
        assert copy.update() == {}
        folder = copy.path if copy.path.is_dir() else copy.path.parent
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    finally:
        copy.close()


def test_a_repository_in_tritons_layout_is_served_as_object_storage(hub: HubServer, tmp_path: Path) -> None:
    pushed(hub, tmp_path / "hub", "neg/config.pbtxt", "neg/1/model.onnx", "neg/2/model.onnx", "README.md", "model.safetensors")
    storage = ObjectStorage(url=URL, folder=tmp_path / "copies")
    assert place_of(storage) == storage
    assert copied(storage) == {"neg/config.pbtxt", "neg/2/model.onnx"}


def test_the_usual_onnx_file_is_served_at_its_commit(hub: HubServer, tmp_path: Path) -> None:
    commit = pushed(hub, tmp_path / "hub", "onnx/model.onnx", "onnx/model_int8.onnx", "onnx/model.onnx_data")
    place = place_of(ObjectStorage(url=f"{URL}@main", folder=tmp_path / "copies"))
    assert isinstance(place, ObjectStorage)
    assert place.url == f"{URL}@{commit}/onnx/model.onnx"
    assert copied(place) == {"model.onnx", "model.onnx_data"}


def test_what_is_no_model_is_one_line(hub: HubServer, tmp_path: Path) -> None:
    storage = ObjectStorage(url=URL, folder=tmp_path / "copies")
    with pytest.raises(ModelLoadError, match=f"{hub.url} has no model tests/encoder, or it is private"):
        place_of(storage)
    pushed(hub, tmp_path / "hub", "onnx/a.onnx", "onnx/b.onnx")
    with pytest.raises(
        ModelLoadError, match="or one ONNX file, which its own URL names if there are several; it has onnx/a.onnx"
    ):
        place_of(storage)


def test_a_name_without_its_organization_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"^hf://bert: names no model of the hub; expected hf://ORG/NAME\[@REVISION\]$"):
        place_of(ObjectStorage(url="hf://bert", folder=tmp_path))


@pytest.mark.parametrize("url", ["hf://tests/encoder/onnx/model.onnx", "hf://datasets/tests", "s3://bucket/models"])
def test_other_urls_are_left_to_object_storage(url: str, tmp_path: Path) -> None:
    storage = ObjectStorage(url=url, folder=tmp_path)
    assert place_of(storage) == storage
