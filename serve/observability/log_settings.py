"""Settings of the log and the access log, which clients may change while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.observability.observe_options import AccessLog

Value = bool | int | str
FIXED_LOG_SETTINGS = {
    "log_file": "messages go to standard error",
    "access_log_file": "it is set when the server starts (--access-log-file)",
}
OWN_LOG_SETTINGS = ("access_log", "access_log_every")


class LogFormat(StrEnum):
    """Triton's formats of a message. Both write the format of --log-format, whose times are ISO 8601 in any case."""

    DEFAULT = "default"
    ISO8601 = "ISO8601"


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """The settings of the RPC LogSettings; the first five are Triton's."""

    log_info: bool = True  # whether informative messages are written
    log_warning: bool = True  # whether warnings are written
    log_error: bool = True  # whether errors are written
    log_verbose_level: int = 0  # level of verbosity; debugging messages are written from 1 on
    log_format: LogFormat = LogFormat.DEFAULT  # Triton's format of messages; see `LogFormat`
    access_log: AccessLog = AccessLog.OFF  # selects the requests that get a line
    access_log_every: int = 100  # under "sampled", one in this many answered requests is logged

    def as_values(self) -> dict[str, Value]:
        """Return the settings by name, in their types on the wire."""
        return {name: str(value) if isinstance(value, StrEnum) else value for name, value in vars(self).items()}

    def shown(self, asked: Collection[str] = ()) -> dict[str, Value]:
        """Return the settings that a client sees, by name: Triton's own, so that scripts can compare them, and halfserve's
        settings that differ from the default or that the client has `asked` for.
        """
        default = LogSettings().as_values()
        values = {n: v for n, v in self.as_values().items() if n not in OWN_LOG_SETTINGS or v != default[n] or n in asked}
        return {"log_file": "", **values}  # messages go to standard error, not to a file

    def changed(self, changes: Mapping[str, Value]) -> LogSettings:
        """Return these settings with some changes.

        Raises:
            InvalidArgumentError: a name or a value is invalid.
        """
        checked: dict[str, Any] = {name: _checked_log_setting(name, value) for name, value in changes.items()}
        return replace(self, **checked)

    def takes(self, level: int) -> bool:
        """Return whether messages of one of logging's levels are written."""
        if level >= logging.ERROR:
            return self.log_error
        if level >= logging.WARNING:
            return self.log_warning
        return self.log_info if level >= logging.INFO else self.log_verbose_level > 0


NAMES = tuple(LogSettings.__dataclass_fields__)


class LogFilter(logging.Filter):
    """Applies the settings of levels to the handlers of Python's logging, and removes them again."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._settings = settings
        self._handlers: list[logging.Handler] = []
        self._level: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        return self._settings.takes(record.levelno)

    def apply(self, settings: LogSettings, root: logging.Logger) -> None:
        """Make `root` and its handlers follow these settings from now on."""
        self._settings = settings
        if self._level is None:
            self._level = root.level
        for handler in root.handlers:
            if handler not in self._handlers:
                self._handlers.append(handler)
                handler.addFilter(self)
        root.setLevel(logging.DEBUG if settings.log_verbose_level else self._level)

    def undo(self, root: logging.Logger) -> None:
        """Restore logging as it was."""
        for handler in self._handlers:
            handler.removeFilter(self)
        self._handlers.clear()
        if self._level is not None:
            root.setLevel(self._level)


def _checked_log_setting(name: str, value: Value) -> Value:
    if name in FIXED_LOG_SETTINGS:
        text = f"{name} cannot be changed over the network; {FIXED_LOG_SETTINGS[name]}"
        raise InvalidArgumentError(text).like(TritonPhrase.LOG_FILE) if name == "log_file" else InvalidArgumentError(text)
    if name not in NAMES:
        raise InvalidArgumentError(f"there is no log setting {name!r}; those that can be changed: {', '.join(NAMES)}")
    if name == "log_format":
        return _one_of(name, value, LogFormat)
    if name == "access_log":
        # Triton's client sends settings that it does not know as bools.
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
