from __future__ import annotations

import pytest

from serve.engine.errors import DeadlineExceededError, InferenceError, OverloadedError, QueueFullError, UnavailableError
from serve.protocol.status import CUT, MAX_TEXT, RETRY_HINT, Status, status_of


@pytest.mark.parametrize("kind", [QueueFullError, OverloadedError], ids=lambda kind: str(kind.__name__))
def test_what_is_refused_for_want_of_time_or_room_says_when_to_come_back(kind: type[QueueFullError]) -> None:
    assert status_of(kind("busy", retry_after_s=0.25)) == Status(8, "busy", ((RETRY_HINT, "250"),))
    assert status_of(kind("busy", retry_after_s=0.00001)).trailers == ((RETRY_HINT, "1"),)


def test_what_is_away_says_when_to_come_back_if_that_is_known() -> None:
    assert status_of(UnavailableError("away", retry_after_s=2.0)) == Status(14, "away", ((RETRY_HINT, "2000"),))
    assert status_of(UnavailableError("away")) == Status(14, "away")


def test_a_deadline_that_passed_is_not_to_be_retried() -> None:
    assert status_of(DeadlineExceededError("late")) == Status(4, "late")


def test_what_nobody_raised_on_purpose_stays_here() -> None:
    assert status_of(KeyError("/secret/path")) == Status(13, "the server failed on this request; its log says why")
    assert status_of(InferenceError("known")) == Status(13, "known")


def test_a_text_that_quotes_a_long_name_is_cut() -> None:
    whole, quoted = "x" * MAX_TEXT, "é" * 10 * MAX_TEXT
    assert status_of(InferenceError(whole)).details == whole
    details = status_of(InferenceError(f"model '{quoted}' is not served here")).details
    assert len(details) == MAX_TEXT
    assert details.startswith("model 'ééé")
    assert details.endswith(f"é{CUT}")
