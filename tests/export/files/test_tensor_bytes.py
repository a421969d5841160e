from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir
import pytest

from export.errors import ExportError
from export.files.tensor_bytes import synced, write_padded, write_tensor
from export.files.tensor_outline import outlined
from tests.export.onnx_files import sums, with_a_body


@pytest.mark.parametrize(
    "tensor",
    [
        onnx_ir.Tensor(np.arange(6, dtype=np.float16).reshape(2, 3)),
        onnx_ir.Tensor(np.array(3.0)),
        onnx_ir.Tensor(np.arange(12).reshape(3, 4).T),
        onnx_ir.Tensor(np.array([True, False])),
        onnx_ir.Tensor(np.array([1, -2, 3], np.int8).astype(onnx_ir.DataType.INT4.numpy()), dtype=onnx_ir.DataType.INT4),
        onnx_ir.Tensor(np.ones((0, 3), np.float32)),
        onnx_ir.LazyTensor(lambda: onnx_ir.Tensor(np.ones(4, np.float16)), onnx_ir.DataType.FLOAT16, onnx_ir.Shape([4])),
    ],
    ids=["half", "scalar", "transposed", "bool", "four bits", "empty", "lazy"],
)
def test_bytes_are_little_endian_and_in_order(tensor: onnx_ir.TensorProtocol, tmp_path: Path) -> None:
    with synced(tmp_path / "t") as file:
        write_tensor(file, tensor)
    assert (tmp_path / "t").read_bytes() == tensor.tobytes()


def test_a_tensor_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    wrong = onnx_ir.Tensor(np.ones(4, np.float32))
    lying = onnx_ir.LazyTensor(lambda: wrong, onnx_ir.DataType.FLOAT16, onnx_ir.Shape([4]), name="w")
    expected = pytest.raises(ExportError, match="tensor 'w' has 16 bytes, its type and shape say 8")
    with expected, synced(tmp_path / "t") as file:
        write_tensor(file, lying)


def test_padding_is_zeros(tmp_path: Path) -> None:
    with synced(tmp_path / "t") as file:
        file.write(b"x")
        assert write_padded(file, onnx_ir.Tensor(np.ones(3, np.uint8))) == 64
    assert (tmp_path / "t").read_bytes() == b"x" + bytes(63) + b"\1\1\1"


def test_an_outline_is_the_model_without_its_large_initializers() -> None:
    model = onnx_ir.from_proto(sums())
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    with outlined(model) as outline:
        assert [tensor.name for tensor, _ in outline.tensors] == ["w0", "w1", "w2", "w3"]
        assert outline.proto.ByteSize() < 1024 < outline.size_bytes
        assert not any(tensor.HasField("data_location") for tensor in outline.proto.graph.initializer)
    assert {name: value.const_value for name, value in model.graph.initializers.items()} == before


def test_an_outline_knows_the_initializers_of_bodies() -> None:
    with outlined(onnx_ir.from_proto(with_a_body())) as outline:
        assert [tensor.name for tensor, _ in outline.tensors] == ["inner"]
