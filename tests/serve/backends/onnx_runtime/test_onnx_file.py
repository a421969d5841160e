from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime import onnx_file
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.backends.onnx_runtime.onnx_file import open_onnx
from halfserve.serve.backends.onnx_runtime.onnx_preparation import prepared
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.errors import ModelLoadError
from tests.models import save_mlp, save_model
from tests.serve.hostile_files import READERS, SIZE, elsewhere, reading_model

WIDE = 80_000
CHANGED = r"m.onnx: was written to while it was read; load it again once it is complete"
SECRET = b"TOP-SECRET-BYTES" * 16
NOT_RUN = {"list of tensors", "training graph"}  # nothing in the runtime reads them


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """x FP16 [batch, 80000] -> y: a sum with a weight of 160 kB and a product with another, in a file that is not small."""
    monkeypatch.setattr(onnx_file, "SMALL_FILE_BYTES", 1 << 18)
    nodes = [helper.make_node("Add", ["x", "w"], ["s"]), helper.make_node("Mul", ["s", "v"], ["y"])]
    weights = {name: np.arange(WIDE, dtype=np.float16) for name in ("w", "v")}
    half = TensorProto.FLOAT16
    return save_model(tmp_path / "m.onnx", nodes, [("x", half, ["batch", WIDE])], [("y", half, ["batch", WIDE])], weights)


def test_large_weights_stay_in_the_file_and_come_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "PIECE_BYTES", 100_000)
    with open_onnx(path) as opened:
        assert [weight.HasField("raw_data") for weight in opened.model.graph.initializer] == [False, False]
        pieces = [list(opened.pieces(weight, place)) for weight, place in opened.large_weights()]
    assert [[len(piece) for piece in weight] for weight in pieces] == [[100_000, 60_000]] * 2
    assert b"".join(bytes(piece) for piece in pieces[1]) == np.arange(WIDE, dtype=np.float16).tobytes()


def test_taken_in_the_model_is_whole(path: Path) -> None:
    with open_onnx(path) as opened:
        opened.take_in()
        assert opened.model == onnx.load(path)


@pytest.mark.parametrize("suffix", [".textproto", ".json", ".onnxtxt", ".ort"])
def test_a_file_is_read_as_the_runtime_reads_it_whatever_its_name(path: Path, suffix: str) -> None:
    renamed = path.rename(path.with_suffix(suffix))
    with open_onnx(renamed) as opened:
        opened.take_in()
        assert opened.model == onnx.load(renamed, format="protobuf")
    with prepared(renamed, for_gpu=False) as model:
        assert model.precision == "fp32 (the fp16 model, upcast)"


def test_a_file_that_is_written_to_meanwhile_is_refused(path: Path) -> None:
    with open_onnx(path) as opened:
        with path.open("ab") as file:
            file.write(b"more")
        with pytest.raises(ModelLoadError, match=CHANGED):
            opened.take_in()


def test_a_file_that_becomes_shorter_meanwhile_is_refused(path: Path) -> None:
    with open_onnx(path) as opened:
        with path.open("r+b") as file:
            file.truncate(1000)
        weight, place = opened.large_weights()[0]
        with pytest.raises(ModelLoadError, match=CHANGED):
            list(opened.pieces(weight, place))


def test_a_file_that_is_replaced_meanwhile_is_read_as_it_was(path: Path, tmp_path: Path) -> None:
    before = onnx.load(path)
    with open_onnx(path) as opened:
        other = tmp_path / "other.onnx"
        other.write_bytes(b"another file")
        other.replace(path)
        opened.take_in()
        assert opened.model == before


def test_half_a_number_at_the_end_of_a_weight_is_refused(path: Path) -> None:
    model = onnx.load(path)
    model.graph.initializer[0].raw_data += b"1"
    path.write_bytes(model.SerializeToString())
    message = r"m.onnx: weight 'w' ends in the middle of a number; export it again"
    with pytest.raises(ModelLoadError, match=message), prepared(path, for_gpu=False):
        pass


def test_a_large_file_that_breaks_off_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])
    message = r"m.onnx: is not a readable ONNX file \(it breaks off\); export it again"
    with pytest.raises(ModelLoadError, match=message), open_onnx(path):
        pass


def test_a_large_file_of_something_else_is_refused(path: Path) -> None:
    path.write_bytes(b"\x00" * (2 * onnx_file.SMALL_FILE_BYTES))
    with pytest.raises(ModelLoadError, match="m.onnx: is not a"), open_onnx(path):
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A version's folder, beside a working directory with a file "secret"."""
    (tmp_path / "working").mkdir()
    (tmp_path / "working" / "secret").write_bytes(SECRET)
    monkeypatch.chdir(tmp_path / "working")
    (tmp_path / "1").mkdir()
    return tmp_path / "1"


