"""Bodies of requests that carry neither tensors nor a model's files: they are read on the event loop, in one go."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest

LARGE = json.dumps({"data": [1] * 40_000}).encode()


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/repository/models/mlp/unload",
        "/v2/logging",
        "/v2/trace/setting",
        "/v2/models/mlp/trace/setting",
        "/v2/systemsharedmemory/region/a/register",
        "/v2/cudasharedmemory/region/a/register",
    ],
)
def test_what_carries_no_tensors_is_small(http: httpx.Client, path: str) -> None:
    for headers, content in (({}, LARGE), ({"content-encoding": "gzip"}, gzip.compress(LARGE))):
        answer = http.post(path, content=content, headers=headers)
        assert answer.status_code == 413
        assert "is too large, expected at most 65536; " in answer.json()["error"]
    told = http.post(path, content=LARGE).json()["error"]
    assert told == f"a message of {len(LARGE)} bytes is too large, expected at most 65536; a request to this path takes no more"


def test_what_carries_files_may_be_large(http: httpx.Client) -> None:
    answer = http.post("/v2/repository/models/mlp/load", content=LARGE.replace(b'{"data"', b'{"parameters":{},"data"'))
    assert answer.status_code == 409
    assert answer.json()["error"].startswith("models are not loaded by request here")
