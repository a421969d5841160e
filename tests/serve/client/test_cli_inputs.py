"""Tensors given on the command line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.cli.inputs import InputArgumentError, fitted_inputs, read_inputs
from halfserve.serve.client.errors import InvalidRequest

ENDLESS = "a number has too many digits, or lists are nested too deeply"


def metadata(datatype: str = "FP16", shape: tuple[int, ...] = (-1, 2)) -> pb.ModelMetadataResponse:
    tensor = pb.ModelMetadataResponse.TensorMetadata(name="x", datatype=datatype, shape=shape)
    return pb.ModelMetadataResponse(name="m", inputs=[tensor])


def test_reads_files_and_literals(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    np.savez(tmp_path / "one.npz", anything=np.arange(2))
    np.savez(tmp_path / "two.npz", x=np.arange(4), y=np.arange(5))
    read = read_inputs([f"a={tmp_path}/a.npy", f"b={tmp_path}/one.npz", "c=[[1, 2.5]]", 'd=["s=t"]', f"{tmp_path}/two.npz"])
    assert {name: np.shape(value) for name, value in read.items()} == {
        "a": (3,),
        "b": (2,),
        "c": (1, 2),
        "d": (1,),
        "x": (4,),
        "y": (5,),
    }
    assert read["d"] == ["s=t"]
    assert read_inputs([f"y={tmp_path}/two.npz"])["y"].shape == (5,)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("foo", "--input foo: expected NAME=FILE.npy, NAME=FILE.npz, NAME=FILE.json, NAME=@FILE"),
        ("=[1]", "--input =.*: expected NAME=FILE.npy"),
        ("x=[1,", r"--input x=\[1,: expected a .npy, .npz or .json file, @FILE, - or JSON"),
        ("x=nowhere.npy", "there is no file nowhere.npy"),
        ("x={tmp}/junk.npy", "cannot be read as numpy arrays: it is no such file, or holds Python objects"),
        ("x={tmp}/objects.npy", "cannot be read as numpy arrays: it is no such file, or holds Python objects"),
        ("x={tmp}/empty.npy", "cannot be read as numpy arrays: "),
        ("x={tmp}/cut.npz", "cannot be read as numpy arrays: "),
        ("z={tmp}/two.npz", "the file holds x, y, expected an array z"),
    ],
)
def test_unreadable_inputs_are_refused(tmp_path: Path, argument: str, text: str) -> None:
    (tmp_path / "junk.npy").write_text("hello")
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.savez(tmp_path / "two.npz", x=np.arange(4), y=np.arange(5))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "two.npz").read_bytes()[:100])
    with pytest.raises(InputArgumentError, match=text):
        read_inputs([argument.format(tmp=tmp_path)])


def test_json_files(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text("[[1, 2]]")
    (tmp_path / "o.json").write_text('{"x": [1], "y": ["a"]}')
    entries = [{"name": "x", "shape": [2, 2], "datatype": "FP16", "data": [1, 2, 3, 4]}, {"name": "y", "data": [[1]]}]
    (tmp_path / "p.json").write_text(json.dumps({"inputs": entries}))
    assert read_inputs([f"z={tmp_path}/v.json"]) == {"z": [[1, 2]]}
    assert read_inputs([f"{tmp_path}/o.json"]) == {"x": [1], "y": ["a"]}
    assert read_inputs([f"x={tmp_path}/o.json"]) == {"x": [1]}
    assert read_inputs([f"{tmp_path}/p.json"]) == {"x": [[1, 2], [3, 4]], "y": [[1]]}


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.json"])
def test_the_format_of_standard_input_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    np.savez(tmp_path / "a.npz", x=np.arange(3))
    (tmp_path / "a.json").write_text('{"x": [0, 1, 2]}')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / name).read_bytes())))
    assert list(read_inputs(["x=-"])["x"]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"inputs": [{"name": "x"}]}', "bad.json: entry 0 of inputs lacks its name or its data"),
        ('{"inputs": [{"name": "x", "data": [1], "shape": [2]}]}', r"input 'x' has 1 values for the shape \[2\]"),
        ('{"x": [1,}', "bad.json: as JSON: .* at line 1, column 10"),
        ("[1]", "holds a tensor without a name; give NAME=.*bad.json"),
    ],
)
def test_malformed_json_files_are_refused(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(InputArgumentError, match=text):
        read_inputs([f"{tmp_path}/bad.json"])


def test_raw_bytes_are_read_unchanged(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(np.arange(4, dtype=np.float16).tobytes())
    inputs = read_inputs([f"x=@{tmp_path}/b"])
    np.testing.assert_array_equal(fitted_inputs(inputs, metadata())[0]["x"], np.arange(4, dtype=np.float16).reshape(2, 2))
    picture = fitted_inputs(inputs, metadata("BYTES", (-1, 1)))[0]["x"]
    assert (picture.shape, picture[0, 0]) == ((1, 1), (tmp_path / "b").read_bytes())
    bits = fitted_inputs(inputs, metadata("BF16", (2, 2)))[0]["x"]
    assert bits.tobytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("literal", ["7" * 5000, "[" * 50_000])
def test_excessive_json_is_refused(tmp_path: Path, literal: str) -> None:
    (tmp_path / "bad.json").write_text(literal)
    for argument in (f"x={literal}", f"x={tmp_path}/bad.json"):
        with pytest.raises(InputArgumentError, match=ENDLESS) as told:
            read_inputs([argument])
        assert len(str(told.value)) < 300


@pytest.mark.parametrize(("shape", "text"), [(b"((3,)", "EOF"), (b"(9999999999999,)", "Unable to allocate")])
def test_an_impossible_numpy_header_is_refused(tmp_path: Path, shape: bytes, text: str) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    content = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(content.replace(b"(3,), }".ljust(len(shape) + 3), shape + b", }"))
    with pytest.raises(InputArgumentError, match=f"x.npy cannot be read as numpy arrays: .*{text}"):
        read_inputs([f"x={tmp_path}/x.npy"])


def test_a_broken_compressed_file_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.arange(1000))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    start = content.index(b"x.npy") + 40
    content[start : start + 20] = b"\xff" * 20
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(InputArgumentError, match=r"x.npz cannot be read as numpy arrays: "):
        read_inputs([f"x={tmp_path}/x.npz"])


@pytest.mark.parametrize(
    ("datatype", "shape", "text"),
    [
        ("FP16", (-1, 3), r"b has 8 bytes, expected a multiple of 6 for FP16 \[-1, 3\]"),
        ("FP16", (2, 3), r"b has 8 bytes, expected 12 for FP16 \[2, 3\]"),
        ("FP16", (-1, -1), r"the shape \[-1, -1\] with 2 unknown sizes; give a .npy file, not bytes"),
    ],
)
def test_bytes_that_do_not_fit_the_shape_are_refused(tmp_path: Path, datatype: str, shape: tuple[int, ...], text: str) -> None:
    (tmp_path / "b").write_bytes(bytes(8))
    with pytest.raises(InvalidRequest, match=text):
        fitted_inputs(read_inputs([f"x=@{tmp_path}/b"]), metadata(datatype, shape))


def test_a_name_is_given_once() -> None:
    with pytest.raises(InputArgumentError, match="--input x: given twice"):
        read_inputs(["x=1", "x=2"])


@pytest.mark.parametrize(
    ("value", "shape", "notes"),
    [
        (np.zeros((3, 2), np.float16), (3, 2), []),
        ([1, 2], (1, 2), ["x: added the batch dimension, [2] is sent as [1, 2]"]),
        (np.zeros((1, 2)), (1, 2), ["x: converted from float64 to FP16"]),
    ],
)
def test_changes_to_inputs_are_reported(value: Any, shape: tuple[int, ...], notes: list[str]) -> None:
    fitted, said = fitted_inputs({"x": value}, metadata())
    assert (fitted["x"].shape, fitted["x"].dtype, said) == (shape, np.float16, notes)


@pytest.mark.parametrize(
    ("name", "value", "shape", "text"),
    [
        ("z", [1], (-1, 2), "has no input 'z'; its inputs are: x"),
        ("x", np.full((1, 2), 1e6), (-1, 2), "2 of 2 values do not fit FP16"),
        ("x", [1, 2, 3], (-1, 2), r"has the shape \[3\], expected \[-1, 2\] \(-1: any size\)"),
        ("x", [[[1, 2]]], (-1, 2), r"has the shape \[1, 1, 2\], expected \[-1, 2\]"),
        ("x", [1, 2], (3, 2), r"has the shape \[2\], expected \[3, 2\]"),
    ],
    ids=["unknown", "range", "row", "rank", "a fixed first dimension is no batch"],
)
def test_inputs_that_do_not_fit_are_refused(name: str, value: Any, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        fitted_inputs({name: value}, metadata(shape=shape))
