"""Model files that come with a load request."""

from __future__ import annotations

import base64
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.resource_limits import usable_cores
from halfserve.serve.http.rest_server import RestServer
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.model_control.uploads import check_name, write_upload
from halfserve.serve.protocol.service import SERVICE
from tests.models import save_counter, save_mlp
from tests.serve.http.running_http import running_http
from tests.serve.http.test_inference import wait_until
from tests.serve.model_control.controlled import ask, controlled_server, lines, wait_for
from tests.serve.running_server import WAIT_S, RunningServer


@pytest.fixture
def model(tmp_path: Path) -> bytes:
    return save_mlp(tmp_path / "mlp.onnx").read_bytes()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def server(tmp_path: Path, temporary: Path) -> Iterator[RunningServer]:
    (tmp_path / "repository").mkdir()
    with controlled_server(tmp_path / "repository", ControlMode.EXPLICIT, uploads=True) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as client:
        yield client


def test_a_model_is_brought_served_replaced_and_forgotten(
    client: triton.InferenceServerClient, model: bytes, temporary: Path
) -> None:
    output = '{"max_batch_size": 4, "output": [{"name": "y", "data_type": "TYPE_FP16", "dims": [10], "label_filename": "l"}]}'
    client.load_model("new", config=output, files={"file:1/model.onnx": model, "file:l": b"a\nb\nc\nd\ne\nf\ng\nh\ni\nj"})
    answer = ask(client, "new")
    assert len(list(temporary.iterdir())) == 1
    client.load_model("new", config="{}", files={"file:2/model.onnx": model})
    assert client.get_model_metadata("new").versions == ["2"]
    assert ask(client, "new") == answer
    assert len(list(temporary.iterdir())) == 1
    client.unload_model("new")
    assert list(temporary.iterdir()) == []


def test_an_upload_that_cannot_be_stored_is_refused(
    client: triton.InferenceServerClient, model: bytes, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    temporary.rmdir()
    with pytest.raises(InferenceServerException, match="cannot be stored: No such file or directory") as refused:
        client.load_model("new", config="{}", files={"file:1/model.onnx": model})
    assert refused.value.status() == "StatusCode.UNAVAILABLE"
    assert not [record for record in caplog.records if record.exc_info]
    temporary.mkdir()
    client.load_model("new", config="{}", files={"file:1/model.onnx": model})
    assert ask(client, "new")


@contextmanager
def over_grpc(server: RunningServer, _: RestServer, name: str, content: bytes) -> Iterator[Callable[[], None]]:
    """Load a model with its file; yields what gives the load up."""
    request = pb.RepositoryModelLoadRequest(model_name=name)
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/model.onnx"].bytes_param = content
    with grpc.insecure_channel(server.address) as channel:
        yield channel.unary_unary(f"/{SERVICE}/RepositoryModelLoad").future(request.SerializeToString()).cancel


@contextmanager
def over_rest(_: RunningServer, rest: RestServer, name: str, content: bytes) -> Iterator[Callable[[], None]]:
    body = {"parameters": {"config": "{}", "file:1/model.onnx": base64.b64encode(content).decode()}}
    data = json.dumps(body).encode()
    head = f"POST /v2/repository/models/{name}/load HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", rest.port)) as peer:
        peer.sendall(head.encode() + data)
        yield peer.close


