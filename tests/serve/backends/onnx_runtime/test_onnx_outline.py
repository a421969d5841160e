from __future__ import annotations

import io

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from protos import onnx_outline
from protos.onnx_outline import LARGE_BYTES, OnnxOutline, read_outline
from protos.varint import encoded_varint

SIZES = st.sampled_from([0, 1, LARGE_BYTES - 40, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 3 * LARGE_BYTES])


def outline_of(content: bytes) -> OnnxOutline:
    return read_outline(io.BufferedReader(io.BytesIO(content)), len(content))


def model_of(sizes: list[int]) -> ModelProto:
    """Weights of these many bytes, each with its own content, and a large one in a node, which stays."""
    random = np.random.default_rng(len(sizes))
    weights = [numpy_helper.from_array(random.integers(0, 255, size).astype(np.uint8), f"w{n}") for n, size in enumerate(sizes)]
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(LARGE_BYTES, np.uint8)))
    graph = helper.make_graph([constant, helper.make_node("Identity", ["x"], ["y"])], "g", [], [], weights)
    return helper.make_model(graph, ir_version=9)


def whole(outline: OnnxOutline, content: bytes) -> ModelProto:
    """The outline with what was left out."""
    model = ModelProto()
    model.CopyFrom(outline.model)
    for index, place in outline.left_out.items():
        model.graph.initializer[index].raw_data = content[place.offset : place.offset + place.length]
    return model


@given(sizes=st.lists(SIZES, max_size=6))
def test_the_outline_and_what_was_left_out_are_the_model(sizes: list[int]) -> None:
    model = model_of(sizes)
    content = model.SerializeToString()
    outline = outline_of(content)
    assert whole(outline, content) == model
    assert sorted(outline.left_out) == [index for index, size in enumerate(sizes) if size >= LARGE_BYTES]


@given(cut=st.integers(0, 10_000), at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_damaged_files_are_read_otherwise_or_refused(cut: int, at: int, byte: int) -> None:
    content = bytearray(model_of([LARGE_BYTES, 10]).SerializeToString())
    content[at % len(content)] = byte
    damaged = bytes(content[: len(content) - cut % len(content)])
    try:
        outline = outline_of(damaged)
    except (ValueError, DecodeError):
        return
    assert whole(outline, damaged) == ModelProto.FromString(damaged)


def test_a_file_that_breaks_off_within_a_weight_is_refused() -> None:
    content = model_of([3 * LARGE_BYTES]).SerializeToString()
    with pytest.raises(ValueError, match="it breaks off"):
        outline_of(content[: 2 * LARGE_BYTES])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"\x0f", "it is no protobuf message", id="a kind of field that protobuf has not"),
        pytest.param(bytes(20), "it is no protobuf message", id="field number 0"),
        pytest.param(b"\x80" * 11, "it is no protobuf message", id="a number without an end"),
        pytest.param(b"\x3a\xff\xff\xff\xff\x7f", "it breaks off", id="a body larger than the file"),
        pytest.param(b"\x0d\x00", "it breaks off", id="half of a number of fixed size"),
    ],
)
def test_what_is_no_message_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        outline_of(content)


def test_a_graph_in_two_fields_and_weights_of_two_contents_are_read_as_protobuf_reads_them() -> None:
    def body(number: int, content: bytes) -> bytes:
        return encoded_varint(number << 3 | 2) + encoded_varint(len(content)) + content

    large, larger = b"l" * LARGE_BYTES, b"m" * (LARGE_BYTES + 1)
    weights = [body(9, first) + body(9, second) for first, second in ((large, larger), (b"small", large), (large, b"small"))]
    content = b"".join(body(7, body(5, weight)) for weight in weights)
    outline = outline_of(content)
    assert sorted(outline.left_out) == [0, 1]
    assert whole(outline, content) == ModelProto.FromString(content)


def test_fields_that_nobody_knows_are_kept() -> None:
    graph = GraphProto(initializer=[TensorProto(name="w", raw_data=b"1" * LARGE_BYTES)])
    unknown = b"\xf8\x07\x01" + b"\xfd\x07abcd" + b"\xf9\x07abcdefgh"  # field 127 as a number of each size
    inner = graph.SerializeToString() + unknown
    content = unknown + b"\x3a" + encoded_varint(len(inner)) + inner
    outline = outline_of(content)
    assert whole(outline, content).SerializeToString() == ModelProto.FromString(content).SerializeToString()


def test_protobuf_reads_what_has_too_many_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    content = model_of([LARGE_BYTES]).SerializeToString()
    assert outline_of(content).left_out
    monkeypatch.setattr(onnx_outline, "MAX_FIELDS", 5)
    outline = outline_of(content)
    assert not outline.left_out
    assert outline.model == ModelProto.FromString(content)
