from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

from halfserve.export.export_errors import ExportError
from halfserve.export.verification.samples import Array, Feeds, Input, as_array, inputs_of, make_feeds

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
