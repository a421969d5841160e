from __future__ import annotations

import gzip
import zlib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from halfserve.files.varint import encoded_varint
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from halfserve.serve.engine.errors import InvalidArgumentError, MessageTooLargeError
from halfserve.serve.protocol.messages import (
    MAX_FIELDS,
    MAX_INNER_FIELDS,
    MAX_MEMBERS,
    PIECE_BYTES,
    has_too_many_fields,
    inflate,
    put_request,
    put_response,
    split_request,
    split_response,
    split_stream_response,
)

texts = st.text(max_size=20)
raws = st.lists(st.binary(max_size=300), max_size=3)
HOW: dict[str, Any] = {"what": "the body", "advice": "send less"}


@st.composite
def requests(draw: st.DrawFn) -> ModelInferRequest:
    message = ModelInferRequest(
        model_name=draw(texts), model_version=draw(texts), id=draw(texts), raw_input_contents=draw(raws)
    )
    for name in draw(st.lists(texts, max_size=3)):
        message.inputs.add(name=name, datatype="FP16", shape=draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)))
        message.outputs.add(name=name)
    if draw(st.booleans()):
        message.parameters["timeout"].int64_param = draw(st.integers(0, 2**40))
    return message


@given(requests())
def test_a_cut_request_holds_the_whole_of_it(message: ModelInferRequest) -> None:
    data = message.SerializeToString()
    cut = split_request(data)
    if not message.id.isascii():
        assert cut is None
        return
    assert cut is not None
    assert cut.id.decode() == message.id
    assert [data[offset : offset + size] for offset, size in cut.raw] == list(message.raw_input_contents)
    rest = ModelInferRequest.FromString(cut.skeleton)
    assert (rest.id, list(rest.raw_input_contents)) == ("", [])
    rest.id = message.id
    rest.raw_input_contents.extend(message.raw_input_contents)
    assert rest == message


@given(requests(), raws, texts)
def test_id_and_bytes_leave_the_form_as_it_is(message: ModelInferRequest, raw: list[bytes], request_id: str) -> None:
    before = split_request(message.SerializeToString())
    message.id = request_id
    del message.raw_input_contents[:]
    message.raw_input_contents.extend(raw)
    after = split_request(message.SerializeToString())
    if before is not None and after is not None:
        assert before.skeleton == after.skeleton


