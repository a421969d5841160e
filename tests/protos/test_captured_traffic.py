"""The requests of a capture that fit a limit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from halfserve.protos.captured_requests import CapturedRequest, CapturedRequestsError
from halfserve.protos.captured_traffic import is_capture, read_traffic, request_bytes
from tests.captured import START_S, captured, write_capture

X = np.zeros((1, 2), np.float32)


def eighth(request: CapturedRequest) -> float:
    return request_bytes(request) / (8 * X.nbytes)


@pytest.mark.parametrize("shard", [1, 3, 7, 100])
def test_requests_within_the_limit_are_spread_over_all(tmp_path: Path, shard: int) -> None:
    requests = [captured({"x": X + number}, float(number)) for number in range(50)]
    traffic = read_traffic(write_capture(tmp_path, *requests, shard=shard), eighth)
    assert [float(one.inputs["x"][0, 0]) for one in traffic.requests] == [0, 8, 16, 24, 32, 40, 48]
    assert (traffic.captured, traffic.refused, traffic.seconds) == (50, 0, 49)
    assert np.array_equal(traffic.times_s, START_S + np.arange(50))
    paths = sorted((tmp_path / "scores").iterdir())
    lines = "".join(hashlib.sha256(path.read_bytes()).hexdigest() + "\n" for path in paths)
    assert (traffic.shards, traffic.shards_sha256) == (len(paths), hashlib.sha256(lines.encode()).hexdigest())


def test_refused_requests_are_counted_and_left_out(tmp_path: Path) -> None:
    late = captured({"x": X + 1}, 1.0, status="DEADLINE_EXCEEDED")
    write_capture(tmp_path, captured({"x": X}, 2.0), captured({"x": X}, status="INVALID_ARGUMENT"), late)
    traffic = read_traffic(tmp_path, eighth)
    assert [one.time_s - START_S for one in traffic.requests] == [1.0, 2.0]
    assert (traffic.captured, traffic.refused) == (3, 1)
    write_capture(tmp_path, captured({"x": X}, status="NOT_FOUND"))
    with pytest.raises(CapturedRequestsError, match="has no requests that the server took, and 1 that it refused"):
        read_traffic(tmp_path, eighth)


def test_the_only_model_is_read_and_of_several_the_preferred_one(tmp_path: Path) -> None:
    assert not is_capture(tmp_path)
    write_capture(tmp_path, captured({"x": X}))
    assert (is_capture(tmp_path), is_capture(tmp_path / "scores")) == (True, True)
    assert read_traffic(tmp_path, eighth, prefer="other").model == "scores"
    write_capture(tmp_path, captured({"x": X + 1}), model="other")
    assert read_traffic(tmp_path, eighth, prefer="other").requests[0].inputs["x"][0, 0] == 1
    assert read_traffic(tmp_path / "scores", eighth).model == "scores"
    with pytest.raises(CapturedRequestsError, match="'other', 'scores'"):
        read_traffic(tmp_path, eighth)
