"""Settings of the access log and traces: the options at the start, and the settings that clients may change later.

The environment variables are defined in https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from halfserve.serve.engine.errors import FailedPreconditionError, InvalidArgumentError

Value = bool | int | str
FIXED_LOG_SETTINGS = {
    "log_file": "messages go to standard error",
    "access_log_file": "it is set when the server starts (--access-log-file)",
}
OWN_LOG_SETTINGS = ("access_log", "access_log_every")
OFF, TIMESTAMPS, TENSORS = LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
UNBOUNDED = -1
LEAST = {"trace_rate": 1, "trace_count": UNBOUNDED, "log_frequency": 0}
CHANGEABLE = ("trace_level", *LEAST)
FIXED_TRACE_SETTINGS = ("trace_mode", "trace_file")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
OTLP = "otlp"  # a destination of traces besides files
TRITON = "triton:"  # before the path of a file in Triton's own format
OTLP_PACKAGE = "opentelemetry.exporter.otlp.proto.grpc"


class AccessLog(StrEnum):
    """The requests that get a line in the access log. SAMPLED logs every error, and one in `access_log_every` answers."""

    OFF = "off"
    ERRORS = "errors"
    SAMPLED = "sampled"
    ALL = "all"


class TraceLevel(StrEnum):
    """Level of traces at the start: TIMESTAMPS traces requests, OFF none."""

    OFF = "OFF"
    TIMESTAMPS = "TIMESTAMPS"


@dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """Access log and traces at the start. All settings but the destinations can be changed while the server runs.

    Attributes:
        access_log: selects the requests that are logged.
        access_log_file: gets one JSON object per line; None is standard error.
        access_log_every: under SAMPLED, one in this many answered requests is logged.
        trace_to: "otlp" (to the collector that the OTEL_* environment variables name), the path of a file of OpenTelemetry's
            JSON, "triton:" and the path of a file in Triton's own format, or "" for no traces.
        trace_level: OFF traces nothing until a client changes the level.
        trace_rate: one in this many requests is traced, unless its caller has sent a decision.
        trace_count: most traces in all; -1 is no limit.
        trace_log_frequency: traces in one file before the next one begins; 0 puts all in one.
        process: number of this server process among the writers of the same files; None if it is the only one.
    """

    access_log: AccessLog = AccessLog.OFF
    access_log_file: Path | None = None
    access_log_every: int = 100
    trace_to: str = ""
    trace_level: TraceLevel = TraceLevel.TIMESTAMPS
    trace_rate: int = 1000
    trace_count: int = UNBOUNDED
    trace_log_frequency: int = 0
    process: int | None = None


class LogFormat(StrEnum):
    """Triton's formats of a message. Both write the format of --log-format, whose times are ISO 8601 in any case."""

    DEFAULT = "default"
    ISO8601 = "ISO8601"


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """The settings of the RPC LogSettings; the first five are Triton's.

    Attributes:
        log_info: whether informative messages are written.
        log_warning: whether warnings are written.
        log_error: whether errors are written.
        log_verbose_level: level of verbosity; debugging messages are written from 1 on.
        log_format: Triton's format of messages; see `LogFormat`.
        access_log: selects the requests that get a line.
        access_log_every: under "sampled", one in this many answered requests is logged.
    """

    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: LogFormat = LogFormat.DEFAULT
    access_log: AccessLog = AccessLog.OFF
    access_log_every: int = 100

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
        raise InvalidArgumentError(f"{name} cannot be changed over the network; {FIXED_LOG_SETTINGS[name]}")
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


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """The settings of the RPC TraceSetting.

    Attributes:
        levels: OFF alone, or TIMESTAMPS, TENSORS or both. Spans are written under TIMESTAMPS, tensors never.
        rate: one in this many requests is traced.
        count: number of further traces; UNBOUNDED is no limit.
        log_frequency: traces per file, plus the rest of the last one's batch; 0 puts all in one.
    """

    levels: tuple[str, ...] = (OFF,)
    rate: int = 1000
    count: int = UNBOUNDED
    log_frequency: int = 0

    @property
    def is_on(self) -> bool:
        """Whether requests are traced."""
        return TIMESTAMPS in self.levels

    def as_values(self) -> dict[str, list[str]]:
        """Return the settings under Triton's names, as lists of texts."""
        return {
            "trace_level": list(self.levels),
            "trace_rate": [str(self.rate)],
            "trace_count": [str(self.count)],
            "log_frequency": [str(self.log_frequency)],
        }


