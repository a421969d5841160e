from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile, open_model
from halfserve.export.verification.samples import Array, Feeds, Input, as_array, inputs_of, load_samples, make_feeds
from tests.export.stored_models import parse, sums

FLOAT, HALF, INT, BOOL, TEXT = (
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.INT64,
    TensorProto.BOOL,
    TensorProto.STRING,
)


def takes(name: str, elem_type: int, *dims: int | str | None) -> Input:
    return Input(name=name, elem_type=elem_type, dims=dims)


X = takes("x", HALF, "batch", 3)
IDS = takes("ids", INT, "batch", "length")


def test_samples_are_cut_into_batches_and_nothing_is_lost() -> None:
    x, ids = np.arange(21.0).reshape(7, 3), np.arange(14).reshape(7, 2)
    given: list[Tensor | Array] = [x, torch.from_numpy(ids)]
    feeds = make_feeds([X, IDS], given, 3)
    assert [len(batch["x"]) for batch in feeds.batches] == [3, 3, 1]
    assert np.array_equal(np.concatenate([batch["ids"] for batch in feeds.batches]), ids)
    assert (feeds.samples, feeds.resizable) == (7, True)


def test_inputs_can_be_named() -> None:
    x, ids = np.zeros((2, 3)), np.zeros((2, 5), int)
    (batch,) = make_feeds([X, IDS], {"ids": ids, "x": x}, 32).batches
    assert list(batch) == ["x", "ids"]


def test_batches_can_be_given_as_they_are_and_differ_in_length() -> None:
    given = [{"x": np.zeros((n, 3)), "ids": np.zeros((n, length), int)} for n, length in ((2, 4), (1, 9))]
    feeds = make_feeds([X, IDS], given, 1)
    assert [batch["ids"].shape for batch in feeds.batches] == [(2, 4), (1, 9)]
    assert feeds.samples == 3


def test_a_batch_without_samples_is_refused() -> None:
    given = [{"x": np.zeros((count, 3))} for count in (2, 0)]
    with pytest.raises(ExportError, match="batch 1 of the samples is empty; expected at least 1 sample in each: leave it out"):
        make_feeds([X], given, 32)
    rows, columns = takes("x", FLOAT, "rows", 3), takes("y", FLOAT, "columns")
    assert make_feeds([rows, columns], [{"x": np.zeros((0, 3)), "y": np.ones(4)}], 32).batches


def test_a_fixed_batch_leaves_a_remainder_out() -> None:
    feeds = make_feeds([takes("x", FLOAT, 2, 3)], np.zeros((5, 3)), 32)
    assert ([len(batch["x"]) for batch in feeds.batches], feeds.samples, feeds.resizable) == ([2, 2], 4, False)


@pytest.mark.parametrize(
    "wanted",
    [
        [takes("x", FLOAT, 3), takes("y", FLOAT, 4)],
        [takes("x", FLOAT, "rows"), takes("y", FLOAT, "columns")],
        [takes("x", FLOAT, 3), takes("y", FLOAT, None)],
        [takes("x", FLOAT, "n"), takes("y", FLOAT)],
    ],
)
def test_a_model_without_a_batch_dimension_takes_arrays_whole(wanted: list[Input]) -> None:
    arrays = [np.zeros(3), np.zeros(() if wanted[1].dims == () else 4)]
    feeds = make_feeds(wanted, arrays, 2)
    assert [array.shape for array in feeds.batches[0].values()] == [array.shape for array in arrays]
    assert (len(feeds.batches), feeds.samples, feeds.resizable) == (1, 1, False)


def test_a_model_without_inputs_runs_once() -> None:
    assert make_feeds([], [], 32) == Feeds(batches=({},), samples=1, resizable=False)


@pytest.mark.parametrize(
    ("wanted", "given", "message"),
    [
        ([X], np.zeros((2, 4)), r"input 'x': expected float16 \[batch, 3\], got float64 \[2, 4\]"),
        ([X], np.zeros((2, 3), int), r"input 'x': expected float16 \[batch, 3\], got int64 \[2, 3\]"),
        ([X], np.zeros(2), r"input 'x': expected float16 \[batch, 3\], got float64 \[2\]"),
        ([IDS], np.zeros((2, 4), np.int32), r"input 'ids': expected int64 \[batch, length\], got int32 \[2, 4\]"),
        ([IDS], np.zeros((2, 4)), r"input 'ids': expected int64 .*, got float64"),
        ([takes("m", BOOL, "n")], np.zeros(2), r"input 'm': expected bool \[n\], got float64"),
        ([takes("t", TEXT, "n")], np.zeros(2), r"input 't': expected string \[n\], got float64"),
        ([X, IDS], np.zeros((2, 3)), r"the model takes 2 inputs \(x, ids\), 1 were given"),
        ([X, IDS], {"x": np.zeros((2, 3))}, r"input 'ids' is not among the samples \(x\); the model takes x, ids"),
        ([X], {"x": np.zeros((2, 3)), "z": 0}, r"the samples name 'z', which is not an input of the model; it takes x"),
        (
            [X, IDS],
            [np.zeros((2, 3)), np.zeros((3, 3), int)],
            r"same number of samples first, at least 1; got \[2, 3\], \[3, 3\]",
        ),
        ([X], np.zeros((0, 3)), r"at least 1; got \[0, 3\]"),
        ([X], np.float32(1), r"at least 1; got \[\]"),
        ([takes("x", FLOAT, 4)], np.zeros(3), "batches of exactly 4, only 3 samples were given"),
        ([X], [{"x": np.zeros((1, 3))}, {"x": np.zeros((1, 2))}], r"input 'x': expected .*, got float64 \[1, 2\]"),
    ],
)
def test_samples_that_do_not_fit_are_refused_by_name(wanted: list[Input], given: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        make_feeds(wanted, given, 32)


def test_text_samples_of_any_length_fit() -> None:
    feeds = make_feeds([takes("t", TEXT, "n")], np.array(["a", "bc"], object), 32)
    assert feeds.batches[0]["t"].dtype.kind == "U"
    assert as_array(["x"]).dtype.kind == "U"


def test_inputs_with_initializers_are_optional_and_sizes_free() -> None:
    values = [helper.make_tensor_value_info(name, FLOAT, [-1, 2]) for name in ("x", "w")]
    weight = helper.make_tensor("w", FLOAT, [1], [1.0])
    model = helper.make_model(helper.make_graph([], "g", values, [], [weight]))
    assert inputs_of(model) == [takes("x", FLOAT, None, 2)]


def test_inputs_that_are_no_tensors_cannot_be_sampled() -> None:
    value = helper.make_value_info("s", helper.make_sequence_type_proto(helper.make_tensor_type_proto(FLOAT, None)))
    model = helper.make_model(helper.make_graph([], "g", [value], []))
    with pytest.raises(ExportError, match="input 's' is a sequence; only tensors are supported"):
        inputs_of(model)


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
