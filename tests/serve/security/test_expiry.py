from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.security.errors import SecurityError
from serve.security.expiry import DAY_S, ends_in, parse_end, parse_time, write_time

NOW_S = parse_time("2026-11-21T12:00:00Z")
LAST_S = parse_time("9999-12-31T23:59:59Z")


@given(st.integers(0, int(LAST_S)))
def test_what_is_written_is_read_again(time_s: int) -> None:
    assert parse_time(write_time(time_s)) == time_s


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("90d", "2027-02-19T12:00:00Z"),
        ("12h", "2026-11-22T00:00:00Z"),
        ("30m", "2026-11-21T12:30:00Z"),
        ("2w", "2026-12-05T12:00:00Z"),
        ("2027-01-31", "2027-01-31T00:00:00Z"),
        ("2027-01-31T10:00", "2027-01-31T10:00:00Z"),
        ("2027-01-31T10:00+02:00", "2027-01-31T08:00:00Z"),
        ("2027-01-31 10:00:00.5Z", "2027-01-31T10:00:01Z"),
    ],
)
def test_an_end_is_a_time_or_so_long_from_now(text: str, end: str) -> None:
    assert write_time(parse_end(text, NOW_S)) == end


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("soon", "the end 'soon' is no time; expected a time such as 2027-01-31T12:00:00Z, or a date"),
        ("soon", "or a time from now such as 90d, 12h or 30m"),
        ("", "the end '' is no time"),
        ("-5d", "the end '-5d' is no time"),
        ("1.5d", "the end '1.5d' is no time"),
        ("2027-02-30", "the end '2027-02-30' is no time"),
        ("x" * 50, "the end that is no time"),
        ("0d", "the end '0d' is not in the future, so the token could never be used"),
        ("2026-11-21", "the end '2026-11-21' is not in the future"),
        ("999999999w", "the end lies beyond the year 9999"),
    ],
)
def test_an_end_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(SecurityError) as refused:
        parse_end(text, NOW_S)
    assert said in str(refused.value)


def test_what_is_said_of_an_end_changes_once_a_day() -> None:
    said = [ends_in(NOW_S, NOW_S - before_s) for before_s in (3.5 * DAY_S, 1.2 * DAY_S, 60, 0, -DAY_S)]
    assert said == ["expires in 3 days", "expires in 1 day", "expires within a day", "has expired", "has expired"]
