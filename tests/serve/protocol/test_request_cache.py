from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory as SystemMemory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.requests import Answer, BatchOutputs, RemarkedAnswer
from halfserve.serve.engine.tensors import Array, RawInputs, Tensors
from halfserve.serve.protocol.codec import RequestedOutput, raw_layout
from halfserve.serve.protocol.messages import SplitRequest, split_request
from halfserve.serve.protocol.raw_tensors import to_raw
from halfserve.serve.protocol.request_cache import (
    MAX_CACHED,
    MAX_SHAPES,
    MAX_SKELETON_BYTES,
    CachedRequest,
    RequestCache,
    ResponseTemplates,
)
from halfserve.serve.protocol.shared_memory import RegionSlice, SharedMemory, put_slice
from tests.serve.protocol.test_codec import OFF, TWO, A, B, request

halves = hnp.arrays(np.float16, hnp.array_shapes(min_dims=2, max_dims=3, max_side=4))
small_halves = hnp.arrays(np.float16, st.sampled_from([(1, 2), (3, 2), (2, 1, 2)]))
texts = hnp.arrays(object, (1, 2), elements=st.binary(max_size=5))
Y, Z = RegionSlice(region="r", offset=0, byte_size=12), RegionSlice(region="r", offset=16, byte_size=64)
REGION_BYTES = 96
WHOLE = RegionSlice(region="r", offset=0, byte_size=REGION_BYTES)


@pytest.fixture(scope="module")
def memory() -> Iterator[SharedMemory]:
    block = SystemMemory(create=True, size=REGION_BYTES)
    regions = SharedMemory(enabled=True)
    regions.register_system("r", block.name, 0, REGION_BYTES)
    yield regions
    block.close()
    block.unlink()


def cached(message: ModelInferRequest) -> CachedRequest:
    return CachedRequest(
        model=TWO, layout=raw_layout(message, TWO), outputs=("y",), rows=1, bucket="same", turn=TWO.queue_policy.turn(0, None)
    )


def templates(rows: int = 1, /, **places: RegionSlice) -> ResponseTemplates:
    return ResponseTemplates(TWO, rows, {name: RequestedOutput(place=place, classes=None) for name, place in places.items()})


def response(
    made: ResponseTemplates, outputs: Tensors, memory: SharedMemory = OFF, request_id: bytes = b""
) -> ModelInferResponse:
    return ModelInferResponse.FromString(made.response(request_id, outputs, memory, memory.latest))


def strings(*elements: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
    array = np.empty((1, len(elements)), object)
    array[0, :] = elements
    return array


# Requests


def test_the_bytes_of_the_next_request_are_viewed_in_place() -> None:
    known = cached(request(B, A))
    second = request(("b", "INT32", [1, 3], np.arange(3, dtype="<i4").tobytes()), ("a", "FP16", [1, 2], b"\x00\x3c\x00\x40"))
    data = second.SerializeToString()
    cut = split_request(data)
    assert cut is not None
    offsets = known.offsets(cut.raw)
    assert offsets is not None
    assert known.layout is not None
    arrays = RawInputs(known.layout, data, offsets)
    assert (arrays["a"].tolist(), arrays["b"].tolist()) == ([[1.0, 2.0]], [[0, 1, 2]])
    assert not arrays["a"].flags.owndata


@pytest.mark.parametrize("raw", [[], [(0, 4)], [(0, 4), (4, 11)], [(0, 4), (4, 12), (16, 1)]])
def test_other_counts_or_sizes_do_not_fit_a_cached_request(raw: list[tuple[int, int]]) -> None:
    assert cached(request(A, B)).offsets(raw) is None


def test_requests_are_found_by_their_skeleton() -> None:
    cache, known = RequestCache(), cached(request(A, B))
    first, second, other = request(A, B), request(A, B), request(B, A)
    second.id = "43"
    cache.keep(split_request(first.SerializeToString()), known)
    assert cache.find(split_request(second.SerializeToString())) is known
    assert cache.find(split_request(other.SerializeToString())) is None
    assert cache.find(None) is None
    cache.forget()
    assert cache.find(split_request(second.SerializeToString())) is None


def test_the_cache_is_bounded_in_entries_and_bytes() -> None:
    cache, known = RequestCache(), cached(request(A, B))
    for number in range(MAX_CACHED + 1):
        cache.keep(SplitRequest(str(number).encode(), b"", 0, []), known)
    assert cache.find(SplitRequest(b"0", b"", 0, [])) is None
    large = SplitRequest(bytes(MAX_SKELETON_BYTES + 1), b"", 0, [])
    cache.keep(large, known)
    assert cache.find(large) is None


def test_a_pattern_matches_requests_that_differ_in_id_and_tensors_alone() -> None:
    cache, first = RequestCache(), request(A, B)
    first.parameters["priority"].int64_param = 1
    data = first.SerializeToString()
    cut = split_request(data)
    assert cut is not None
    known = cached(first)
    cache.keep_pattern(data, cut, known)
    twin = request(("a", "FP16", [1, 2], b"1234"), ("b", "INT32", [1, 3], b"123456789012"))
    twin.parameters["priority"].int64_param = 1
    twin.id = "77"
    found = cache.match(twin.SerializeToString())
    assert found is not None
    assert found.cached is known
    others = [ModelInferRequest.FromString(data) for _ in range(4)]
    others[0].model_name = "n"
    others[1].parameters["priority"].int64_param = 2
    others[2].inputs[1].name = "c"
    others[3].inputs[1].shape[:] = [3, 1]
    for other in others:
        changed = other.SerializeToString()
        assert len(changed) == len(data)
        assert cache.match(changed) is None


def test_a_pattern_includes_the_bytes_behind_the_tensors() -> None:
    cache, plain = RequestCache(), request(A, B)
    first, other = (
        plain.SerializeToString() + ModelInferRequest(model_version=version).SerializeToString() for version in "23"
    )
    cut = split_request(first)
    assert cut is not None
    cache.keep_pattern(first, cut, cached(plain))
    assert cache.match(first) is not None
    assert cache.match(other) is None


# Responses


def test_the_response_has_one_raw_entry_per_output() -> None:
    made, outputs = templates(), {"z": strings(b"five"), "y": np.ones((1, 2), np.float16)}
    for _ in range(2):  # the second one is answered from what was learned
        answer = response(made, outputs, request_id=b"42")
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "2", "42")
        assert [(o.name, o.datatype, list(o.shape)) for o in answer.outputs] == [("z", "BYTES", [1, 1]), ("y", "FP16", [1, 2])]
        assert list(answer.raw_output_contents) == [b"\x04\x00\x00\x00five", b"\x00\x3c\x00\x3c"]