@given(st.binary(max_size=60))
@example(b"\x3a")
@example(b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x1a\x05abc")
@example(b"\x1a\x01\xf6\x1a\x0217")  # two ids, the first no text
def test_any_bytes_are_cut_as_protobuf_reads_them_or_not_at_all(data: bytes) -> None:
    cut = split_request(data)
    if cut is None:
        return
    try:
        message = ModelInferRequest.FromString(data)
    except Exception:  # noqa: BLE001  (protobuf says no: so must it say to the form, which is all that is parsed)
        assert not parses(cut.skeleton)
        return
    assert cut.id.decode() == message.id
    assert [data[offset : offset + size] for offset, size in cut.raw] == list(message.raw_input_contents)


def parses(data: bytes) -> bool:
    try:
        ModelInferRequest.FromString(data)
    except Exception:  # noqa: BLE001  (see above)
        return False
    return True


@given(texts, texts, st.text(st.characters(max_codepoint=127), max_size=200), raws)
def test_a_response_is_put_together_as_protobuf_would(name: str, version: str, request_id: str, raw: list[bytes]) -> None:
    whole = ModelInferResponse(model_name=name, model_version=version, id=request_id, raw_output_contents=raw)
    whole.outputs.add(name="y", datatype="FP16", shape=[1, 2])
    head = ModelInferResponse(model_name=name, model_version=version).SerializeToString()
    outputs = ModelInferResponse(outputs=whole.outputs).SerializeToString()
    assert put_response(head, request_id.encode(), outputs, raw) == whole.SerializeToString()


@given(requests())
def test_a_request_is_joined_as_protobuf_would(message: ModelInferRequest) -> None:
    whole, raw = message.SerializeToString(deterministic=True), list(message.raw_input_contents)
    message.ClearField("raw_input_contents")
    assert put_request(message.SerializeToString(deterministic=True), [memoryview(part) for part in raw]) == whole


@given(texts, raws)
def test_a_response_is_split_into_head_and_views(name: str, raw: list[bytes]) -> None:
    whole = ModelInferResponse(model_name=name, id="7", raw_output_contents=raw)
    for _ in raw:
        whole.outputs.add(name="y", datatype="FP16", shape=[1, 2])
    data = whole.SerializeToString() + b"\xfa\x01\x01a"  # a field that is not known
    streamed = ModelStreamInferResponse(infer_response=whole).SerializeToString()
    for split, sent in ((split_response, data), (split_stream_response, streamed)):
        head, views = split(sent)
        rest = ModelInferResponse.FromString(head)
        assert [bytes(view) for view in views] == raw
        assert (rest.model_name, rest.id, rest.outputs, list(rest.raw_output_contents)) == (name, "7", whole.outputs, [])


@pytest.mark.parametrize("more", [b"\x53\x32\x01a\x54", b"\x32\xff\xff\xff\xff\x0f", b"\x32"], ids=["group", "too long", "cut"])
def test_a_response_that_protobuf_must_judge_is_not_split(more: bytes) -> None:
    with pytest.raises(IndexError):
        split_response(ModelInferResponse(id="7", raw_output_contents=[b"ab"]).SerializeToString() + more)


def test_a_stream_response_with_an_error_is_not_split() -> None:
    response = ModelStreamInferResponse(infer_response=ModelInferResponse(id="7"), error_message="no")
    for sent in (response.SerializeToString(), response.SerializeToString()[::-1]):
        with pytest.raises(IndexError):
            split_stream_response(sent)


# A raw entry, an input, and fields that are not known: a number, four and eight bytes, a group, one with a number over 15.
FIELDS = (b"\x3a\x00", b"\x2a\x00", b"\x50\x07", b"\x55abcd", b"\x51abcdefgh", b"\x53\x54", b"\xfa\x01\x01a")


@pytest.mark.parametrize("field", FIELDS)
def test_fields_are_counted_whatever_they_are(field: bytes) -> None:
    most = field * (MAX_FIELDS // (2 if field == b"\x53\x54" else 1))
    long = b"\x3a\x80\x80\x08" + bytes(2**17)
    assert not has_too_many_fields(most)
    assert has_too_many_fields(most + field)
    assert not has_too_many_fields(long + field)
    assert not has_too_many_fields(b"\x3a\xff\xff\xff\xff\x0f" + most + field)  # no message
    assert not has_too_many_fields(b"\x57" + most + field)


@pytest.mark.parametrize("tensor", [b"\x2a", b"\x32"])
@pytest.mark.parametrize("field", [b"\x22\x00", b"\x78\x07", b"\xfa\x01\x01a"])
def test_fields_of_inputs_and_outputs_are_counted_together(tensor: bytes, field: bytes) -> None:
    def part(count: int) -> bytes:
        return tensor + encoded_varint(count * len(field)) + count * field

    half = part(MAX_INNER_FIELDS // 2)
    assert not has_too_many_fields(half + half)
    assert has_too_many_fields(half + half + part(1))
    assert not has_too_many_fields(half + half + b"\x3a" + part(1)[1:]), "a raw entry is no message"


def test_sizes_are_counted_and_elements_are_not() -> None:
    request = ModelInferRequest()
    request.inputs.add(name="x", datatype="INT64", shape=[1] * (MAX_INNER_FIELDS - 3))  # and three fields
    assert not has_too_many_fields(request.SerializeToString())
    request.inputs[0].contents.int64_contents.extend([1] * (2 * MAX_INNER_FIELDS))
    assert has_too_many_fields(request.SerializeToString())
    del request.inputs[0].shape[0]
    assert not has_too_many_fields(request.SerializeToString())


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
def test_members_of_gzip_follow_each_other(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    assert inflate(b"".join(map(gzip.compress, parts)), "gzip", len(whole), **HOW) == whole


@pytest.mark.parametrize("size", [PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 1])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_what_takes_several_pieces_is_put_together(coding: str, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    sent = gzip.compress(body, 0) if coding == "gzip" else zlib.compress(body, 0)
    assert inflate(sent, coding, size, **HOW) == body
    with pytest.raises(MessageTooLargeError, match=f"of more than {size - 1} bytes is too large, .* {size - 1}; send less"):
        inflate(sent, coding, size - 1, **HOW)


def test_members_share_the_limit() -> None:
    with pytest.raises(MessageTooLargeError, match="of more than 100 bytes is too large, expected at most 100; send less"):
        inflate(gzip.compress(bytes(60)) * 2, "gzip", 100, **HOW)


def test_members_that_hold_nothing_are_bounded() -> None:
    empty = gzip.compress(b"")
    assert inflate(empty * MAX_MEMBERS, "gzip", 1, **HOW) == b""
    with pytest.raises(InvalidArgumentError, match="the body has 20 bytes behind its gzip data; expected none"):
        inflate(empty * (MAX_MEMBERS + 1), "gzip", 1, **HOW)


@pytest.mark.parametrize(
    ("sent", "coding", "text"),
    [
        (b"", "gzip", "the body ends inside its gzip data; send all of it"),
        (gzip.compress(b"a")[:-1], "gzip", "the body ends inside its gzip data; send all of it"),
        (gzip.compress(b"a") * 2 + b"junk", "gzip", "the body does not decompress as gzip"),
        (zlib.compress(b"a") * 2, "deflate", "the body has 9 bytes behind its deflate data; expected none"),
        (b"junk", "deflate", "the body does not decompress as deflate; expected what its encoding says"),
    ],
    ids=range(5),
)
def test_what_is_not_whole_or_followed_by_something_else_is_refused(sent: bytes, coding: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        inflate(sent, coding, 100, **HOW)
