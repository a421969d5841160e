"""Our own settings in a model's config.pbtxt: `parameters { key: "halfserve.xxx" value { string_value: "..." } }`.

Triton keeps parameters that it does not know, so the same folder serves there too. Here every key that begins with "halfserve."
is checked strictly: a misspelt one would be a setting that silently does nothing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.model_config_pb2 import ModelConfig
from serve.engine.errors import ModelLoadError

PREFIX = "halfserve."
Parse = Callable[[str], Any]


@dataclass(frozen=True, kw_only=True)
class OwnParameter:
    """One setting.

    Attributes:
        parse: from the text to the value; raises a ValueError that says what is expected.
        reported: the server writes it, to tell clients; what a config.pbtxt says of it has no effect.
    """

    parse: Parse
    reported: bool = False


def text(value: str) -> str:
    """Any text."""
    return value


def path(value: str) -> str:
    """A file's path; where it leads is for its reader to judge."""
    if "\0" in value:
        raise ValueError("expected a path without NUL characters")
    return value


def one_of(*choices: str) -> Parse:
    """One word of several."""

    def parse(value: str) -> str:
        if value not in choices:
            raise ValueError(f"expected one of {', '.join(map(repr, choices))}")
        return value

    return parse


def switch(value: str) -> bool:
    """On or off."""
    choices = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
    if value.lower() not in choices:
        raise ValueError("expected 'on' or 'off'")
    return choices[value.lower()]


def number(least: float, most: float = math.inf, *, above: bool = False) -> Parse:
    """A finite number from `least` to `most`, both included; `above` leaves `least` itself out."""
    lower = f"above {least:g}" if above else f"of {least:g} or more"
    expected = f"expected a number {lower}" if most == math.inf else f"expected a number {lower} and at most {most:g}"

    def parse(value: str) -> float:
        try:
            result = float(value)
        except ValueError:
            raise ValueError(expected) from None
        if not math.isfinite(result) or result < least or (above and result == least) or result > most:
            raise ValueError(expected)
        return result

    return parse


# One line a key, in alphabetical order.
OWN_PARAMETERS: dict[str, OwnParameter] = {
    "halfserve.certificate": OwnParameter(parse=text, reported=True),
    "halfserve.compute_weight": OwnParameter(parse=number(0, above=True)),
    "halfserve.cuda_graphs": OwnParameter(parse=switch),
    "halfserve.degraded_not_ready": OwnParameter(parse=switch),
    "halfserve.drift_threshold": OwnParameter(parse=number(0.0, above=True)),
    "halfserve.fp32_twin": OwnParameter(parse=path),
    "halfserve.latency_target_ms": OwnParameter(parse=number(0, above=True)),
    "halfserve.max_compute_s": OwnParameter(parse=number(0.0, above=True)),
    "halfserve.nodes": OwnParameter(parse=text, reported=True),
    "halfserve.optimization_level": OwnParameter(parse=one_of("all", "extended", "basic", "disabled")),
    "halfserve.pad_to_preferred": OwnParameter(parse=switch),
    "halfserve.precision": OwnParameter(parse=text, reported=True),
    "halfserve.precision_guard": OwnParameter(parse=one_of("off", "count", "reject", "fallback")),
    "halfserve.provider": OwnParameter(parse=text, reported=True),
    "halfserve.shadow_rate": OwnParameter(parse=number(0.0, 1.0)),
    "halfserve.shadow_share": OwnParameter(parse=number(0.0, 1.0, above=True)),
    "halfserve.warm_up": OwnParameter(parse=switch),
}


def check_own_parameters(config: ModelConfig, source: Path) -> None:
    """Check every key of ours and its value.

    Args:
        config: as read.
        source: its file, for the error's text.

    Raises:
        ModelLoadError: a key is not known, or its value is not what it takes.
    """
    for key in sorted(config.parameters):
        if not key.startswith(PREFIX):
            continue
        known = OWN_PARAMETERS.get(key)
        if known is None:
            raise ModelLoadError(f"{source}: parameter {key!r} is not known; {_nearest(key)}")
        if not known.reported:
            _parsed(config, key, known, source)


def drop_reported(config: ModelConfig) -> None:
    """Take out what the server alone says: a copied config.pbtxt may claim what was true of another model."""
    for key in [key for key, known in OWN_PARAMETERS.items() if known.reported and key in config.parameters]:
        del config.parameters[key]


def own_parameter(config: ModelConfig, key: str, source: Path | str = "config.pbtxt") -> Any:
    """The value of one of our parameters; None where the configuration does not give it.

    Raises:
        ModelLoadError: its value is not what it takes.
    """
    return _parsed(config, key, OWN_PARAMETERS[key], source) if key in config.parameters else None


def _parsed(config: ModelConfig, key: str, known: OwnParameter, source: Path | str) -> Any:
    value = config.parameters[key].string_value
    try:
        return known.parse(value)
    except ValueError as error:
        raise ModelLoadError(f"{source}: parameter {key!r} is {value!r}, {error}") from None


def _nearest(key: str) -> str:
    writable = [name for name, known in OWN_PARAMETERS.items() if not known.reported]
    near = difflib.get_close_matches(key, writable, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(writable)}"
