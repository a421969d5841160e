from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import pytest
from google.protobuf import text_format
from starlette.responses import StreamingResponse

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine import errors
from halfserve.serve.http.responses import HTTP_STATUSES, http_status, json_in_pieces, message_dict
from halfserve.serve.protocol.status import CODES

CONFIG = """
name: "m" max_batch_size: 8
input { name: "x" data_type: TYPE_FP16 dims: [3, -1] reshape { shape: [3, -1] } }
version_policy { specific { versions: [1, 9007199254740993] } }
dynamic_batching {
  max_queue_delay_microseconds: 100
  priority_queue_policy { key: 1 value { default_timeout_microseconds: 5 } }
}
parameters { key: "halfserve.x" value { string_value: "7" } }
"""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidArgumentError("x"), 400),
        (errors.NotFoundError("x"), 404),
        (errors.AlreadyExistsError("x"), 409),
        (errors.MessageTooLargeError(2, 1), 413),
        (errors.BackendError("x"), 500),
        (errors.UnsupportedError("x"), 501),
        (errors.UnavailableError("x"), 503),
        (errors.DeadlineExceededError("x"), 504),
    ],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_errors_have_their_status(error: errors.InferenceError, status: int) -> None:
    assert http_status(error) == (status, str(error), {})


def test_every_error_of_the_engine_has_one() -> None:
    assert set(CODES.values()) <= set(HTTP_STATUSES)


def test_a_full_queue_says_when_to_come_back() -> None:
    error = errors.QueueFullError("full", retry_after_s=1.2)
    assert http_status(error) == (429, "full", {"retry-after": "2"})


def test_the_text_of_an_unexpected_error_is_not_sent() -> None:
    assert http_status(KeyError("/secret/path")) == (500, "the server failed on this request; its log says why", {})


def test_64_bit_numbers_are_numbers_wherever_they_are() -> None:
    content = message_dict(text_format.Parse(CONFIG, ModelConfig()))
    assert content["input"][0]["dims"] == [3, -1]
    assert content["input"][0]["data_type"] == "TYPE_FP16"
    assert content["input"][0]["reshape"] == {"shape": [3, -1]}
    assert content["version_policy"] == {"specific": {"versions": [1, 9007199254740993]}}
    assert content["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert content["dynamic_batching"]["priority_queue_policy"]["1"]["default_timeout_microseconds"] == 5
    assert content["parameters"] == {"halfserve.x": {"string_value": "7"}}  # text stays text


def test_defaults_are_written_out() -> None:
    content = message_dict(pb.ModelStatistics(name="m"))
    assert content["inference_count"] == 0
    assert content["batch_stats"] == []


def test_pieces_of_several_responses_are_written_in_turns() -> None:
    iteration, written = 0, dict[int, int]()

    def pieces() -> Iterator[bytes]:
        for _ in range(5):
            written[iteration] = written.get(iteration, 0) + 1
            yield b"[]"

    async def read(client: str) -> None:
        async for _ in cast("StreamingResponse", json_in_pieces(pieces(), client)).body_iterator:
            pass

    async def run() -> None:
        nonlocal iteration
        reading = [asyncio.create_task(read(client)) for client in ("a", "a", "b")]
        while not all(task.done() for task in reading):
            iteration += 1
            await asyncio.sleep(0)

    asyncio.run(run())
    assert sum(written.values()) == 15
    assert sorted(written.values())[:-1] == [1] * 12, "but for the first piece of each"
