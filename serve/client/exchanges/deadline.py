"""One time limit over all the calls of an exchange."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from serve.client.checks import is_above_0
from serve.client.errors import InvalidRequest, deadline_exceeded

DEFAULT_TIMEOUT_S = 30.0
LONGEST_S = 1e8  # three years; the protocol has eight digits for it, and longer ones overflow on the way


def checked_timeout(timeout_s: float | None) -> float | None:
    """The limit, if it is None (wait for ever) or a number of seconds above 0.

    Returns:
        Seconds that gRPC can count; None for infinitely many too.

    Raises:
        InvalidRequest: it is anything else.
    """
    if timeout_s is None or timeout_s == math.inf:
        return None
    if not is_above_0(timeout_s):
        raise InvalidRequest(f"timeout_s must be seconds above 0, or None for no limit, not {timeout_s!r}")
    return min(float(timeout_s), LONGEST_S)


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """When an exchange must be over: `limit_s` after its start, which is `end_s` on the monotonic clock."""

    limit_s: float | None
    end_s: float | None

    @classmethod
    def after(cls, limit_s: float | None) -> Deadline:
        """Starts now; None for no limit."""
        return cls(limit_s=limit_s, end_s=None if limit_s is None else time.monotonic() + limit_s)

    def remaining_s(self, *, method: str, address: str) -> float | None:
        """Seconds left for the next call; None for no limit.

        Raises:
            DeadlineExceeded: none are left. grpc rounds to milliseconds and would send the call all the same.
        """
        if self.end_s is None:
            return None
        remaining_s = self.end_s - time.monotonic()
        if remaining_s <= 0:
            raise deadline_exceeded(method=method, address=address, limit_s=self.limit_s)
        return remaining_s

    def allows(self, pause_s: float) -> bool:
        """Whether there is time left after a pause."""
        return self.end_s is None or time.monotonic() + pause_s < self.end_s
