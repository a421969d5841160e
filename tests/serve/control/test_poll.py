"""The repository is watched: what changes there is served."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton

from serve.control.options import ControlMode
from serve.engine.repository.version_states import State
from tests.models import save_mlp
from tests.serve.control.controlled import ask, controlled_server, lines, wait_for
from tests.serve.running_server import RunningServer

QUICK: dict[str, Any] = {"poll_interval_s": 0.01, "settle_s": 0.01}


def add(repository: Path, version: int, name: str = "mlp") -> None:
    """As export does: whole or not at all."""
    hidden = repository / f".{name}.{version}"
    save_mlp(hidden / "model.onnx")
    (repository / name).mkdir(exist_ok=True)
    hidden.rename(repository / name / str(version))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    add(tmp_path, 1)
    return tmp_path


@pytest.fixture
def server(repository: Path) -> Iterator[RunningServer]:
    with controlled_server(repository, ControlMode.POLL, **QUICK) as running:
        yield running


def test_a_new_version_replaces_the_old_one(server: RunningServer, repository: Path) -> None:
    assert lines(server) == [("mlp", "1", "READY", "")]
    add(repository, 2)
    wait_for(server, [("mlp", "1", "UNAVAILABLE", "unloaded"), ("mlp", "2", "READY", "")])
    with triton.InferenceServerClient(server.address) as client:
        assert ask(client) == ask(client, version="2")


def test_models_that_come_and_go_are_followed(server: RunningServer, repository: Path) -> None:
    add(repository, 7, name="more")
    wait_for(server, [("mlp", "1", "READY", ""), ("more", "7", "READY", "")])
    shutil.rmtree(repository / "mlp")
    wait_for(server, [("mlp", "1", "UNAVAILABLE", "unloaded"), ("more", "7", "READY", "")])
    add(repository, 1)
    wait_for(server, [("mlp", "1", "READY", ""), ("more", "7", "READY", "")])


def test_a_broken_change_is_refused_and_a_mended_one_served(server: RunningServer, repository: Path) -> None:
    (repository / "mlp" / "config.pbtxt").write_text('parameters { key: "halfserve.nope" }')
    reason = (
        "serves as it was loaded before; what is there now was refused: mlp/config.pbtxt: parameter 'halfserve.nope' is not "
        "known; "
    )
    wait_until_reason(server, reason)
    (repository / "mlp" / "config.pbtxt").write_text("max_batch_size: 5")
    wait_for(server, [("mlp", "1", "READY", "")])
    with triton.InferenceServerClient(server.address) as client:
        assert client.get_model_config("mlp").config.max_batch_size == 5


def wait_until_reason(server: RunningServer, start: str) -> None:
    async def reached() -> None:
        while True:
            changed = server.core.changed
            if any(s.reason.startswith(start) for s in server.core.index()):
                return
            await changed.wait()

    server.run(reached())


def test_a_repository_that_cannot_be_read_unloads_nothing(
    server: RunningServer, repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away = repository.with_name(f"{repository.name}-away")
    with caplog.at_level(logging.WARNING, "serve.control"):
        repository.rename(away)
        while not caplog.messages:
            server.call(lambda: None)
    (message,) = caplog.messages
    assert (
        message
        == f"{repository}: not found; expected a model repository folder or an .onnx file; what is loaded goes on serving"
    )
    assert lines(server) == [("mlp", "1", "READY", "")]
    add(away, 2)
    away.rename(repository)
    wait_for(server, [("mlp", "1", "UNAVAILABLE", "unloaded"), ("mlp", "2", "READY", "")])


def test_a_bare_file_is_watched_too(tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "net.onnx")
    with controlled_server(path, ControlMode.POLL, **QUICK) as server:
        (first,) = server.call(server.core.models)
        os.utime(path, ns=(1, 1))
        server.run(_until_another(server, first))
        assert lines(server) == [("net", "1", "READY", "")]


async def _until_another(server: RunningServer, first: object) -> None:
    while True:
        changed = server.core.changed
        if server.core.models() != [first]:
            return
        await changed.wait()


def test_an_empty_repository_waits_for_its_first_model(tmp_path: Path) -> None:
    with controlled_server(tmp_path, ControlMode.POLL, **QUICK) as server:
        assert lines(server) == []
        add(tmp_path, 1)
        wait_for(server, [("mlp", "1", "READY", "")])


LABELS = 'output { name: "y" data_type: TYPE_FP16 dims: 10 label_filename: "labels.txt" }'
WARM_UP = """model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP16 dims: 64 input_data_file: "row" } } }"""


@pytest.mark.parametrize(
    ("path", "config"),
    [
        ("config.pbtxt", ""),
        ("labels.txt", f"max_batch_size: 4 {LABELS}"),
        ("warmup/row", f"max_batch_size: 4 {WARM_UP}"),
        ("1/certificate.json", ""),
    ],
)
def test_a_pipe_in_a_files_place_stops_nothing(server: RunningServer, repository: Path, path: str, config: str) -> None:
    hidden = repository / ".piped"
    save_mlp(hidden / "1" / "model.onnx")
    if config:
        (hidden / "config.pbtxt").write_text(config)
    (hidden / path).parent.mkdir(exist_ok=True)
    os.mkfifo(hidden / path)
    hidden.rename(repository / "piped")
    add(repository, 1, name="zebra")

    def states() -> dict[str, tuple[str, str]]:
        return {name: (state, reason) for name, _, state, reason in lines(server)}

    async def looked_at() -> None:
        while {"piped", "zebra"} - {s.name for s in server.core.index() if s.state is not State.LOADING}:
            await server.core.changed.wait()

    server.run(looked_at())
    assert states()["zebra"] == ("READY", "")
    state, reason = states()["piped"]
    assert state == "UNAVAILABLE"
    assert reason.endswith("it is a named pipe, expected a regular file")
