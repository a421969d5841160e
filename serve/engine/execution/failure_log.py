"""The log of requests on which a model failed: an operator needs the cause, and a client may send many of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from halfserve.serve.engine.errors import BackendError
from halfserve.serve.engine.results import Answered, Failed

logger = logging.getLogger(__name__)

EVERY_S: Final = 1.0  # seconds between two lines
MAX_ID: Final = 256  # most bytes of a request's id in a line


class FailureLog:
    """Logs requests on which one copy of a model failed, at most one line a second. Used by one thread at a time."""

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`label`: name of the model and number of the copy."""
        self._label = label
        self._clock = clock
        self._next = 0.0
        self._left_out = 0

    def note(self, results: list[Answered | Failed]) -> None:
        """Log failures of the model. Errors of the caller are not logged."""
        for result in results:
            if isinstance(result, Failed) and isinstance(result.error, BackendError):
                self._note(result)

    def _note(self, failed: Failed) -> None:
        now = self._clock()
        if now < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more failed since the last such line)" if self._left_out else ""
        self._next, self._left_out = now + EVERY_S, 0
        request_id = failed.request.id[:MAX_ID].decode("utf-8", "replace")
        named = f"request {request_id!r}" if request_id else "a request without an id"
        cause = failed.error.__cause__
        of = "" if cause is None else f" [{type(cause).__name__}]"
        about = {"model": self._label, "id": request_id}
        logger.error("%s: failed on %s: %s%s%s", self._label, named, failed.error, of, more, extra=about)
