from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile, open_model
from halfserve.export.verification.samples import load_samples
from tests.export.stored_models import parse, sums


@pytest.fixture
def two_inputs() -> ModelFile:
    """tokens int64 [batch, 3] and scale float32 [batch, 1]."""
    text = """two (int64[batch, 3] tokens, float[batch, 1] scale) => (float[batch, 3] y) {
        t = Cast <to = 1> (tokens) y = Mul (t, scale) }"""
    return open_model(parse(text, ir=10))


def relu_of(value: onnx.ValueInfoProto) -> ModelFile:
    model = parse("relu (float[] x) => (float[] y) { y = Relu (x) }", ir=10)
    model.graph.input[0].CopyFrom(value)
    return open_model(model)


def test_arrays_come_by_name_in_the_models_order_and_types(tmp_path: Path, two_inputs: ModelFile) -> None:
    np.savez(tmp_path / "s.npz", scale=np.ones((5, 1)), tokens=np.ones((5, 3), np.int32))
    tokens, scale = load_samples(tmp_path / "s.npz", two_inputs)
    assert (tokens.dtype, tokens.shape) == (np.int64, (5, 3))
    assert (scale.dtype, scale.shape) == (np.float32, (5, 1))


@pytest.mark.parametrize("name", ["s.npz", "s.npy"])
def test_one_array_needs_no_name_for_one_input(name: str, tmp_path: Path) -> None:
    model = sums(1, 4)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    values = np.arange(8, dtype=np.float32)
    if name == "s.npz":
        np.savez(tmp_path / name, values)
    else:
        np.save(tmp_path / name, values)
    (array,) = load_samples(tmp_path / name, open_model(model))
    np.testing.assert_array_equal(array, values)


def test_one_array_of_another_name_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", labels=np.ones(4, np.float32))
    with pytest.raises(ExportError, match=r"s.npz has no array 'x'; it has labels; the model takes x$"):
        load_samples(tmp_path / "s.npz", open_model(sums(1, 4)))


def test_initializers_that_are_inputs_are_not_asked_for(tmp_path: Path) -> None:
    model = sums(1, 4)
    model.graph.input.append(onnx.helper.make_tensor_value_info("w0", TensorProto.FLOAT, [4]))
    np.savez(tmp_path / "s.npz", x=np.ones(4, np.float32))
    assert len(load_samples(tmp_path / "s.npz", open_model(model))) == 1


def test_sizes_below_zero_are_open(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [-1, -1])
    np.savez(tmp_path / "s.npz", x=np.ones((3, 4), np.float32))
    assert load_samples(tmp_path / "s.npz", relu_of(x))[0].shape == (3, 4)


def test_an_optional_tensor_is_sampled_as_a_tensor(tmp_path: Path) -> None:
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["n", 3]))
    np.savez(tmp_path / "s.npz", x=np.ones((2, 3)))
    (array,) = load_samples(tmp_path / "s.npz", relu_of(helper.make_value_info("x", kind)))
    assert (array.dtype, array.shape) == (np.float32, (2, 3))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None), "input 'x' is a sequence; only tensors"),
        (helper.make_tensor_value_info("x", TensorProto.UNDEFINED, None), "input 'x' is a tensor of no known type"),
        (onnx.ValueInfoProto(name="x"), "input 'x' is a value of no type"),
    ],
)
def test_inputs_that_cannot_be_sampled_are_named(value: onnx.ValueInfoProto, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", x=np.ones((2, 3), np.float32))
    with pytest.raises(ExportError, match=message):
        load_samples(tmp_path / "s.npz", relu_of(value))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tokens": np.ones((2, 3), int)}, r"s.npz has no array 'scale'; it has tokens; the model takes tokens, scale"),
        ({}, "s.npz has no array 'tokens'; it has none"),
        (
            {"tokens": np.ones((2, 3), int), "scale": np.ones((2, 1)), "more": np.ones(1)},
            "s.npz has an array 'more', which is no input of the model; it takes tokens, scale",
        ),
        ({"tokens": np.ones((2, 3)), "scale": np.ones((2, 1))}, "s.npz: 'tokens' is float64, the model takes int64"),
        (
            {"tokens": np.ones((2, 4), int), "scale": np.ones((2, 1))},
            r"s.npz: 'tokens' has shape \[2, 4\], the model takes \[batch, 3\] \(samples first\)",
        ),
        (
            {"tokens": np.ones((2, 3), int), "scale": np.ones(2)},
            r"s.npz: 'scale' has shape \[2\], the model takes \[batch, 1\]",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_named(
    arrays: dict[str, np.ndarray], message: str, tmp_path: Path, two_inputs: ModelFile
) -> None:
    np.savez(tmp_path / "s.npz", **arrays)  # type: ignore[arg-type]  # (numpy's stub mixes the arrays up with allow_pickle)
    with pytest.raises(ExportError, match=message):
        load_samples(tmp_path / "s.npz", two_inputs)


BROKEN_HEADER = b"\x93NUMPY\x01\x00\x3c\x00" + b"{'descr': '<f4', 'fortran_order': False, 'shape': ((3,), }".ljust(59) + b"\n"


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 broken", BROKEN_HEADER])
def test_files_that_hold_no_arrays_are_refused(content: bytes, tmp_path: Path, two_inputs: ModelFile) -> None:
    (tmp_path / "s.npz").write_bytes(content)
    with pytest.raises(ExportError, match=r"s.npz is no .npz file of numbers; write one with numpy.savez"):
        load_samples(tmp_path / "s.npz", two_inputs)


def test_pickles_are_not_opened(tmp_path: Path, two_inputs: ModelFile) -> None:
    np.savez(tmp_path / "s.npz", tokens=np.array([{}], object))
    with pytest.raises(ExportError, match=r"s.npz is no .npz file of numbers"):
        load_samples(tmp_path / "s.npz", two_inputs)


def test_a_missing_file_is_named(tmp_path: Path, two_inputs: ModelFile) -> None:
    with pytest.raises(ExportError, match="cannot read the samples .*none.npz: No such file or directory"):
        load_samples(tmp_path / "none.npz", two_inputs)