class TraceSampler:
    """Counts the requests to which one group of settings applies.

    Attributes:
        settings: the trace settings of these requests.
        left: number of further traces; UNBOUNDED is no limit.
        turn: number of requests so far whose callers sent no decision.
    """

    __slots__ = ("left", "settings", "turn")

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self.left = settings.count
        self.turn = 0

    def take(self, *, decided: bool | None) -> bool:
        """Return whether the next request is traced; `decided` is its caller's decision, None without one."""
        if not self.settings.is_on or not self.left or decided is False:
            return False
        if decided is None:
            self.turn += 1
            if self.turn % self.settings.rate:
                return False
        if self.left > 0:
            self.left -= 1
        return True


class TraceControl:
    """The current settings, global and per model, and the settings at the start, which cleared settings return to.

    Attributes:
        everywhere: the sampler of all models without settings of their own.
        by_model: the samplers of models with settings of their own.
    """

    def __init__(self, settings: TraceSettings) -> None:
        self._at_start = settings
        self.everywhere = TraceSampler(settings)
        self.by_model: dict[str, TraceSampler] = {}
        self._own: dict[
            str, dict[str, tuple[str, ...]]
        ] = {}  # settings of one model alone; its other settings are the global ones

    @property
    def is_on(self) -> bool:
        """Whether any request can be traced."""
        return any(sampler.settings.is_on for sampler in (self.everywhere, *self.by_model.values()))

    @property
    def is_uniform(self) -> bool:
        """Whether the same settings apply to every model."""
        return not self.by_model

    def of(self, model: str) -> TraceSettings:
        """Return the settings of a model, or under "" the global ones. `count` is the number of traces left."""
        sampler = self.by_model.get(model, self.everywhere)
        return replace(sampler.settings, count=sampler.left)

    def update(self, model: str, changes: Mapping[str, Sequence[str]]) -> None:
        """Change settings of a model, or the global ones under ""; an empty value clears a setting.

        Raises:
            InvalidArgumentError: a name or a value is invalid; then nothing has changed.
        """
        checked = {name: _checked_trace_setting(name, values) for name, values in changes.items()}
        if not checked:
            return
        if model:
            own = self._own.get(model, {}) | {name: value for name, value in checked.items() if value is not None}
            self._own[model] = {name: value for name, value in own.items() if checked.get(name, value) is not None}
        else:
            start = self._at_start.as_values()
            news = {name: tuple(start[name]) if value is None else value for name, value in checked.items()}
            left = self.everywhere.left
            self.everywhere = TraceSampler(_with(self.everywhere.settings, news))
            if "trace_count" not in checked:
                self.everywhere.left = left
        if "trace_count" in checked:  # a new count starts over for every model to which it applies
            restarts = {model} if model else {name for name in self.by_model if "trace_count" not in self._own[name]}
            self.by_model = {name: sampler for name, sampler in self.by_model.items() if name not in restarts}
        self._rebuild()

    def _rebuild(self) -> None:
        """Make the models' samplers from their own and the global settings; their remaining counts are kept."""
        self._own = {model: own for model, own in self._own.items() if own}
        before, self.by_model = self.by_model, {}
        for model, own in self._own.items():
            sampler = TraceSampler(_with(self.everywhere.settings, own))
            if model in before:
                sampler.left = before[model].left
            self.by_model[model] = sampler


def _with(settings: TraceSettings, values: Mapping[str, tuple[str, ...]]) -> TraceSettings:
    """Return settings with checked changes."""
    now = {name: tuple(value) for name, value in settings.as_values().items()} | dict(values)
    return TraceSettings(
        levels=now["trace_level"],
        rate=int(now["trace_rate"][0]),
        count=int(now["trace_count"][0]),
        log_frequency=int(now["log_frequency"][0]),
    )


