"""Settings of traces: at the start, and as clients change them later, for all models or for one.

The environment variables are defined in https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.observability.observe_options import OTLP, UNBOUNDED, ObserveOptions, TraceLevel, is_tritons

OFF, TIMESTAMPS, TENSORS = LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
LEAST = {"trace_rate": 1, "trace_count": UNBOUNDED, "log_frequency": 0}
CHANGEABLE = ("trace_level", *LEAST)
FIXED_TRACE_SETTINGS = ("trace_mode", "trace_file")


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
        text = f"{name} is set when the server starts (--trace-to), not over the network"
        raise InvalidArgumentError(text).like(TritonPhrase.TRACE_FILE) if name == "trace_file" else InvalidArgumentError(text)
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
