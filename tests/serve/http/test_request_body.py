"""Bodies of requests that carry neither tensors nor a model's files: they are read on the event loop, in one go."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.engine.errors import InvalidArgumentError, MessageTooLargeError, UnavailableError, UnsupportedError
from halfserve.serve.http.request_body import RequestMemory, accepted_coding, compressed, decompressed
from halfserve.serve.security.memory_budget import MemoryBudget

WAIT_S = 60.0

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
    assert answer.status_code == 503
    assert answer.json()["error"].startswith("models are not loaded by request here")


@given(body=st.binary(max_size=3000), coding=st.sampled_from(["gzip", "deflate"]))
def test_what_is_compressed_comes_back(body: bytes, coding: str) -> None:
    assert decompressed(compressed(body, coding), coding, len(body)) == body


def test_no_coding_is_no_change() -> None:
    assert decompressed(b"abc", "", 3) == b"abc"
    assert decompressed(b"abc", " Identity", 3) == b"abc"


def test_a_bomb_is_not_inflated() -> None:
    bomb = gzip.compress(bytes(50_000_000))
    with pytest.raises(MessageTooLargeError, match="a message of more than 1000 bytes is too large, expected at most 1000"):
        decompressed(bomb, "gzip", 1000)


def test_broken_bodies_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="the body does not decompress as deflate"):
        decompressed(b"nonsense", "deflate", 100)
    with pytest.raises(InvalidArgumentError, match="the body ends inside its deflate data; send all of it"):
        decompressed(zlib.compress(b"abcdef")[:-2], "deflate", 100)
    with pytest.raises(UnsupportedError, match="Content-Encoding 'br' is not known here; expected gzip, deflate or none"):
        decompressed(b"", "br", 100)


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("br, deflate;q=0.5, gzip;q=0.1", "deflate"),
        ("gzip;q=0", None),
        ("gzip;q=x", None),
        ("GZIP ; q=1.0", "gzip"),
        ("identity", None),
    ],
    ids=range(7),
)
def test_the_client_chooses(accept: str, coding: str | None) -> None:
    assert accepted_coding(accept) == coding


def test_a_request_that_is_pressed_again_while_it_is_refused_is_refused_once() -> None:
    async def scene() -> None:
        memory = RequestMemory(MemoryBudget(1000))
        waiting = asyncio.create_task(memory.within(WAIT_S, asyncio.Event().wait()))
        await asyncio.sleep(0)
        memory.share.resize(10_000)
        while not waiting.done():
            memory.share.press()
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            waiting.result()
        with pytest.raises(UnavailableError, match="--max-buffered-mib"):
            memory.check()

    asyncio.run(scene())
