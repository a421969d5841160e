from __future__ import annotations

import io
import logging
import re
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from serve.engine.errors import InvalidArgumentError
from serve.observability.log_settings import LogFilter, LogFormat, LogSettings
from serve.observability.options import AccessLog


@pytest.fixture
def logger() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger with a handler, as the root logger of a server has one."""
    out = io.StringIO()
    logger = logging.getLogger("halfserve-test-of-log-settings")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.handlers = [handler]
    yield logger, out
    logger.propagate = True  # pytest puts its own handler onto loggers that keep their messages to themselves


def say_all(logger: logging.Logger, out: io.StringIO) -> list[str]:
    out.seek(0)
    out.truncate()
    logger.debug("d")
    logger.info("i")
    logger.warning("w")
    logger.error("e")
    return out.getvalue().splitlines()


def test_levels_are_turned_on_and_off_one_by_one(logger: tuple[logging.Logger, io.StringIO]) -> None:
    log_filter = LogFilter(LogSettings())
    log_filter.apply(LogSettings(log_info=False, log_error=False), logger[0])
    assert say_all(*logger) == ["WARNING w"]
    log_filter.apply(LogSettings(log_warning=False, log_verbose_level=1), logger[0])
    assert say_all(*logger) == ["DEBUG d", "INFO i", "ERROR e"]
    log_filter.undo(logger[0])
    assert say_all(*logger) == ["INFO i", "WARNING w", "ERROR e"]


def test_the_time_can_be_put_in_front_and_taken_off_again(logger: tuple[logging.Logger, io.StringIO]) -> None:
    log_filter = LogFilter(LogSettings())
    log_filter.apply(LogSettings(log_format=LogFormat.ISO8601), logger[0])
    lines = say_all(*logger)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO halfserve-test-of-log-settings: i", lines[0])
    log_filter.apply(LogSettings(), logger[0])
    assert say_all(*logger)[0] == "INFO i"
    log_filter.undo(logger[0])


def test_the_time_in_front_is_that_of_no_time_zone(
    logger: tuple[logging.Logger, io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        log_filter = LogFilter(LogSettings())
        log_filter.apply(LogSettings(log_format=LogFormat.ISO8601), logger[0])
        said = datetime.fromisoformat(say_all(*logger)[0].partition(" ")[0])
    time.tzset()
    assert abs(said.timestamp() - time.time()) < 3600
    log_filter.undo(logger[0])


def test_settings_go_over_the_wire_by_name() -> None:
    assert LogSettings(access_log=AccessLog.ERRORS).as_values() == {
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
        "access_log": "errors",
        "access_log_every": 100,
    }


def test_values_that_are_told_can_be_given_back() -> None:
    settings = LogSettings(log_info=False, log_verbose_level=2, log_format=LogFormat.ISO8601, access_log=AccessLog.SAMPLED)
    assert LogSettings().changed(settings.as_values()) == settings


def test_tritons_client_can_turn_the_access_log_on() -> None:
    assert LogSettings().changed({"access_log": True}).access_log is AccessLog.ALL
    assert LogSettings(access_log=AccessLog.ALL).changed({"access_log": False}).access_log is AccessLog.OFF


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("log_colour", True, "no log setting 'log_colour'; those that can be changed: log_info, log_warning, log_error"),
        ("log_file", "/etc/passwd", "log_file cannot be changed over the network; messages go to standard error"),
        (
            "access_log_file",
            "/etc/passwd",
            "access_log_file cannot be changed over the network; it is set when the server starts",
        ),
        ("log_info", 1, "log_info is 1, expected true or false"),
        ("log_verbose_level", True, "log_verbose_level is True, expected a whole number of 0 or more"),
        ("access_log_every", 0, "access_log_every is 0, expected a whole number of 1 or more"),
        ("log_format", "xml", "log_format is 'xml', expected one of: default, ISO8601"),
        ("access_log", "some", "access_log is 'some', expected one of: off, errors, sampled, all"),
    ],
)
def test_a_wrong_setting_is_told_what_was_expected(name: str, value: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        LogSettings().changed({name: value})
