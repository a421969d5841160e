"""From the engine's errors to HTTP's statuses, by way of the one table that gRPC uses."""

from __future__ import annotations

import math

from serve.engine.errors import MessageTooLargeError
from serve.protocol.status import RETRY_HINT, status_of

# gRPC's numbers to HTTP's, as google.rpc.Code maps them, except that a precondition that does not hold is a conflict:
# https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
HTTP: dict[int, int] = {
    3: 400,  # INVALID_ARGUMENT
    4: 504,  # DEADLINE_EXCEEDED
    5: 404,  # NOT_FOUND
    6: 409,  # ALREADY_EXISTS
    7: 403,  # PERMISSION_DENIED
    8: 429,  # RESOURCE_EXHAUSTED
    9: 409,  # FAILED_PRECONDITION
    10: 409,  # ABORTED
    11: 400,  # OUT_OF_RANGE
    12: 501,  # UNIMPLEMENTED
    13: 500,  # INTERNAL
    14: 503,  # UNAVAILABLE
    16: 401,  # UNAUTHENTICATED
}


def http_status(error: Exception) -> tuple[int, str, dict[str, str]]:
    """The status, the text for the client, and headers. What was not raised on purpose is 500, and its text stays here."""
    status = status_of(error)
    if isinstance(error, MessageTooLargeError):
        return 413, status.details, {}
    headers = {}
    for name, value in status.trailers:
        if name == RETRY_HINT:
            headers["retry-after"] = str(max(1, math.ceil(int(value) / 1000)))
    return HTTP.get(status.code, 500), status.details, headers
