from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from serve.backends.onnx_runtime import onnx_file
from serve.backends.onnx_runtime.onnx_file import open_onnx
from serve.backends.onnx_runtime.onnx_preparation import prepared
from serve.engine.errors import ModelLoadError
from tests.models import save_model

WIDE = 80_000
CHANGED = r"m.onnx: was written to while it was read; load it again once it is complete"


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
