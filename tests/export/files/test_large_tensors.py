from __future__ import annotations

import tempfile
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from export.files.file_window import FileWindow
from export.files.large_tensors import LARGE_BYTES, DamagedFileError, length_delimited, without_large_tensors
from export.files.model_file import serialize
from protos.onnx_tensors import all_tensors
from tests.export.onnx_files import sums, with_a_body

HERE = Path("/models/model.onnx")


def outlined(content: bytes, large_bytes: int = LARGE_BYTES) -> bytes:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        return without_large_tensors(FileWindow(file), HERE, large_bytes=large_bytes)


def outline(model: onnx.ModelProto, large_bytes: int) -> onnx.ModelProto:
    return onnx.load_from_string(outlined(serialize(model), large_bytes))


@pytest.mark.parametrize("model", [sums(), with_a_body()], ids=["initializers", "bodies and constants"])
def test_every_large_tensor_is_left_where_it_lies(model: onnx.ModelProto) -> None:
    content, found = serialize(model), 0
    for whole, left in zip(all_tensors(model), all_tensors(outline(model, 1024)), strict=True):
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
    left = outline(model, 1024)
    for tensor, whole in zip(all_tensors(left), all_tensors(model), strict=True):
        tensor.CopyFrom(whole)
    assert left == model


def test_small_tensors_change_nothing() -> None:
    content = serialize(sums())
    assert outlined(content) == content


@given(cut=st.integers(1, 8300))
def test_a_file_that_breaks_off_is_found_out(cut: int) -> None:
    content = serialize(sums())
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
