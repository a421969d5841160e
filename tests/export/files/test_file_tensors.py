from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir
import pytest

from export.errors import ExportError
from export.files.file_tensors import FileTensor


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