@pytest.mark.parametrize("sending", [over_grpc, over_rest])
def test_an_upload_that_is_given_up_is_in_no_ones_way(
    server: RunningServer,
    client: triton.InferenceServerClient,
    model: bytes,
    temporary: Path,
    tmp_path: Path,
    sending: Callable[..., AbstractContextManager[Callable[[], None]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    others = set(threading.enumerate())  # of earlier tests too
    endless = onnx.load(save_counter(tmp_path / "endless.onnx"))
    assert endless.graph.node[0].output == ["times"]
    del endless.graph.node[0]
    endless.graph.initializer.append(onnx.numpy_helper.from_array(np.array(2**60, np.int64), "times"))
    content = endless.SerializeToString()
    with running_http(server) as rest, sending(server, rest, "new", content) as give_up:
        wait_for(server, [("new", "1", "LOADING", "")])
        with sending(server, rest, "new", content) as give_up_waiting:
            give_up_waiting()
        give_up()
        wait_for(server, [("new", "1", "UNAVAILABLE", "new/1/model.onnx: its load was given up, because its client has gone")])
    client.load_model("new", config="{}", files={"file:1/model.onnx": model}, client_timeout=WAIT_S)
    assert ask(client, "new")
    assert [line[:3] for line in lines(server)] == [("new", "1", "READY")]
    assert len(list(temporary.iterdir())) == 1

    # The threads that were given up have ended; as many as load at once may stay.
    def own_loaders() -> int:
        return sum(thread.name == "loader" for thread in set(threading.enumerate()) - others)

    wait_until(lambda: own_loaders() <= max(2, usable_cores()))
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("config", "files", "text"),
    [
        (None, {"file:1/model.onnx": b"x"}, "brings files and no config, expected both"),
        ("{}", {"file:1/model.onnx": b"x"}, "model 'new' was refused: new/1/model.onnx: is not"),
        ("{}", {"file:../model.onnx": b"x"}, "file path '../model.onnx' is not valid, expected one in the model's folder"),
        ("{}", {"file:/etc/passwd": b"x"}, "file path '/etc/passwd' is not valid"),
        ("{}", {"file:1": b"x", "file:1/model.onnx": b"x"}, "file path '1/model.onnx' lies below what is a file itself"),
        ("{}", {"file:model.onnx": b"x"}, "the repository has no model 'new'"),
    ],
)
def test_a_refused_upload_leaves_no_files(
    client: triton.InferenceServerClient,
    temporary: Path,
    model: bytes,
    config: str | None,
    files: dict[str, bytes],
    text: str,
) -> None:
    with pytest.raises(InferenceServerException) as refused:
        client.load_model("new", config=config, files=files)
    assert text in refused.value.message()
    assert list(temporary.iterdir()) == []
    client.load_model("new", config="{}", files={"file:1/model.onnx": model})
    with pytest.raises(InferenceServerException):
        client.load_model("new", config=config, files=files)
    assert client.is_model_ready("new")
    assert len(list(temporary.iterdir())) == 1


def test_an_upload_stays_while_a_version_serves_from_it(
    server: RunningServer, client: triton.InferenceServerClient, model: bytes, temporary: Path
) -> None:
    every = '{"version_policy": {"all": {}}}'
    client.load_model("new", config=every, files={"file:3/model.onnx": model})
    with pytest.raises(InferenceServerException, match="model 'new' was refused: new/2/model.onnx"):
        client.load_model("new", config=every, files={"file:1/model.onnx": model, "file:2/model.onnx": b"junk"})
    served = server.call(lambda: server.core.versions("new"))
    assert [version.version for version in served] == [1, 3]
    for version in served:
        assert version.path is not None
        assert version.path.read_bytes() == model
    assert len(list(temporary.iterdir())) == 2
    client.load_model("new", config=every, files={"file:1/model.onnx": model})
    assert len(list(temporary.iterdir())) == 1
    client.unload_model("new")
    assert list(temporary.iterdir()) == []


@given(st.text(max_size=30) | st.from_regex(r"[./\\a1~\0 ]{0,12}", fullmatch=True))
def test_no_name_leads_out_of_its_folder(name: str) -> None:
    try:
        check_name(name)
    except InvalidArgumentError:
        return
    folder = Path("/some/repository")
    assert (folder / name).parent == folder
    assert (folder / name).name == name


@given(st.dictionaries(st.from_regex(r"([a.]{0,2}/){0,4}[a.\\]{0,3}", fullmatch=True), st.text(max_size=2), max_size=3))
def test_uploaded_files_stay_in_their_folder(texts: dict[str, str]) -> None:
    files = {path: text.encode() for path, text in texts.items()}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        folder.mkdir()
        try:
            write_upload(folder, files)
        except InvalidArgumentError:
            assert list(folder.iterdir()) == []
        else:
            written = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            assert written == files
        assert list(Path(root).iterdir()) == [folder]


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="brings 1001 files, expected at most 1000"):
        write_upload(tmp_path, {f"1/{number}": b"" for number in range(1001)})
