from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protos.inference_pb2 import ModelInferResponse
from serve.engine.requests import Answer, BatchOutputs
from serve.engine.tensors import Array
from serve.protocol.response_forms import MAX_SHAPES, ResponseForms
from tests.serve.protocol.test_codec import TWO

halves = hnp.arrays(np.float16, hnp.array_shapes(min_dims=2, max_dims=3, max_side=4))


@given(st.lists(halves, min_size=1, max_size=3), st.sampled_from([b"", b"42"]), st.integers(1, 3))
def test_rows_of_a_batch_are_answered_as_the_same_arrays_are(batches: list[Array], request_id: bytes, rows: int) -> None:
    forms = ResponseForms(TWO, rows)
    for y in batches * 2:
        whole = np.concatenate([y] * 4)[: rows + 1]
        if len(whole) <= rows:
            continue
        cut = forms.response(request_id, Answer(BatchOutputs({"y": whole}), ("y",), 1, rows + 1))
        plain = ResponseForms(TWO, rows).response(request_id, {"y": whole[1:]})
        assert ModelInferResponse.FromString(cut) == ModelInferResponse.FromString(plain)


def test_outputs_come_in_the_order_that_was_asked_for() -> None:
    names = np.empty((2, 1), object)
    names[:, 0] = [b"a", b"bc"]
    outputs = BatchOutputs({"y": np.ones((2, 2), np.float16), "z": names})
    for _ in range(2):  # BYTES have no fixed size: each answer is put together for itself
        answer = ModelInferResponse.FromString(ResponseForms(TWO, 1).response(b"", Answer(outputs, ("z", "y"), 1, 2)))
        assert [output.name for output in answer.outputs] == ["z", "y"]
        assert list(answer.raw_output_contents) == [b"\x02\0\0\0bc", b"\x00\x3c\x00\x3c"]


@pytest.mark.parametrize("kept", ["_entries", "_of_rows"])
def test_answers_of_endlessly_many_shapes_are_not_all_kept(kept: str) -> None:
    forms = ResponseForms(TWO, 1)
    for width in range(MAX_SHAPES + 2):
        response = forms.response(b"", Answer(BatchOutputs({"y": np.zeros((2, width), np.float16)}), ("y",), 0, 1))
    assert list(ModelInferResponse.FromString(response).outputs[0].shape) == [1, MAX_SHAPES + 1]
    assert len(getattr(forms, kept)) == MAX_SHAPES