def test_responses_of_other_shapes_have_theirs() -> None:
    made = templates()
    for rows in (1, 3, 1):
        assert list(response(made, {"y": np.zeros((rows, 2), np.float16)}).outputs[0].shape) == [rows, 2]


@given(st.lists(halves, min_size=1, max_size=3), st.sampled_from([b"", b"42"]), st.integers(1, 3))
def test_rows_of_a_batch_are_answered_as_the_same_arrays_are(batches: list[Array], request_id: bytes, rows: int) -> None:
    made = templates(rows)
    for y in batches * 2:
        whole = np.concatenate([y] * 4)[: rows + 1]
        if len(whole) > rows:
            answer = response(made, Answer(BatchOutputs({"y": whole}), ("y",), 1, rows + 1), request_id=request_id)
            assert answer == response(templates(rows), {"y": whole[1:]}, request_id=request_id)


def test_outputs_come_in_the_order_that_was_asked_for() -> None:
    names = np.empty((2, 1), object)
    names[:, 0] = [b"a", b"bc"]
    outputs = BatchOutputs({"y": np.ones((2, 2), np.float16), "z": names})
    for _ in range(2):  # BYTES have no fixed size: each answer is put together for itself
        answer = response(templates(), Answer(outputs, ("z", "y"), 1, 2))
        assert [output.name for output in answer.outputs] == ["z", "y"]
        assert list(answer.raw_output_contents) == [b"\x02\0\0\0bc", b"\x00\x3c\x00\x3c"]


@pytest.mark.parametrize("kept", ["_entries", "_of_rows"])
def test_templates_are_bounded_in_shapes(kept: str) -> None:
    made = templates()
    for width in range(MAX_SHAPES + 2):
        answer = made.response(b"", Answer(BatchOutputs({"y": np.zeros((2, width), np.float16)}), ("y",), 0, 1), OFF, 0)
    assert list(ModelInferResponse.FromString(answer).outputs[0].shape) == [1, MAX_SHAPES + 1]
    assert len(getattr(made, kept)) == MAX_SHAPES


