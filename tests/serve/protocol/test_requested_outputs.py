from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from halfserve.protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from halfserve.serve.engine.errors import InvalidArgumentError, UnsupportedError
from halfserve.serve.engine.requests import RemarkedAnswer
from halfserve.serve.protocol.codec import RequestedOutput, requested_names, special_outputs
from halfserve.serve.protocol.request_cache import (
    MANY_CLASSES,
    MAX_CLASSES,
    MAX_NAMED,
    ResponseTemplates,
    classify,
    parameters_of,
)
from halfserve.serve.protocol.shared_memory import SharedMemory
from tests.serve.protocol.test_codec import OFF, TWO, model

Y = {"y": np.zeros((1, 2), np.float16)}


def asking(**parameters: InferParameter) -> ModelInferRequest:
    message = ModelInferRequest()
    output = message.outputs.add(name="y")
    for name, value in parameters.items():
        output.parameters[name].CopyFrom(value)
    return message


def test_outputs_are_all_or_those_asked_for() -> None:
    message = ModelInferRequest()
    assert requested_names(message, TWO) == ("y", "z")
    message.outputs.add(name="z")
    assert requested_names(message, TWO) == ("z",)
    message.outputs.add(name="y")
    assert requested_names(message, TWO) == ("z", "y")


def test_an_output_that_comes_twice_is_answered_once() -> None:
    message = asking(classification=InferParameter(int64_param=3))
    message.outputs.add(name="z")
    message.outputs.add().CopyFrom(message.outputs[0])
    assert requested_names(message, TWO) == ("y", "z")
    assert special_outputs(message, TWO, OFF) == {"y": RequestedOutput(place=None, classes=3)}
    message.outputs[2].parameters["classification"].int64_param = 2
    with pytest.raises(InvalidArgumentError, match="output 'y' is named twice, with other parameters; expected one way"):
        requested_names(message, TWO)


def test_an_unknown_output_is_refused() -> None:
    message = ModelInferRequest()
    message.outputs.add(name="probabilities")
    with pytest.raises(InvalidArgumentError, match="output 'probabilities' is not one of the model's: 'y', 'z'"):
        requested_names(message, TWO)


def test_classes_are_asked_for_by_number() -> None:
    for three in (InferParameter(int64_param=3), InferParameter(uint64_param=3)):
        wanted = special_outputs(asking(classification=three), TWO, OFF)
        assert wanted == {"y": RequestedOutput(place=None, classes=3)}
    assert special_outputs(asking(classification=InferParameter(int64_param=0)), TWO, OFF) == {}
    assert special_outputs(asking(binary_data=InferParameter(bool_param=True)), TWO, OFF) == {}


@pytest.mark.parametrize("value", [InferParameter(int64_param=-1), InferParameter(string_param="3"), InferParameter()])
def test_a_count_of_classes_that_is_none_is_refused(value: InferParameter) -> None:
    with pytest.raises(InvalidArgumentError, match="output 'y': parameter classification is not a whole number"):
        special_outputs(asking(classification=value), TWO, OFF)


def test_text_cannot_be_classified() -> None:
    message = ModelInferRequest()
    message.outputs.add(name="z").parameters["classification"].int64_param = 1
    with pytest.raises(InvalidArgumentError, match="output 'z' has datatype BYTES, expected numbers"):
        special_outputs(message, TWO, OFF)


def test_a_place_is_checked_before_anything_is_computed() -> None:
    placed = asking(
        shared_memory_region=InferParameter(string_param="r"), shared_memory_byte_size=InferParameter(int64_param=4)
    )
    with pytest.raises(UnsupportedError, match="shared memory is off on this server"):
        special_outputs(placed, TWO, OFF)
    with pytest.raises(Exception, match="shared memory region 'r' is not registered"):
        special_outputs(placed, TWO, SharedMemory(enabled=True))


def test_an_answer_of_which_one_output_is_wanted_specially_says_all_that_others_say() -> None:
    scores = np.array([[0.5, 2.0]], np.float16)
    names = np.array([[b"cat"]], object)
    wanted = {"y": RequestedOutput(place=None, classes=1)}
    answer = ModelInferResponse.FromString(ResponseTemplates(TWO, 1, wanted).response(b"42", {"y": scores, "z": names}, OFF, 0))
    assert (answer.id, answer.model_name, answer.model_version) == ("42", "m", "2")
    assert [(o.name, o.datatype, list(o.shape)) for o in answer.outputs] == [("y", "BYTES", [1, 1]), ("z", "BYTES", [1, 1])]
    assert list(answer.raw_output_contents) == [b"\x0a\0\0\x002.000000:1", b"\x03\0\0\0cat"]


def test_a_model_without_a_batch_dimension_has_one_list_of_classes() -> None:
    whole = model(max_batch_size=0)
    wanted = {"y": RequestedOutput(place=None, classes=2)}
    scores = np.array([[0.5, 2.0], [3.0, 1.0]], np.float16)
    answer = ModelInferResponse.FromString(ResponseTemplates(whole, 1, wanted).response(b"", {"y": scores}, OFF, 0))
    assert [list(output.shape) for output in answer.outputs] == [[2]]
    assert list(answer.raw_output_contents) == [b"\x0a\0\0\x003.000000:2\x0a\0\0\x002.000000:1"]


