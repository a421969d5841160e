"""Model files that come with a load request."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.model_control.uploads import check_name, write_upload
from tests.models import save_mlp
from tests.serve.model_control.controlled import ask, controlled_server
from tests.serve.running_server import RunningServer


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
