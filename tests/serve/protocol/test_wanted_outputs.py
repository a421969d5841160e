from __future__ import annotations

import numpy as np
import pytest

from protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse
from serve.engine.errors import InvalidArgumentError, UnsupportedError
from serve.protocol.shared_memory import SharedMemory
from serve.protocol.wanted_outputs import WantedOutput, special_response, wanted_names, wanted_specially
from tests.serve.protocol.test_codec import OFF, TWO, model


def asking(**parameters: InferParameter) -> ModelInferRequest:
    message = ModelInferRequest()
    output = message.outputs.add(name="y")
    for name, value in parameters.items():
        output.parameters[name].CopyFrom(value)
    return message


def test_outputs_are_all_or_those_asked_for() -> None:
    message = ModelInferRequest()
    assert wanted_names(message, TWO) == ("y", "z")
    message.outputs.add(name="z")
    assert wanted_names(message, TWO) == ("z",)
    message.outputs.add(name="y")
    assert wanted_names(message, TWO) == ("z", "y")


def test_an_output_that_comes_twice_is_answered_once() -> None:
    message = asking(classification=InferParameter(int64_param=3))
    message.outputs.add(name="z")
    message.outputs.add().CopyFrom(message.outputs[0])
    assert wanted_names(message, TWO) == ("y", "z")
    assert wanted_specially(message, TWO, OFF) == {"y": WantedOutput(place=None, classes=3)}
    message.outputs[2].parameters["classification"].int64_param = 2
    with pytest.raises(InvalidArgumentError, match="output 'y' is named twice, with other parameters; expected one way"):
        wanted_names(message, TWO)


def test_an_unknown_output_is_refused() -> None:
    message = ModelInferRequest()
    message.outputs.add(name="probabilities")
    with pytest.raises(InvalidArgumentError, match="output 'probabilities' is not one of the model's: 'y', 'z'"):
        wanted_names(message, TWO)


def test_classes_are_asked_for_by_number() -> None:
    for three in (InferParameter(int64_param=3), InferParameter(uint64_param=3)):
        wanted = wanted_specially(asking(classification=three), TWO, OFF)
        assert wanted == {"y": WantedOutput(place=None, classes=3)}
    assert wanted_specially(asking(classification=InferParameter(int64_param=0)), TWO, OFF) == {}
    assert wanted_specially(asking(binary_data=InferParameter(bool_param=True)), TWO, OFF) == {}


@pytest.mark.parametrize("value", [InferParameter(int64_param=-1), InferParameter(string_param="3"), InferParameter()])
def test_a_count_of_classes_that_is_none_is_refused(value: InferParameter) -> None:
    with pytest.raises(InvalidArgumentError, match="output 'y': parameter classification is no whole number"):
        wanted_specially(asking(classification=value), TWO, OFF)


def test_text_cannot_be_classified() -> None:
    message = ModelInferRequest()
    message.outputs.add(name="z").parameters["classification"].int64_param = 1
    with pytest.raises(InvalidArgumentError, match="output 'z' has datatype BYTES, expected numbers"):
        wanted_specially(message, TWO, OFF)


def test_a_place_is_checked_before_anything_is_computed() -> None:
    placed = asking(
        shared_memory_region=InferParameter(string_param="r"), shared_memory_byte_size=InferParameter(int64_param=4)
    )
    with pytest.raises(UnsupportedError, match="shared memory is off on this server"):
        wanted_specially(placed, TWO, OFF)
    with pytest.raises(Exception, match="shared memory region 'r' is not registered"):
        wanted_specially(placed, TWO, SharedMemory(enabled=True))


def test_an_answer_of_which_one_output_is_wanted_specially_says_all_that_others_say() -> None:
    scores = np.array([[0.5, 2.0]], np.float16)
    names = np.array([[b"cat"]], object)
    wanted = {"y": WantedOutput(place=None, classes=1)}
    answer = ModelInferResponse.FromString(special_response(TWO, b"42", {"y": scores, "z": names}, wanted, OFF, 0))
    assert (answer.id, answer.model_name, answer.model_version) == ("42", "m", "2")
    assert [(o.name, o.datatype, list(o.shape)) for o in answer.outputs] == [("y", "BYTES", [1, 1]), ("z", "BYTES", [1, 1])]
    assert list(answer.raw_output_contents) == [b"\x0a\0\0\x002.000000:1", b"\x03\0\0\0cat"]


def test_a_model_without_a_batch_dimension_has_one_list_of_classes() -> None:
    whole = model(max_batch_size=0)
    wanted = {"y": WantedOutput(place=None, classes=2)}
    scores = np.array([[0.5, 2.0], [3.0, 1.0]], np.float16)
    answer = ModelInferResponse.FromString(special_response(whole, b"", {"y": scores}, wanted, OFF, 0))
    assert [list(output.shape) for output in answer.outputs] == [[2]]
    assert list(answer.raw_output_contents) == [b"\x0a\0\0\x003.000000:2\x0a\0\0\x002.000000:1"]