def test_the_best_classes_of_every_row_in_words() -> None:
    scores = np.array([[0.25, 1.5, -2.0], [3.0, 3.0, 1.0]], np.float16)
    named = classify(scores, 2, ["cat", "dog"], batched=True)
    assert named.tolist() == [[b"1.500000:1:dog", b"0.250000:0:cat"], [b"3.000000:0:cat", b"3.000000:1:dog"]]


def test_many_equal_scores_come_by_their_index() -> None:
    scores = np.array([[1, 2] * 50])  # more than what sorts keep in order anyway
    named = classify(scores, 100, (), batched=True)
    assert [int(text.split(b":")[1]) for text in named[0]] == [*range(1, 100, 2), *range(0, 100, 2)]


def test_without_a_batch_there_is_one_list() -> None:
    assert classify(np.array([7, 9, 8]), 9, (), batched=False).tolist() == [b"9:1", b"8:2", b"7:0"]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_whole_numbers_are_ranked_as_they_are(dtype: type[np.integer[Any]]) -> None:
    most, least = np.iinfo(dtype).max, np.iinfo(dtype).min
    named = classify(np.array([least, most - 1, most, 3, most], dtype), 5, (), batched=False)
    assert named.tolist() == [f"{v}:{i}".encode() for v, i in ((most, 2), (most, 4), (most - 1, 1), (3, 3), (least, 0))]


def test_what_is_no_number_is_never_the_best() -> None:
    scores = np.array([[np.nan, -np.inf, 1.0]], np.float32)
    assert classify(scores, 3, (), batched=True).tolist() == [[b"1.000000:2", b"-inf:1", b"nan:0"]]


@pytest.mark.filterwarnings("error")
def test_a_nan_of_the_signalling_kind_is_a_nan_like_others() -> None:
    scores = np.array([0x7F800001, 0x3F800000] * 8, np.uint32).view(np.float32)
    assert classify(scores, 9, (), batched=False).tolist()[6:] == [b"1.000000:13", b"1.000000:15", b"nan:0"]


@given(hnp.arrays(np.float32, st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 3))), st.integers(1, 20))
def test_every_class_comes_once_and_in_order(scores: np.ndarray[Any, Any], count: int) -> None:
    named = classify(scores, count, (), batched=True)
    classes = scores[0].size if len(scores) else scores.shape[1] * scores.shape[2]
    assert named.shape == (len(scores), min(count, classes))
    for row, best in zip(scores.reshape(len(scores), classes), named, strict=True):
        indices = [int(text.split(b":")[1]) for text in best]
        assert len(set(indices)) == len(indices)
        values = row[indices]
        numbers = values[~np.isnan(values)]
        assert (numbers[1:] <= numbers[:-1]).all()
        assert np.isnan(values[len(numbers) :]).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
def test_a_few_of_many_classes_are_found_as_if_all_were_sorted(dtype: type[np.number[Any]]) -> None:
    scores = np.random.default_rng(0).integers(0, 50, (3, 2 * MANY_CLASSES)).astype(dtype)  # so that many are equal
    if dtype is np.float32:
        scores[0, ::2] = scores[1] = np.nan
        scores[1, 7:9] = 1
    few = classify(scores, 5, (), batched=True)
    sorted_all = [np.argsort(-row.astype(np.float64), kind="stable")[:5].tolist() for row in scores]
    assert [[int(text.split(b":")[1]) for text in row] for row in few] == sorted_all


def test_no_more_classes_are_named_than_an_answer_takes() -> None:
    scores = np.zeros((2, MAX_NAMED), np.float16)
    assert classify(scores, MAX_NAMED // 2, (), batched=True).shape == (2, MAX_NAMED // 2)
    with pytest.raises(InvalidArgumentError, match="131072 classes are asked for, expected at most 65536; ask for fewer"):
        classify(scores, 2**40, (), batched=True)
    with pytest.raises(InvalidArgumentError, match="too large: it has 1000001 classes, expected at most 1000000; ask for"):
        classify(np.zeros((2, MAX_CLASSES + 1), np.int8), 1, (), batched=True)
    assert classify(np.zeros(MAX_CLASSES, np.int8), 1, (), batched=False) == [b"0:0"]


def test_remarks_are_texts() -> None:
    message = ModelInferResponse.FromString(parameters_of(RemarkedAnswer(Y, {"remark": "fp32"})))
    assert message == ModelInferResponse(parameters={"remark": InferParameter(string_param="fp32")})


def test_behind_a_response_it_is_part_of_the_response() -> None:
    response = ModelInferResponse(model_name="m", raw_output_contents=[b"1234"])
    joined = ModelInferResponse.FromString(response.SerializeToString() + parameters_of(RemarkedAnswer(Y, {"remark": "fp32"})))
    assert (joined.model_name, list(joined.raw_output_contents), joined.parameters["remark"].string_param) == (
        "m",
        [b"1234"],
        "fp32",
    )


def test_an_ordinary_answer_says_nothing() -> None:
    assert parameters_of(Y) == b""
