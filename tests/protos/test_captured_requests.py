"""Shards of captured requests: what is written is read again, and anything else is refused in one line."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfserve.protos.captured_requests import CapturedRequest, CapturedRequestsError, read_capture, write_shard
from halfserve.protos.datatypes import DATATYPES

TEXTS = np.array([[b"", b"one"], [b"\x00\xff", "zwei Wörter".encode()]], object)


def tensor(datatype: str) -> np.ndarray[Any, Any]:
    """Return a tensor of shape [2, 2]."""
    if datatype == "BYTES":
        return TEXTS
    dtype = (
        np.dtype(ml_dtypes.bfloat16) if datatype == "BF16" else np.dtype(next(d.numpy for d in DATATYPES if d.wire == datatype))
    )
    return np.array([[0, 1], [2, 3]]).astype(dtype)


def request(time_s: float = 1.5, model: str = "m", **inputs: Any) -> CapturedRequest:
    """Return a request whose inputs have the given datatypes."""
    return CapturedRequest(
        time_s=time_s,
        model=model,
        version=3,
        request_id="é",
        latency_ms=0.25,
        status="OK",
        parameters={"priority": 2, "user": "x", "flag": True, "share": 0.5},
        inputs={name: tensor(datatype) for name, datatype in inputs.items()},
        datatypes=inputs,
    )


def capture(folder: Path, *requests: CapturedRequest, number: int = 1) -> Path:
    model = requests[0].model
    (folder / model).mkdir(exist_ok=True)
    path = folder / model / f"{number:06d}.npz"
    write_shard(path, model, requests)
    return path


def test_every_datatype_is_read_as_it_was_written(tmp_path: Path) -> None:
    datatypes: dict[str, Any] = {f"in/{row.wire}": row.wire for row in DATATYPES}
    written = request(**datatypes)
    path = capture(tmp_path, written)
    for place in (tmp_path, path.parent, path):
        (read,) = read_capture(place)
        assert {**vars(read), "inputs": 0} == {**vars(written), "inputs": 0}
        for name, array in written.inputs.items():
            assert read.inputs[name].dtype == array.dtype
            np.testing.assert_array_equal(read.inputs[name], array)
    assert path.stat().st_mode & 0o777 == 0o600
    with np.load(path, allow_pickle=False) as arrays:
        assert json.loads(arrays["index"].tobytes())["schema"] == 1
        assert arrays["0/in/BF16"].dtype == np.uint16
        assert arrays["0/in/BYTES"].tobytes()[4:11] == b"\x03\0\0\0one"


def test_scalars_and_empty_tensors_keep_their_shapes(tmp_path: Path) -> None:
    arrays = {
        "scalar": np.float32(2).reshape(()),
        "empty": np.zeros((2, 0), np.float32),
        "row": np.arange(6.0, dtype="f4")[::2],
    }
    written = CapturedRequest(**{**vars(request()), "inputs": arrays, "datatypes": dict.fromkeys(arrays, "FP32")})
    (read,) = read_capture(capture(tmp_path, written))
    assert {name: array.shape for name, array in read.inputs.items()} == {"scalar": (), "empty": (2, 0), "row": (3,)}
    np.testing.assert_array_equal(read.inputs["row"], arrays["row"])


def test_requests_of_all_shards_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    capture(tmp_path, request(5, x="FP16"), request(1, x="FP16"), number=1)
    capture(tmp_path, request(3, x="FP16"), number=12)
    assert [found.time_s for found in read_capture(tmp_path)] == [1, 3, 5]
    assert [found.time_s for found in read_capture(tmp_path, limit=2)] == [1, 3]


def test_the_model_is_named_where_a_capture_has_several(tmp_path: Path) -> None:
    capture(tmp_path, request(model="a", x="FP16"))
    capture(tmp_path, request(model="b", x="FP16"))
    assert [found.model for found in read_capture(tmp_path, model="b")] == ["b"]
    with pytest.raises(CapturedRequestsError, match=r"has requests of 'a', 'b', expected those of one model; name the model"):
        read_capture(tmp_path)
    with pytest.raises(CapturedRequestsError, match=r"no requests of model 'c', but of 'a', 'b'; name one of these"):
        read_capture(tmp_path, model="c")


def rewritten(path: Path, change: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in {**members, **change}.items():
            archive.writestr(name, content)


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def index(**changes: Any) -> dict[str, bytes]:
    entry = {"time": 1, "id": "", "version": 1, "latency_ms": 1, "status": "OK", "parameters": {}}
    entry["inputs"] = [{"name": "x", "datatype": "FP16", "shape": [2, 2]}]
    content = {"schema": 1, "model": "m", "requests": [entry], **changes}
    return {"index.npy": npy(np.frombuffer(json.dumps(content).encode(), np.uint8))}


HUGE = npy(np.zeros((2, 2), np.float16)).replace(b"(2, 2)", b"(2, 9" + b"9" * 15 + b")")
DAMAGES = {
    "another schema": (index(schema=2), "has schema 2, expected 1; use the halfserve that wrote it"),
    "no model": (index(model=None), "has None, expected a text"),
    "an entry without fields": (index(requests=[{"time": 1}]), "KeyError"),
    "entries that are none": (index(requests=[7]), "TypeError"),
    "another datatype": ({"0/x.npy": npy(np.zeros((2, 2), np.float32))}, "Cannot cast"),
    "another shape": ({"0/x.npy": npy(np.zeros(3, np.float16))}, "cannot reshape"),
    "a pickle": ({"0/x.npy": npy(TEXTS)}, "Object arrays cannot be loaded"),
    "an endless shape": ({"0/x.npy": HUGE}, ""),
    "no JSON": ({"index.npy": npy(np.zeros(3, np.uint8))}, "JSONDecodeError"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_shard_is_refused(tmp_path: Path, case: str) -> None:
    change, reason = DAMAGES[case]
    path = capture(tmp_path, request(x="FP16"))
    rewritten(path, change)
    with pytest.raises(CapturedRequestsError, match=rf"000001\.npz: is not a whole shard .*{reason}.*; remove it"):
        read_capture(tmp_path)


def test_arrays_that_could_expand_are_refused(tmp_path: Path) -> None:
    path = capture(tmp_path, request(x="FP16"))
    rewritten(path, {"more.npy": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CapturedRequestsError, match="its arrays are compressed"):
        read_capture(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CapturedRequestsError, match="is not a whole shard"):
        read_capture(path)


def test_a_folder_without_shards_says_how_to_get_some(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(CapturedRequestsError, match=r"no captured requests, expected files such as .*halfserve serve"):
        read_capture(tmp_path)
    with pytest.raises(CapturedRequestsError, match="cannot be read: No such file or directory; name a folder"):
        read_capture(tmp_path / "missing")


def test_a_shard_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    wrong = CapturedRequest(**{**vars(request(x="FP16")), "datatypes": {"x": "FP32"}})
    with pytest.raises(ValueError, match="has a tensor of float16, expected float32 for FP32"):
        write_shard(tmp_path / "000001.npz", "m", [request(x="FP16"), wrong])
    assert list(tmp_path.iterdir()) == []
