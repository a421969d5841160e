from __future__ import annotations

import pytest

from serve.engine import errors
from serve.http.statuses import HTTP, http_status
from serve.protocol.status import CODES


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
    assert set(CODES.values()) <= set(HTTP)


def test_a_full_queue_says_when_to_come_back() -> None:
    error = errors.QueueFullError("full", retry_after_s=1.2)
    assert http_status(error) == (429, "full", {"retry-after": "2"})


def test_what_nobody_raised_on_purpose_keeps_its_text() -> None:
    assert http_status(KeyError("/secret/path")) == (500, "the server failed on this request; its log says why", {})
