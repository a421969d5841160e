"""Changes of the repository are found once they have settled, and followed."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton

from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import VersionState
from halfserve.serve.engine.repository.model_repository import ModelRepository, find_model
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.model_control.loader_thread import LoaderThread
from halfserve.serve.model_control.watch import RepositoryWatch, VersionFingerprint, fingerprint, version_fingerprint
from tests.models import save_mlp
from tests.serve.model_control.controlled import ask, controlled_server, lines, wait_for
from tests.serve.running_server import RunningServer


def test_a_fingerprint_covers_nested_folders_and_stops_at_link_loops(tmp_path: Path) -> None:
    (tmp_path / "1" / "fp32" / "weights" / "deeper").mkdir(parents=True)
    (tmp_path / "1" / "fp32" / "weights" / "0.bin").write_bytes(b"a")
    (tmp_path / "1" / "fp32" / "weights" / "deeper" / "0.bin").write_bytes(b"a")
    assert [entry[0] for entry in fingerprint(tmp_path)] == ["1/fp32/weights/0.bin"]
    for link in "abc":
        (tmp_path / link).symlink_to(tmp_path)
    assert len(fingerprint(tmp_path)) == 1


def test_a_fingerprint_covers_visible_files_only(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_bytes(b"a")
    first = fingerprint(tmp_path)
    assert [entry[0] for entry in first] == ["1/model.onnx"]
    (tmp_path / ".config.tmp").write_bytes(b"half")
    (tmp_path / "1" / ".model.onnx.tmp").write_bytes(b"half")
    assert fingerprint(tmp_path) == first
    (tmp_path / "1" / "model.onnx").write_bytes(b"ab")
    second = fingerprint(tmp_path)
    assert second != first
    (tmp_path / "other").write_bytes(b"ab")
    (tmp_path / "other").rename(tmp_path / "1" / "model.onnx")
    assert fingerprint(tmp_path) != second
    assert fingerprint(tmp_path / "1" / "model.onnx") == tuple(("model.onnx", *e[1:]) for e in fingerprint(tmp_path))
    assert fingerprint(tmp_path / "absent") == ()


def test_a_fingerprint_changes_though_time_and_size_stay(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(b"a")
    os.utime(model, (1, 1))
    first, written = fingerprint(tmp_path), model.stat().st_ctime_ns
    while model.stat().st_ctime_ns == written:  # the system's clock for files has steps of some milliseconds
        model.write_bytes(b"b")
        os.utime(model, (1, 1))  # as `cp -p` does
    assert fingerprint(tmp_path) != first


def test_a_link_that_leads_to_itself_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"a")
    (tmp_path / "loop").symlink_to("loop")
    assert [entry[0] for entry in fingerprint(tmp_path)] == ["model.onnx"]


def test_the_watch_outlives_unexpected_errors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "1").mkdir(parents=True)
    followed: list[str] = []
    looks = 0

    class Fails(LoaderThread):
        """The second and the third look go wrong."""

        async def run(self, function: Callable[..., object], *arguments: object) -> object:  # type: ignore[override]  # (as is)
            nonlocal looks
            looks += 1
            if looks in {2, 3}:
                raise ZeroDivisionError("nobody foresaw this")
            return function(*arguments)

    async def work() -> None:
        done = asyncio.Event()
        watch = RepositoryWatch(ModelRepository(tmp_path), Fails(), interval_s=0, settle_s=0)
        await watch.remember()
        for name in ("a", "b"):
            (tmp_path / name / "1" / "model.onnx").write_bytes(b"new")

        async def follow(name: str, there: bool) -> None:
            followed.append(name)
            if name == "a":
                raise ZeroDivisionError("nor this")
            done.set()

        watching = asyncio.create_task(watch.run(follow))
        await asyncio.wait_for(done.wait(), 20)
        watching.cancel()

    asyncio.run(work())
    assert followed == ["a", "b"]
    assert caplog.messages == [
        f"{tmp_path}: cannot be looked at; what is loaded goes on serving",
        "a: a change could not be followed; it is tried again when the files change",
    ]


def test_files_that_are_still_being_written_wait(tmp_path: Path) -> None:
    file = tmp_path / "mlp" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    looks = 0
    followed: list[tuple[str, bool, int]] = []

    class WritesMeanwhile(LoaderThread):
        """Before each of the first five looks, a writer gets on with its file."""

        async def run(self, function: Callable[..., object], *arguments: object) -> object:  # type: ignore[override]  # (as is)
            nonlocal looks
            looks += 1
            if 1 < looks <= 5:
                file.write_bytes(b"x" * looks)
            return function(*arguments)

    async def work() -> None:
        done = asyncio.Event()
        watch = RepositoryWatch(ModelRepository(tmp_path), WritesMeanwhile(), interval_s=0, settle_s=0)
        await watch.remember()

        async def follow(name: str, there: bool) -> None:
            followed.append((name, there, file.stat().st_size))
            done.set()

        watching = asyncio.create_task(watch.run(follow))
        await asyncio.wait_for(done.wait(), 20)
        watching.cancel()

    asyncio.run(work())
    assert followed == [("mlp", True, 5)]


def test_an_error_on_the_thread_reaches_its_caller() -> None:
    def fail() -> None:
        raise ModelLoadError("no")

    async def work() -> int:
        thread = LoaderThread()
        with pytest.raises(ModelLoadError, match="no"):
            await thread.run(fail)
        given_up = asyncio.create_task(thread.run(lambda: 1))
        await asyncio.sleep(0)
        given_up.cancel()
        result = await thread.run(lambda: 3)
        thread.stop()
        return result

    assert asyncio.run(work()) == 3


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


def test_added_and_removed_models_are_followed(server: RunningServer, repository: Path) -> None:
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
    with caplog.at_level(logging.WARNING, "halfserve.serve.model_control"):
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
def test_a_named_pipe_in_a_files_place_blocks_nothing(server: RunningServer, repository: Path, path: str, config: str) -> None:
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
        while {"piped", "zebra"} - {s.name for s in server.core.index() if s.state is not VersionState.LOADING}:
            await server.core.changed.wait()

    server.run(looked_at())
    assert states()["zebra"] == ("READY", "")
    state, reason = states()["piped"]
    assert state == "UNAVAILABLE"
    assert reason.endswith("it is a named pipe, expected a regular file")


def looked_at(repository: Path) -> VersionFingerprint:
    (files,) = find_model(repository, "mlp")
    return version_fingerprint(files, bare=False)


@pytest.mark.parametrize("place", ["model.onnx", "model.onnx/model.onnx"])
@pytest.mark.parametrize("changed", ["labels.txt", "1/model.onnx.data"])
def test_files_of_the_model_and_of_its_version_count(tmp_path: Path, place: str, changed: str) -> None:
    model = save_mlp(tmp_path / "mlp" / "1" / place)
    before = looked_at(tmp_path)
    assert looked_at(tmp_path) == before
    folder = model.parent if changed.startswith("1/") else tmp_path / "mlp"
    (folder / Path(changed).name).touch()
    assert looked_at(tmp_path) != before
