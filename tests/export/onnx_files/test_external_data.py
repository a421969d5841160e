from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.external_data import FileTensor, data_files, external_tensors, stored_at
from tests.export.stored_models import sums, with_data_files

Refer = Callable[..., onnx.TensorProto]


@pytest.fixture
def tensor(tmp_path: Path) -> Refer:
    """A tensor of 256 float32 values in `data.bin`, with entries changed as asked."""
    (tmp_path / "data.bin").write_bytes(np.arange(256, dtype=np.float32).tobytes())

    def referring(**entries: str) -> onnx.TensorProto:
        proto = onnx.TensorProto(name="w", data_type=1, dims=[256], data_location=onnx.TensorProto.EXTERNAL)
        for key, value in {"location": "data.bin", **entries}.items():
            proto.external_data.add(key=key, value=value)
        return proto

    return referring


def test_a_reference_says_where_the_bytes_lie(tensor: Refer, tmp_path: Path) -> None:
    stored = stored_at(tensor(), tmp_path, "m.onnx")
    assert (stored.location, stored.offset, stored.length) == ("data.bin", 0, 1024)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "none.bin"}, r"m.onnx: the external data of tensor 'w' should be in .*none.bin: No such file"),
        ({"location": "."}, "should be in .*, which is no file; export the model again"),
        ({"location": ""}, "has the location ''; expected a file in the model's folder"),
        ({"location": "../data.bin"}, "has the location '../data.bin'; expected a file in the model's folder"),
        ({"location": "a/../../data.bin"}, "expected a file in the model's folder"),
        ({"location": "/etc/passwd"}, "has the location '/etc/passwd'; expected"),
        ({"offset": "4"}, r"ends at byte 1,028 of data.bin, which has 1,024; the file is cut short or of another model"),
        ({"offset": str(2**70)}, "the file is cut short"),
        ({"offset": "-4"}, "says offset -4 and length 1024"),
        ({"length": "512"}, "says offset 0 and length 512; the tensor has 1024 bytes"),
        ({"length": "many"}, "has an offset or length that is no number"),
    ],
)
def test_references_that_lead_nowhere_are_refused(entries: dict[str, str], message: str, tensor: Refer, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        stored_at(tensor(**entries), tmp_path, "m.onnx")


def test_a_link_out_of_the_folder_is_refused(tensor: Refer, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "data.bin").symlink_to(tmp_path / "data.bin")
    with pytest.raises(ExportError, match="is a link out of the model's folder, to .*data.bin; copy the files instead"):
        stored_at(tensor(), folder, "m.onnx")


def test_links_within_the_folder_and_hard_links_are_fine(tensor: Refer, tmp_path: Path) -> None:
    (tmp_path / "soft.bin").symlink_to("data.bin")
    os.link(tmp_path / "data.bin", tmp_path / "hard.bin")
    assert stored_at(tensor(location="soft.bin"), tmp_path, "m.onnx").length == 1024
    assert stored_at(tensor(location="hard.bin"), tmp_path, "m.onnx").length == 1024


def test_data_files_are_listed_once_in_their_order(tmp_path: Path) -> None:
    path = with_data_files(sums(), tmp_path / "m.onnx", files=2)
    model = onnx.load(path, load_external_data=False)
    assert data_files(model) == ("m.0.bin", "m.1.bin")
    assert len(list(external_tensors(model))) == 4


def mapped(path: Path, values: np.ndarray, offset: int, dtype: onnx_ir.DataType | None = None) -> FileTensor:
    path.write_bytes(bytes(offset) + values.tobytes())
    kind = dtype or onnx_ir.DataType.from_numpy(values.dtype)
    return FileTensor(str(path), offset, values.nbytes, kind, shape=onnx_ir.Shape(values.shape), name="w")


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (70000,)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.bool_])
def test_a_file_tensor_holds_what_the_file_holds(shape: tuple[int, ...], dtype: type[np.generic], tmp_path: Path) -> None:
    values = np.ones(shape, dtype) * 3 if dtype is not np.bool_ else np.ones(shape, dtype)
    tensor = mapped(tmp_path / "data.bin", values.astype(dtype), 7)
    np.testing.assert_array_equal(tensor.numpy(), values)
    np.testing.assert_array_equal(np.asarray(tensor, np.float64), values.astype(np.float64))
    assert tensor.tobytes() == values.astype(dtype).tobytes()


def test_elements_smaller_than_a_byte_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"\x21\x43")
    shape = onnx_ir.Shape([4])
    tensor = FileTensor(str(tmp_path / "data.bin"), 0, 2, onnx_ir.DataType.INT4, shape=shape, name="w")
    assert tensor.numpy().tolist() == [1, 2, 3, 4]
    assert tensor.tobytes() == b"\x21\x43"


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    tensor = mapped(tmp_path / "data.bin", np.ones(4, np.float32), 0)
    (tmp_path / "data.bin").unlink()
    with pytest.raises(ExportError, match="cannot read tensor 'w' from .*data.bin"):
        tensor.numpy()
