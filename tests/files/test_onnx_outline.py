from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from halfserve.files import onnx_outline
from halfserve.files.onnx_outline import (
    LARGE_BYTES,
    WINDOW_BYTES,
    DamagedFileError,
    FileWindow,
    OnnxOutline,
    read_outline,
    without_large_tensors,
)
from halfserve.files.onnx_tensors import all_tensors
from halfserve.files.varint import encoded_varint, length_delimited
from tests.export.stored_models import sums, with_a_body

SIZES = st.sampled_from([0, 1, LARGE_BYTES - 40, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 3 * LARGE_BYTES])


def outline_of(content: bytes) -> OnnxOutline[ModelProto]:
    return read_outline(io.BufferedReader(io.BytesIO(content)), len(content), ModelProto)


def model_of(sizes: list[int]) -> ModelProto:
    """Weights of these many bytes, each with its own content, and a large one in a node, which stays."""
    random = np.random.default_rng(len(sizes))
    weights = [numpy_helper.from_array(random.integers(0, 255, size).astype(np.uint8), f"w{n}") for n, size in enumerate(sizes)]
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(LARGE_BYTES, np.uint8)))
    graph = helper.make_graph([constant, helper.make_node("Identity", ["x"], ["y"])], "g", [], [], weights)
    return helper.make_model(graph, ir_version=9)


def whole(outline: OnnxOutline[ModelProto], content: bytes) -> ModelProto:
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


HERE = Path("/models/model.onnx")


def outlined(content: bytes, large_bytes: int = 1 << 16) -> bytes:
    return without_large_tensors(io.BytesIO(content), len(content), str(HERE), large_bytes=large_bytes)


def outline_model(model: onnx.ModelProto, large_bytes: int) -> onnx.ModelProto:
    return onnx.load_from_string(outlined(model.SerializeToString(deterministic=True), large_bytes))


@pytest.mark.parametrize("model", [sums(), with_a_body()], ids=["initializers", "bodies and constants"])
def test_every_large_tensor_is_left_where_it_lies(model: onnx.ModelProto) -> None:
    content, found = model.SerializeToString(deterministic=True), 0
    for whole, left in zip(all_tensors(model), all_tensors(outline_model(model, 1024)), strict=True):
        assert (left.name, left.dims, left.data_type) == (whole.name, whole.dims, whole.data_type)
        if len(whole.raw_data) < 1024:
            assert left == whole
            continue
        entries = {entry.key: entry.value for entry in left.external_data}
        start, length = int(entries["offset"]), int(entries["length"])
        assert (left.raw_data, entries["location"]) == (b"", str(HERE))
        assert content[start : start + length] == whole.raw_data
        found += 1
    assert found == (4 if model.graph.name == "sums" else 2)


def test_everything_else_is_as_it_was() -> None:
    model = with_a_body()
    model.doc_string = "kept"
    left = outline_model(model, 1024)
    for tensor, whole in zip(all_tensors(left), all_tensors(model), strict=True):
        tensor.CopyFrom(whole)
    assert left == model


def test_small_tensors_change_nothing() -> None:
    content = sums().SerializeToString(deterministic=True)
    assert outlined(content) == content


@given(cut=st.integers(1, 8300))
def test_a_file_that_breaks_off_is_found_out(cut: int) -> None:
    content = sums().SerializeToString(deterministic=True)
    broken = content[: -min(cut, len(content) - 1)]
    try:
        left = onnx.load_from_string(outlined(broken, 1024))
    except DamagedFileError:
        return
    assert not left.opset_import, "a cut between two fields loses what comes last, and says nothing else"


@given(content=st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused_or_passed_on(content: bytes) -> None:
    try:
        assert outlined(content, 1 << 20) == content
    except DamagedFileError as error:
        assert str(error)  # noqa: PT017  (either outcome is right)


def test_bodies_without_end_are_refused() -> None:
    content = b""
    for _ in range(100):  # graph > node > attribute > graph
        for field in (6, 5, 1):
            content = length_delimited(field, len(content)) + content
    with pytest.raises(DamagedFileError, match="nested more than 64 deep"):
        outlined(length_delimited(7, len(content)) + content, 0)


@given(number=st.integers(0, 2**63 - 1))
def test_numbers_are_written_as_protobuf_writes_them(number: int) -> None:
    assert ModelProto(ir_version=number).SerializeToString() == b"\x08" + encoded_varint(number)


CONTENT = bytes(range(251)) * 1000


@given(positions=st.lists(st.integers(0, len(CONTENT) - 1), max_size=20))
def test_a_window_gives_bytes_in_any_order(positions: list[int]) -> None:
    window = FileWindow(io.BytesIO(CONTENT), len(CONTENT))
    assert [window.byte(position) for position in positions] == [CONTENT[position] for position in positions]


@given(start=st.integers(0, len(CONTENT)), length=st.integers(0, 2 * WINDOW_BYTES))
def test_a_window_refuses_pieces_beyond_the_end(start: int, length: int) -> None:
    window = FileWindow(io.BytesIO(CONTENT), len(CONTENT))
    if start + length > len(CONTENT):
        with pytest.raises(DamagedFileError, match="it breaks off"):
            window.piece(start, start + length)
    else:
        assert window.piece(start, start + length) == CONTENT[start : start + length]
    with pytest.raises(DamagedFileError, match="it breaks off"):
        window.byte(len(CONTENT))
