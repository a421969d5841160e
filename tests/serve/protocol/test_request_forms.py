from __future__ import annotations

import numpy as np
import pytest

from protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from serve.engine.requests import RawInputs
from serve.engine.tensors import Tensors
from serve.protocol.codec import raw_layout
from serve.protocol.infer_wire import CutRequest, cut_request
from serve.protocol.request_forms import MAX_FORM_BYTES, MAX_FORMS, RequestForm, RequestForms
from tests.serve.protocol.test_codec import TWO, A, B, request


def form_of(message: ModelInferRequest) -> RequestForm:
    return RequestForm(
        model=TWO, layout=raw_layout(message, TWO), outputs=("y",), rows=1, bucket="same", turn=TWO.queue_policy.turn(0, None)
    )


def strings(*elements: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
    array = np.empty((1, len(elements)), object)
    array[0, :] = elements
    return array


def test_the_bytes_of_the_next_request_are_viewed_in_place() -> None:
    form = form_of(request(B, A))
    second = request(("b", "INT32", [1, 3], np.arange(3, dtype="<i4").tobytes()), ("a", "FP16", [1, 2], b"\x00\x3c\x00\x40"))
    data = second.SerializeToString()
    cut = cut_request(data)
    assert cut is not None
    offsets = form.offsets(cut.raw)
    assert offsets is not None
    assert form.layout is not None
    arrays = RawInputs(form.layout, data, offsets)
    assert (arrays["a"].tolist(), arrays["b"].tolist()) == ([[1.0, 2.0]], [[0, 1, 2]])
    assert not arrays["a"].flags.owndata


@pytest.mark.parametrize("raw", [[], [(0, 4)], [(0, 4), (4, 11)], [(0, 4), (4, 12), (16, 1)]])
def test_other_counts_or_sizes_are_not_of_this_form(raw: list[tuple[int, int]]) -> None:
    assert form_of(request(A, B)).offsets(raw) is None


@pytest.mark.parametrize("times", [1, 2])  # the second one is answered from what was learned
def test_the_response_has_one_raw_entry_per_output(times: int) -> None:
    form = form_of(request(A, B))
    outputs: Tensors = {"z": strings(b"five"), "y": np.ones((1, 2), np.float16)}
    for _ in range(times):
        response = ModelInferResponse.FromString(form.response(b"42", outputs))
    assert (response.model_name, response.model_version, response.id) == ("m", "2", "42")
    assert [(o.name, o.datatype, list(o.shape)) for o in response.outputs] == [("z", "BYTES", [1, 1]), ("y", "FP16", [1, 2])]
    assert list(response.raw_output_contents) == [b"\x04\x00\x00\x00five", b"\x00\x3c\x00\x3c"]


def test_answers_of_other_shapes_say_theirs() -> None:
    form = form_of(request(A, B))
    for rows in (1, 3, 1):
        response = ModelInferResponse.FromString(form.response(b"", {"y": np.zeros((rows, 2), np.float16)}))
        assert list(response.outputs[0].shape) == [rows, 2]


def test_forms_are_found_by_all_that_is_neither_id_nor_bytes() -> None:
    forms = RequestForms()
    first, second, other = request(A, B), request(A, B), request(B, A)
    second.id = "43"
    form = form_of(first)
    forms.keep(cut_request(first.SerializeToString()), form)
    assert forms.find(cut_request(second.SerializeToString())) is form
    assert forms.find(cut_request(other.SerializeToString())) is None
    assert forms.find(None) is None
    forms.forget()
    assert forms.find(cut_request(second.SerializeToString())) is None


def test_endlessly_many_forms_are_forgotten() -> None:
    forms, form = RequestForms(), form_of(request(A, B))
    for number in range(MAX_FORMS + 1):
        forms.keep(CutRequest(str(number).encode(), b"", 0, []), form)
    assert forms.find(CutRequest(b"0", b"", 0, [])) is None
    forms.keep(CutRequest(bytes(MAX_FORM_BYTES + 1), b"", 0, []), form)
    assert forms.find(CutRequest(bytes(MAX_FORM_BYTES + 1), b"", 0, [])) is None


def test_a_twin_differs_in_its_id_and_its_tensors_alone() -> None:
    forms, first = RequestForms(), request(A, B)
    first.parameters["priority"].int64_param = 1
    data = first.SerializeToString()
    cut = cut_request(data)
    assert cut is not None
    form = form_of(first)
    forms.keep_twin(data, cut, form)
    twin = request(("a", "FP16", [1, 2], b"1234"), ("b", "INT32", [1, 3], b"123456789012"))
    twin.parameters["priority"].int64_param = 1
    twin.id = "77"
    found = forms.twin(twin.SerializeToString())
    assert found is not None
    assert found.form is form
    others = [ModelInferRequest.FromString(data) for _ in range(4)]
    others[0].model_name = "n"
    others[1].parameters["priority"].int64_param = 2
    others[2].inputs[1].name = "c"
    others[3].inputs[1].shape[:] = [3, 1]
    for other in others:
        changed = other.SerializeToString()
        assert len(changed) == len(data)
        assert forms.twin(changed) is None


def test_what_stands_behind_the_tensors_must_be_the_same_too() -> None:
    forms, plain = RequestForms(), request(A, B)
    first, other = (
        plain.SerializeToString() + ModelInferRequest(model_version=version).SerializeToString() for version in "23"
    )
    cut = cut_request(first)
    assert cut is not None
    forms.keep_twin(first, cut, form_of(plain))
    assert forms.twin(first) is not None
    assert forms.twin(other) is None