@given(st.lists(st.tuples(small_halves, texts), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_outputs_in_shared_memory_are_written_there_and_described(
    memory: SharedMemory, answers: list[tuple[Array, Array]], y_lies: bool, z_lies: bool
) -> None:
    places = {name: place for name, place, lies in (("y", Y, y_lies), ("z", Z, z_lies)) if lies}
    made = templates(**places)
    for y, z in answers * 2:
        memory.write(WHOLE, bytes(REGION_BYTES))
        expected, held = ModelInferResponse(model_name="m", model_version="2", id="42"), bytearray(REGION_BYTES)
        for name, array in (("y", y), ("z", z)):
            raw = to_raw(array, TWO.outputs[name].datatype)
            entry = expected.outputs.add(name=name, datatype=TWO.outputs[name].datatype.wire, shape=array.shape)
            expected.raw_output_contents.append(b"" if name in places else raw)
            if name in places:
                put_slice(entry.parameters, places[name], len(raw))
                held[places[name].offset : places[name].offset + len(raw)] = raw
        assert response(made, {"y": y, "z": z}, memory, b"42") == expected
        assert memory.read(WHOLE).tobytes() == held


def test_rows_of_a_batch_go_to_shared_memory_and_remarks_are_reported(memory: SharedMemory) -> None:
    made, whole = templates(y=Y), BatchOutputs({"y": np.array([[1, 2], [3, 4]], np.float16)})
    answer = response(made, Answer(whole, ("y",), 1, 2), memory)
    assert (list(answer.outputs[0].shape), list(answer.raw_output_contents)) == ([1, 2], [b""])
    assert np.frombuffer(memory.read(WHOLE).tobytes()[:4], np.float16).tolist() == [3, 4]
    remarked = RemarkedAnswer({"y": whole.arrays["y"][:1]}, {"computed_in": "fp32"})
    assert response(made, remarked, memory).parameters["computed_in"].string_param == "fp32"


def test_an_output_that_does_not_fit_is_an_error_each_time(memory: SharedMemory) -> None:
    made = templates(y=Y)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="an output of 16 bytes does not fit its 12 bytes"):
            response(made, {"y": np.zeros((4, 2), np.float16)}, memory)
        response(made, {"y": np.zeros((3, 2), np.float16)}, memory)


# Sequence ids

ids = st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(max_size=40))


def in_sequence(key: int | str, kind: str = "", **more: bool) -> ModelInferRequest:
    message = request(A)
    kind = kind or ("string_param" if isinstance(key, str) else "int64_param")
    setattr(message.parameters["sequence_id"], kind, key)
    for name, flag in more.items():
        message.parameters[name].bool_param = flag
    return message


def split(message: ModelInferRequest) -> tuple[bytes, SplitRequest]:
    data = message.SerializeToString(deterministic=True)
    cut = split_request(data)
    assert cut is not None
    return data, cut


@given(ids)
def test_a_sequence_id_is_read_from_its_bytes(key: int | str) -> None:
    data, cut = split(in_sequence(key, sequence_start=True))
    start, size = cut.sequence
    assert cached(in_sequence(1)).with_sequence(data[start : start + size]) == {"sequence_id": key}


def test_requests_of_many_sequences_have_one_skeleton() -> None:
    cuts = [split(in_sequence(key, sequence_start=True, sequence_end=False))[1] for key in range(200, 300)]
    assert len({cut.skeleton for cut in cuts}) == 1
    assert split(in_sequence(200, sequence_start=False, sequence_end=False))[1].skeleton != cuts[0].skeleton


def test_a_pattern_has_a_hole_for_the_sequence_id() -> None:
    data, cut = split(in_sequence("first"))
    cache, known = RequestCache(), cached(in_sequence("first"))
    cache.keep_pattern(data, cut, known)
    other = split(in_sequence("other"))[0]
    pattern = cache.match(other)
    assert pattern is not None
    assert known.with_sequence(other[pattern.sequence_start : pattern.sequence_end]) == {"sequence_id": "other"}
    assert cache.match(split(in_sequence("other", sequence_end=True))[0]) is None
    assert cache.match(split(request(A))[0]) is None


@pytest.mark.parametrize(
    ("key", "kind", "expected"),
    [
        (2**64 - 1, "uint64_param", {"sequence_id": 2**64 - 1}),
        (True, "bool_param", {"sequence_id": True}),
        (1.5, "double_param", {"sequence_id": 1.5}),
    ],
)
def test_a_sequence_id_of_any_type_is_read(key: int, kind: str, expected: dict[str, object]) -> None:
    data, cut = split(in_sequence(key, kind))
    start, size = cut.sequence
    assert cached(request(A)).with_sequence(data[start : start + size]) == expected


def test_a_malformed_sequence_id_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="is not a ModelInferRequest message"):
        cached(request(A)).with_sequence(b"\x1a\x02\xff\xff")
    assert cached(in_sequence(7)).with_sequence(b"") == {}


def test_a_second_sequence_id_is_parsed() -> None:
    data = in_sequence(1).SerializeToString() + ModelInferRequest(parameters=in_sequence(2).parameters).SerializeToString()
    assert split_request(data) is None