def _checked_trace_setting(name: str, values: Sequence[str]) -> tuple[str, ...] | None:
    """Return the values of a setting; None clears it."""
    if name in FIXED_TRACE_SETTINGS:
        raise InvalidArgumentError(f"{name} is set when the server starts (--trace-to), not over the network")
    if name not in CHANGEABLE:
        raise InvalidArgumentError(f"there is no trace setting {name!r}; those that can be changed: {', '.join(CHANGEABLE)}")
    if not values:
        return None
    if name == "trace_level":
        return _levels(values)
    least = LEAST[name]
    text = values[0] if len(values) == 1 else ""
    digits = text.removeprefix("-") if least < 0 else text
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19 and int(text) >= least):
        given = ", ".join(values)
        raise InvalidArgumentError(f"{name} is {given!r}, expected one whole number of {least} or more")
    return (text,)


def _levels(values: Sequence[str]) -> tuple[str, ...]:
    unknown = [value for value in values if value not in LEVELS]
    if unknown:
        raise InvalidArgumentError(f"trace_level is {unknown[0]!r}, expected OFF, or of TIMESTAMPS and TENSORS one or both")
    if OFF in values and len(set(values)) > 1:
        raise InvalidArgumentError(f"trace_level has OFF beside {', '.join(sorted({*values} - {OFF}))}, expected OFF alone")
    return tuple(dict.fromkeys(values))


def destination(options: ObserveOptions, environment: Mapping[str, str]) -> str:
    """Return the destination of traces: OTLP, a path, TRITON and a path, or "" for none."""
    named = any(environment.get(name) for name in ENDPOINTS) or environment.get("OTEL_TRACES_EXPORTER") == OTLP
    return options.trace_to or (OTLP if named else "")


def is_tritons(to: str) -> bool:
    """Return whether a destination of traces is a file in Triton's own format."""
    return to.startswith(TRITON)


def file_of(to: str) -> str:
    """Return the path of a destination; "" for one that is no file."""
    return "" if to == OTLP else to.removeprefix(TRITON)


def settings_at_start(options: ObserveOptions, environment: Mapping[str, str]) -> TraceSettings:
    """Return the trace settings at the start: OFF unless an option or OTEL_TRACES_EXPORTER=otlp asks for traces."""
    if is_tritons(options.trace_to):
        environment = {}  # the variables are OpenTelemetry's
    asked = bool(options.trace_to) or environment.get("OTEL_TRACES_EXPORTER") == OTLP
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or options.trace_level is TraceLevel.OFF:
        asked = False
    rate = sampler_rate(environment) if asked else None
    return TraceSettings(
        levels=(TIMESTAMPS if asked and rate != 0 else OFF,),
        rate=rate or options.trace_rate,
        count=options.trace_count,
        log_frequency=options.trace_log_frequency,
    )


def sampler_rate(environment: Mapping[str, str]) -> int | None:
    """Return the rate that OTEL_TRACES_SAMPLER sets: one in this many requests, 0 for none; None if it names no known sampler.

    A caller's own decision has priority under each of them, so that no trace is incomplete.
    """
    name = environment.get("OTEL_TRACES_SAMPLER", "").removeprefix("parentbased_")
    if name in {"always_on", "always_off"}:
        return int(name == "always_on")
    if name != "traceidratio":
        return None
    try:
        share = float(environment.get("OTEL_TRACES_SAMPLER_ARG", "1"))
    except ValueError:
        return 1
    return max(1, round(1 / share)) if share > 0 else 0


def check_can_trace(to: str) -> None:
    """Check that traces have a destination, and the packages that they need.

    Raises:
        FailedPreconditionError: there is no destination, or a package is missing.
    """
    if not to:
        raise FailedPreconditionError(
            "traces have nowhere to go; start the server with --trace-to FILE or --trace-to otlp, "
            "or with OTEL_EXPORTER_OTLP_ENDPOINT set"
        )
    packages = () if is_tritons(to) else ("opentelemetry.sdk.trace", *([OTLP_PACKAGE] if to == OTLP else []))
    for package in packages:
        try:
            found = find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise FailedPreconditionError("traces need OpenTelemetry; install it from a checkout with: pip install '.[trace]'")
