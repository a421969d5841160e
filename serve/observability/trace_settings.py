"""Which requests are traced: for all models, and for those that have settings of their own. Changed while the server runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serve.engine.errors import InvalidArgumentError

LEVELS = ("OFF", "TIMESTAMPS")
CHANGEABLE = ("trace_level", "trace_rate", "trace_count", "log_frequency")
FIXED = ("trace_mode", "trace_file")
UNBOUNDED = -1


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """What TraceSetting sets.

    Attributes:
        level: OFF, or TIMESTAMPS.
        rate: one request in so many.
        count: so many more; UNBOUNDED.
        log_frequency: traces per file, and what follows of the last one's batch; 0 puts all in one.
    """

    level: str = "OFF"
    rate: int = 1000
    count: int = UNBOUNDED
    log_frequency: int = 0

    def as_values(self) -> dict[str, list[str]]:
        """By Triton's names."""
        return {
            "trace_level": [self.level],
            "trace_rate": [str(self.rate)],
            "trace_count": [str(self.count)],
            "log_frequency": [str(self.log_frequency)],
        }


class Sampler:
    """Counts the requests that one set of settings holds for."""

    __slots__ = ("left", "settings", "turn")

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self.left = settings.count
        self.turn = 0

    def take(self, *, decided: bool | None) -> bool:
        """Whether the next request is traced; `decided` is what its caller has decided, if it has."""
        if self.settings.level == "OFF" or not self.left or decided is False:
            return False
        if decided is None:
            self.turn += 1
            if self.turn % self.settings.rate:
                return False
        if self.left > 0:
            self.left -= 1
        return True


class TraceControl:
    """The settings now, and those of the start, which cleared ones go back to."""

    def __init__(self, settings: TraceSettings) -> None:
        self._at_start = settings
        self.everywhere = Sampler(settings)
        self.by_model: dict[str, Sampler] = {}
        self._own: dict[str, dict[str, str]] = {}  # what was set for a model alone; the rest follows the global settings

    @property
    def is_on(self) -> bool:
        """Whether any request can be traced."""
        return any(s.settings.level != "OFF" for s in (self.everywhere, *self.by_model.values()))

    @property
    def is_alike(self) -> bool:
        """Whether the same settings hold for every model."""
        return not self.by_model

    def of(self, model: str) -> TraceSettings:
        """The settings that hold for a model; "" is all that have none of their own. `count` is what is left of it."""
        sampler = self.by_model.get(model, self.everywhere)
        return replace(sampler.settings, count=sampler.left)

    def update(self, model: str, changes: Mapping[str, Sequence[str]]) -> None:
        """Change settings of a model, or the global ones under ""; an empty value clears what was set.

        Raises:
            InvalidArgumentError: no such setting, or not such a value. Nothing has been changed then.
        """
        checked = {name: _checked(name, values) for name, values in changes.items()}
        if not checked:
            return
        if model:
            own = {**self._own.get(model, {}), **{name: value for name, value in checked.items() if value is not None}}
            own = {name: value for name, value in own.items() if checked.get(name, value) is not None}
            self._own[model] = own
        else:
            start = {name: values[0] for name, values in self._at_start.as_values().items()}
            news = {name: start[name] if value is None else value for name, value in checked.items()}
            keeps_count = "trace_count" not in checked
            left = self.everywhere.left
            self.everywhere = Sampler(_with(self.everywhere.settings, news))
            if keeps_count:
                self.everywhere.left = left
        if "trace_count" in checked:  # what is set is counted down from there, by all that it holds for
            holds = {model} if model else {name for name in self.by_model if "trace_count" not in self._own[name]}
            self.by_model = {name: sampler for name, sampler in self.by_model.items() if name not in holds}
        self._follow()

    def _follow(self) -> None:
        """Make the models' samplers anew from their own settings and the global ones; what is left of their counts stays."""
        self._own = {model: own for model, own in self._own.items() if own}
        before = self.by_model
        self.by_model = {}
        for model, own in self._own.items():
            sampler = Sampler(_with(self.everywhere.settings, own))
            if model in before:
                sampler.left = before[model].left
            self.by_model[model] = sampler


def _with(settings: TraceSettings, values: Mapping[str, str]) -> TraceSettings:
    """Settings with some of them changed; the values have been checked."""
    return TraceSettings(
        level=values.get("trace_level", settings.level),
        rate=int(values.get("trace_rate", settings.rate)),
        count=int(values.get("trace_count", settings.count)),
        log_frequency=int(values.get("log_frequency", settings.log_frequency)),
    )


def _checked(name: str, values: Sequence[str]) -> str | None:
    """The value of a setting; None clears it."""
    if name in FIXED:
        raise InvalidArgumentError(f"{name} is set when the server starts (--trace-to), not over the network")
    if name not in CHANGEABLE:
        raise InvalidArgumentError(f"there is no trace setting {name!r}; those that can be changed: {', '.join(CHANGEABLE)}")
    if not values:
        return None
    if name == "trace_level":
        return _level(values)
    least = {"trace_rate": 1, "trace_count": UNBOUNDED, "log_frequency": 0}[name]
    text = values[0] if len(values) == 1 else ""
    digits = text.removeprefix("-") if least < 0 else text
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19 and int(text) >= least):
        given = ", ".join(values)
        raise InvalidArgumentError(f"{name} is {given!r}, expected one whole number of {least} or more")
    return text


def _level(values: Sequence[str]) -> str:
    unknown = [value for value in values if value not in LEVELS]
    if unknown:
        hint = "; tensors are never written" if "TENSORS" in unknown else ""
        raise InvalidArgumentError(f"trace_level is {unknown[0]!r}, expected {' or '.join(LEVELS)}{hint}")
    if len(set(values)) > 1:
        raise InvalidArgumentError("trace_level is both OFF and TIMESTAMPS, expected one of them")
    return values[0]
