"""When a token ends: written by people, kept in the token file, and told in warnings. All times are UTC."""

from __future__ import annotations

import datetime as dt
import math
import re

from serve.security.errors import SecurityError

DURATION = re.compile(r"([0-9]{1,9})([mhdw])")
UNIT_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
DAY_S = UNIT_S["d"]
MAX_QUOTED = 32
EXPECTED = (
    "expected a time such as 2027-01-31T12:00:00Z, or a date such as 2027-01-31, whose first moment it stands for; in UTC"
)


def parse_time(text: str) -> float:
    """Seconds since the epoch of an ISO 8601 date or time; in UTC where it names no offset.

    Raises:
        SecurityError: it is neither.
    """
    try:
        time = dt.datetime.fromisoformat(text)
        return (time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC)).timestamp()
    except (ValueError, OverflowError):
        # What is longer may be anything, a token too.
        shown = repr(text) if len(text) <= MAX_QUOTED else "that"
        raise SecurityError(f"{shown} is no time; {EXPECTED}") from None


def parse_end(text: str, now_s: float) -> float:
    """The same, or so long from now: a whole number with m, h, d or w for minutes, hours, days or weeks.

    Args:
        text: such as "90d" or "2027-01-31".
        now_s: seconds since the epoch.

    Returns:
        Whole seconds since the epoch, later than now.

    Raises:
        SecurityError: it is neither, it is over already, or it lies beyond the year 9999.
    """
    match = DURATION.fullmatch(text)
    try:
        end_s = now_s + int(match[1]) * UNIT_S[match[2]] if match is not None else parse_time(text)
    except SecurityError as error:
        raise SecurityError(f"the end {error}; or a time from now such as 90d, 12h or 30m") from None
    if end_s <= now_s:
        raise SecurityError(f"the end {text[:40]!r} is not in the future, so the token could never be used; {EXPECTED}")
    write_time(end_s)
    return float(math.ceil(end_s))


def write_time(time_s: float) -> str:
    """Seconds since the epoch as `parse_time` reads them.

    Raises:
        SecurityError: the year has more than four digits.
    """
    try:
        time = dt.datetime.fromtimestamp(time_s, dt.UTC)
    except (ValueError, OverflowError, OSError):
        raise SecurityError("the end lies beyond the year 9999, where nobody will ask for it; leave it out") from None
    return time.replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def ends_in(end_s: float, now_s: float) -> str:
    """What a warning says of an end: "expires in 3 days", whole days so that it changes once a day; "has expired" after it."""
    if end_s <= now_s:
        return "has expired"
    days = int((end_s - now_s) // DAY_S)
    return f"expires in {days} day{'s' if days > 1 else ''}" if days else "expires within a day"
