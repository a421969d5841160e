"""Captured requests: shards are read as they were written, anything else is refused, and those that fit a limit are chosen."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfserve.protos.captured_requests import (
    CapturedMessage,
    CapturedRequestsError,
    CapturedTraffic,
    encode_shard,
    is_capture,
    read_capture,
    read_traffic,
)
from halfserve.protos.datatypes import DATATYPES
from halfserve.protos.inference_pb2 import ModelInferRequest
from tests.captured import START_S, captured, write_capture

X = np.zeros((1, 2), np.float32)
TEXTS = np.array([[b"", b"one"], [b"\x00\xff", "zwei Wörter".encode()]], object)
PARAMETERS = {"priority": 2, "user": "x", "flag": True, "share": 0.5}


def eight(folder: Path, model: str = "") -> CapturedTraffic:
    """Read at most the bytes of eight requests."""
    return read_traffic(folder, model, most_rows=1000, most_bytes=8 * X.nbytes)


def test_every_datatype_is_read_as_it_was_written(tmp_path: Path) -> None:
    numbers = np.array([[0, 1], [2, 3]])
    inputs = {f"in/{row.wire}": TEXTS if row.wire == "BYTES" else numbers.astype(row.array_dtype) for row in DATATYPES}
    inputs |= {"scalar": np.array(2, np.float32), "empty": np.zeros((2, 0), np.float32)}
    write_capture(tmp_path, captured(inputs, 1.5, request_id="é", parameters=PARAMETERS, version=3))
    for place in (tmp_path, tmp_path / "scores"):
        (read,) = read_capture(place)
        assert (read.time_s, read.model, read.version, read.request_id) == (START_S + 1.5, "scores", 3, "é")
        assert (read.latency_ms, read.status, read.parameters) == (1.0, "OK", PARAMETERS)
        assert read.datatypes["in/BF16"] == "BF16"
        assert read.inputs.keys() == inputs.keys()
        for name, array in inputs.items():
            assert read.inputs[name].dtype == array.dtype
            np.testing.assert_array_equal(read.inputs[name], array, strict=True)
    with np.load(tmp_path / "scores" / "000001.npz", allow_pickle=False) as arrays:
        message = ModelInferRequest.FromString(arrays["messages"].tobytes()[: arrays["end"][0]])
        assert (arrays["schema"], [tensor.name for tensor in message.inputs]) == (1, list(inputs))


def test_typed_contents_and_copied_inputs_are_read_as_raw_ones(tmp_path: Path) -> None:
    message = ModelInferRequest()
    message.inputs.add(name="t", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"", b"one"])
    message.inputs.add(name="i", datatype="INT8", shape=[2, 1]).contents.int_contents.extend([-1, 2])
    message.inputs.add(name="b", datatype="BOOL", shape=[2])
    message.inputs.add(name="e", datatype="FP32", shape=[0])
    raw = ModelInferRequest(raw_input_contents=[b"\x01\x00"])
    raw.inputs.add(name="b", datatype="BOOL", shape=[2])
    raw.inputs.add(name="i", datatype="INT8", shape=[2])
    messages = [(message, [None, None, b"\x02\x00", None]), (raw, [b"\x00\x01", None])]
    shard = encode_shard([CapturedMessage(sent.SerializeToString(), copied, 0, "m", 1, 0) for sent, copied in messages])
    (tmp_path / "1.npz").write_bytes(shard)
    assert [{name: array.tolist() for name, array in read.inputs.items()} for read in read_capture(tmp_path)] == [
        {"t": [b"", b"one"], "i": [[-1], [2]], "b": [True, False], "e": []},
        {"b": [False, True], "i": [1, 0]},
    ]


def test_requests_whose_tensors_do_not_fit_are_left_out(tmp_path: Path) -> None:
    wrong = ModelInferRequest(raw_input_contents=[b"\x09\0\0\0short"])
    wrong.inputs.add(name="x", datatype="BYTES", shape=[1])
    far = ModelInferRequest()
    far.inputs.add(name="x", datatype="INT8", shape=[1]).contents.int_contents.append(300)
    messages = [CapturedMessage(one.SerializeToString(), [], 0, "m", 1, 0) for one in (wrong, far)]
    (tmp_path / "1.npz").write_bytes(encode_shard([*messages, captured({"x": X})]))
    assert len(read_capture(tmp_path)) == 1
    assert eight(tmp_path).sampled(1).left_out == {"that the server refused": 2}


def test_requests_of_all_shards_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    write_capture(tmp_path, *(captured({"x": X}, time_s) for time_s in (5, 1, 3)), shard=2)
    assert [found.time_s - START_S for found in read_capture(tmp_path)] == [1, 3, 5]


def test_the_only_model_is_read_and_of_several_the_named_one(tmp_path: Path) -> None:
    assert not is_capture(tmp_path)
    write_capture(tmp_path, captured({"x": X}))
    assert (is_capture(tmp_path), is_capture(tmp_path / "scores")) == (True, True)
    assert len(eight(tmp_path, "other").requests) == 1
    write_capture(tmp_path, captured({"x": X + 1}, model="other"), model="other")
    assert [one.model for one in eight(tmp_path, "other").requests] == ["other"]
    assert [one.model for one in eight(tmp_path / "scores").requests] == ["scores"]
    for model in ("", "third"):
        with pytest.raises(CapturedRequestsError, match="has requests of 'other', 'scores', expected those of one model; name"):
            eight(tmp_path, model)


def rewritten(path: Path, **change: np.ndarray[Any, Any]) -> None:
    with np.load(path) as arrays:
        content = {name: arrays[name] for name in arrays.files}
    np.savez(path, **content | change)


DAMAGES = {
    "another schema": ({"schema": np.array(2)}, "has schema 2, expected 1; use the halfserve that wrote it"),
    "a time too many": ({"time_s": np.zeros(2)}, "ValueError"),
    "a pickle": ({"status": TEXTS}, "Object arrays cannot be loaded"),
    "no messages": ({"messages": np.full(9, 255, np.uint8), "end": np.array([9])}, "DecodeError"),
}


@pytest.mark.parametrize("case", [*DAMAGES, "cut short"])
def test_a_damaged_shard_is_refused(tmp_path: Path, case: str) -> None:
    path = write_capture(tmp_path, captured({"x": X})) / "scores" / "000001.npz"
    change, reason = DAMAGES.get(case, ({}, zipfile.BadZipFile.__name__))
    if change:
        rewritten(path, **change)
    else:
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CapturedRequestsError, match=rf"000001\.npz: is not a whole shard .*{reason}.*; move it elsewhere"):
        read_capture(tmp_path)


def test_a_folder_without_shards_says_how_to_get_some(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(CapturedRequestsError, match=r"no captured requests, expected files such as .*halfserve serve"):
        read_capture(tmp_path)
    with pytest.raises(CapturedRequestsError, match="cannot be read: No such file or directory"):
        read_capture(tmp_path / "missing")


@pytest.mark.parametrize("shard", [1, 3, 7, 100])
def test_requests_within_the_limits_are_spread_over_all(tmp_path: Path, shard: int) -> None:
    write_capture(tmp_path, *(captured({"x": X + number}, float(number)) for number in range(50)), shard=shard)
    for traffic in (eight(tmp_path), read_traffic(tmp_path, most_rows=8, most_bytes=10_000)):
        assert [float(one.inputs["x"][0, 0]) for one in traffic.requests] == [0, 8, 16, 24, 32, 40, 48]
        assert np.array_equal(traffic.times_s, START_S + np.arange(50))
        sampled = traffic.sampled(6)
        assert sampled.left_out == {"beyond the limit, spread over the time": 43, "that do not fit the model": 1}
        assert (sampled.first_utc, sampled.last_utc) == ("2026-09-21T14:13:20+00:00", "2026-09-21T14:14:09+00:00")
        paths = sorted((tmp_path / "scores").iterdir())
        lines = "".join(hashlib.sha256(path.read_bytes()).hexdigest() + "\n" for path in paths)
        assert (sampled.shards, sampled.shards_sha256) == (len(paths), hashlib.sha256(lines.encode()).hexdigest())


def test_refused_requests_are_counted_and_left_out(tmp_path: Path) -> None:
    late = captured({"x": X + 1}, 1.0, status="DEADLINE_EXCEEDED")
    write_capture(tmp_path, captured({"x": X}, 2.0), captured({"x": X}, status="INVALID_ARGUMENT"), late)
    traffic = eight(tmp_path)
    assert [one.time_s - START_S for one in traffic.requests] == [1.0, 2.0]
    assert traffic.sampled(2).left_out == {"that the server refused": 1}
    write_capture(tmp_path, captured({"x": X}, status="NOT_FOUND"))
    with pytest.raises(CapturedRequestsError, match="has no requests that the server took, and 1 that it refused"):
        eight(tmp_path)
