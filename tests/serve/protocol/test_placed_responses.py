from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory as SystemMemory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protos.inference_pb2 import ModelInferResponse
from serve.engine.errors import InvalidArgumentError
from serve.engine.requests import Answer, BatchOutputs, RemarkedAnswer
from serve.engine.tensors import Array
from serve.protocol.placed_responses import MAX_ENTRIES, PlacedResponses
from serve.protocol.shared_memory import Place, SharedMemory
from serve.protocol.wanted_outputs import WantedOutput, special_response
from tests.serve.protocol.test_codec import TWO

halves = hnp.arrays(np.float16, st.sampled_from([(1, 2), (3, 2), (2, 1, 2)]))
texts = hnp.arrays(object, (1, 2), elements=st.binary(max_size=5))
Y, Z = Place(region="r", offset=0, byte_size=12), Place(region="r", offset=16, byte_size=64)
REGION_BYTES = 96
WHOLE = Place(region="r", offset=0, byte_size=REGION_BYTES)


@pytest.fixture(scope="module")
def memory() -> Iterator[SharedMemory]:
    block = SystemMemory(create=True, size=REGION_BYTES)
    regions = SharedMemory(enabled=True)
    regions.register_system("r", block.name, 0, REGION_BYTES)
    yield regions
    block.close()
    block.unlink()


def written(memory: SharedMemory) -> bytes:
    return memory.read(WHOLE).tobytes()


@given(st.lists(st.tuples(halves, texts), min_size=1, max_size=4), st.sampled_from([b"", b"42"]), st.booleans(), st.booleans())
def test_answers_are_those_that_are_put_together_one_by_one(
    memory: SharedMemory, answers: list[tuple[Array, Array]], request_id: bytes, y_lies: bool, z_lies: bool
) -> None:
    places = {name: place for name, place, lies in (("y", Y, y_lies), ("z", Z, z_lies)) if lies}
    wanted = {name: WantedOutput(place=place, classes=None) for name, place in places.items()}
    forms = PlacedResponses(TWO, places)
    for y, z in answers * 2:
        outputs = {"y": y, "z": z}
        memory.write(WHOLE, bytes(REGION_BYTES))
        plain = special_response(TWO, request_id, outputs, wanted, memory, memory.latest)
        put = written(memory)
        memory.write(WHOLE, bytes(REGION_BYTES))
        learned = forms.response(request_id, outputs, memory, memory.latest)
        assert ModelInferResponse.FromString(learned) == ModelInferResponse.FromString(plain)
        assert written(memory) == put
        assert not y_lies or put[: y.nbytes] == y.tobytes()


def test_rows_of_a_batch_and_remarks_are_told(memory: SharedMemory) -> None:
    forms = PlacedResponses(TWO, {"y": Y})
    whole = BatchOutputs({"y": np.array([[1, 2], [3, 4]], np.float16)})
    answer = ModelInferResponse.FromString(forms.response(b"", Answer(whole, ("y",), 1, 2), memory, memory.latest))
    assert list(answer.outputs[0].shape) == [1, 2]
    assert list(answer.raw_output_contents) == [b""]
    assert np.frombuffer(written(memory)[:4], np.float16).tolist() == [3, 4]
    remarked = RemarkedAnswer({"y": whole.arrays["y"][:1]}, {"computed_in": "fp32"})
    answer = ModelInferResponse.FromString(forms.response(b"", remarked, memory, memory.latest))
    assert answer.parameters["computed_in"].string_param == "fp32"


def test_an_output_that_does_not_fit_is_an_error_each_time(memory: SharedMemory) -> None:
    forms = PlacedResponses(TWO, {"y": Y})
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="an output of 16 bytes does not fit its 12 bytes"):
            forms.response(b"", {"y": np.zeros((4, 2), np.float16)}, memory, memory.latest)
        forms.response(b"", {"y": np.zeros((3, 2), np.float16)}, memory, memory.latest)


def test_answers_of_endlessly_many_shapes_are_not_all_kept(memory: SharedMemory) -> None:
    forms = PlacedResponses(TWO, {"z": Z})
    for width in range(MAX_ENTRIES + 2):
        outputs = {"y": np.zeros((1, width), np.float16), "z": np.array([[b"a"]], object)}
        response = forms.response(b"", outputs, memory, memory.latest)
    assert list(ModelInferResponse.FromString(response).outputs[0].shape) == [1, MAX_ENTRIES + 1]
    assert len(forms._entries) == MAX_ENTRIES