def write(folder: Path, place: str, location: str) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(reading_model(place, location))
    return path


def answer(path: Path) -> bytes:
    runtime = OnnxRuntime()
    backend = runtime.load(path, runtime.describe(path), DevicePlacement(use_gpu=False, threads=1), ModelConfig())
    return np.asarray(backend.run({"x": np.ones(1, backend.compute_dtype("x"))})["y"]).tobytes()


@pytest.mark.parametrize("place", READERS)
def test_the_working_directory_is_not_where_tensors_lie(folder: Path, place: str) -> None:
    path = write(folder, place, "secret")
    with pytest.raises(ModelLoadError, match=r"its external data cannot be read \(secret: No such file or directory\)"):
        answer(path)


@pytest.mark.parametrize("place", READERS)
@pytest.mark.parametrize("location", ["../working/secret", "a/../../working/secret", "/etc/passwd", "*/_ORT_MEM_ADDR_/*", "\0"])
def test_a_path_out_of_the_folder_is_refused_by_every_reader(folder: Path, place: str, location: str) -> None:
    path = write(folder, place, location)
    with pytest.raises(ModelLoadError, match="model.onnx: keeps weights in .*, expected a file beside it; export it again$"):
        OnnxRuntime().describe(path)


@pytest.mark.parametrize("place", READERS)
def test_a_link_out_of_the_folder_is_refused(folder: Path, place: str) -> None:
    (folder / "link").symlink_to(folder.parent / "working" / "secret")
    with pytest.raises(ModelLoadError, match=r"link: is a link out of the model's folder, .*; copy it there$"):
        OnnxRuntime().describe(write(folder, place, "link"))


@pytest.mark.parametrize("place", [place for place in READERS if place not in NOT_RUN])
def test_tensors_beside_the_model_are_served(folder: Path, place: str) -> None:
    places = "places" in place
    inside = np.arange(SIZE, dtype=np.int64).tobytes() if places else b"beside the model" * 2
    (folder / "weights").mkdir()
    (folder / "weights" / "all.bin").write_bytes(inside)
    read = np.ones(SIZE, np.float16).tobytes() if places else inside
    found = answer(write(folder, place, "weights/all.bin"))
    assert found == read[: len(found)]


@pytest.mark.parametrize("kind", ["a named pipe", "a socket"])
def test_what_is_no_regular_file_is_refused_at_once(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # a socket's path has at most 107 bytes
    if kind == "a named pipe":
        os.mkfifo("weights.bin")
    else:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("weights.bin")
    with pytest.raises(ModelLoadError, match=f"weights.bin: cannot be read: it is {kind}, expected a regular file$"):
        OnnxRuntime().describe(write(folder, "initializer", "weights.bin"))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("length", "17", "it has 16 bytes, expected 17"),
        ("offset", "17", "it has 16 bytes, expected 33"),
        ("length", str(1 << 60), "it has 16 bytes, expected"),
        ("offset", "-1", "its offset is '-1', expected a number of bytes"),
    ],
)
def test_bytes_that_are_not_there_are_not_asked_for(folder: Path, key: str, value: str, reason: str) -> None:
    (folder / "weights.bin").write_bytes(bytes(16))
    path = write(folder, "sparse initializer", "weights.bin")
    model = onnx.load(path, load_external_data=False)
    (entry,) = [e for e in model.graph.sparse_initializer[0].values.external_data if e.key == key]
    entry.value = value
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelLoadError, match=rf"external data cannot be read \(weights.bin: {reason}"):
        answer(path)


def test_a_tensor_with_two_places_is_refused(folder: Path) -> None:
    path = save_mlp(folder / "model.onnx")
    model = onnx.load(path)
    tensor = elsewhere("weights.bin")
    tensor.external_data.add(key="location", value="/etc/passwd")
    model.graph.initializer.append(tensor)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelLoadError, match="tensor 'read' says twice where its data lies"), open_onnx(path):
        pass


@pytest.mark.parametrize("within", ["graph", "function"])
def test_a_program_of_a_device_is_refused(folder: Path, within: str) -> None:
    path = save_mlp(folder / "model.onnx")
    model = onnx.load(path)
    node = helper.make_node("EPContext", ["x"], ["z"], domain="com.microsoft", ep_cache_context="../engine", embed_mode=0)
    if within == "graph":
        model.graph.node.append(node)
    else:
        model.functions.append(helper.make_function("own", "F", ["x"], ["z"], [node], [helper.make_opsetid("", 20)]))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelLoadError, match=r"holds a program compiled for one device \(EPContext\), which is not served"):
        answer(path)
