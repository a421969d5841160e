"""What is logged: the server's own messages by level, and requests. Changed while the server runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from serve.engine.errors import InvalidArgumentError
from serve.observability.options import AccessLog

Value = bool | int | str
FIXED = {
    "log_file": "messages go to standard error",
    "access_log_file": "it is set when the server starts (--access-log-file)",
}
ISO_FORMAT = "%(asctime)sZ %(levelname)s %(name)s: %(message)s"


class LogFormat(StrEnum):
    """How a message looks: as at the start, or with the time in front."""

    DEFAULT = "default"
    ISO8601 = "ISO8601"


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What LogSettings sets; the first five are Triton's.

    Attributes:
        log_info: informative messages are written.
        log_warning: warnings are.
        log_error: errors are.
        log_verbose_level: from 1 on, debugging messages are.
        log_format: of messages.
        access_log: which requests get a line.
        access_log_every: under "sampled", one answered request in so many.
    """

    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: LogFormat = LogFormat.DEFAULT
    access_log: AccessLog = AccessLog.OFF
    access_log_every: int = 100

    def as_values(self) -> dict[str, Value]:
        """By name, as they go over the wire."""
        values = {name: getattr(self, name) for name in NAMES}
        return {name: str(value) if isinstance(value, StrEnum) else value for name, value in values.items()}

    def changed(self, changes: Mapping[str, Value]) -> LogSettings:
        """These settings with some others.

        Raises:
            InvalidArgumentError: no such setting, or not such a value.
        """
        checked: dict[str, Any] = {name: _checked(name, value) for name, value in changes.items()}
        return replace(self, **checked)

    def takes(self, level: int) -> bool:
        """Whether messages of one of logging's levels are written."""
        if level >= logging.ERROR:
            return self.log_error
        if level >= logging.WARNING:
            return self.log_warning
        return self.log_info if level >= logging.INFO else self.log_verbose_level > 0


NAMES = tuple(LogSettings.__dataclass_fields__)


class LogFilter(logging.Filter):
    """Applies settings to handlers of the standard library's logging, and takes them off again."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._settings = settings
        self._before: dict[logging.Handler, logging.Formatter | None] = {}
        self._level: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message is written."""
        return self._settings.takes(record.levelno)

    def apply(self, settings: LogSettings, root: logging.Logger) -> None:
        """Have `root` and its handlers follow these settings from now on."""
        self._settings = settings
        if self._level is None:
            self._level = root.level
        for handler in root.handlers:
            if handler not in self._before:
                self._before[handler] = handler.formatter
                handler.addFilter(self)
            iso = settings.log_format is LogFormat.ISO8601
            handler.setFormatter(_iso_formatter() if iso else self._before[handler])
        root.setLevel(logging.DEBUG if settings.log_verbose_level else self._level)

    def undo(self, root: logging.Logger) -> None:
        """Leave logging as it was."""
        for handler, formatter in self._before.items():
            handler.removeFilter(self)
            handler.setFormatter(formatter)
        self._before.clear()
        if self._level is not None:
            root.setLevel(self._level)


def _iso_formatter() -> logging.Formatter:
    formatter = logging.Formatter(ISO_FORMAT, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    return formatter


def _checked(name: str, value: Value) -> Value:
    if name in FIXED:
        raise InvalidArgumentError(f"{name} cannot be changed over the network; {FIXED[name]}")
    if name not in NAMES:
        raise InvalidArgumentError(f"there is no log setting {name!r}; those that can be changed: {', '.join(NAMES)}")
    if name == "log_format":
        return _one_of(name, value, LogFormat)
    if name == "access_log":
        # Triton's own client sends every setting that it does not know as a bool.
        return AccessLog(("off", "all")[value]) if isinstance(value, bool) else _one_of(name, value, AccessLog)
    if name in {"log_verbose_level", "access_log_every"}:
        least = int(name == "access_log_every")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidArgumentError(f"{name} is {value!r}, expected a whole number of {least} or more")
        return value
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} is {value!r}, expected true or false")
    return value


def _one_of(name: str, value: Value, choices: type[StrEnum]) -> StrEnum:
    try:
        return choices(str(value))
    except ValueError:
        expected = ", ".join(choices)
        raise InvalidArgumentError(f"{name} is {str(value)[:64]!r}, expected one of: {expected}") from None
