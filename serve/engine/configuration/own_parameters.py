"""Our own settings in a model's config.pbtxt: `parameters { key: "halfserve.xxx" value { string_value: "..." } }`.

Triton keeps parameters that it does not know, so the same folder serves there too. Here every key that begins with "halfserve."
is checked strictly: a misspelt one would be a setting that silently does nothing.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protos.model_config_pb2 import ModelConfig
from serve.engine.errors import ModelLoadError

PREFIX = "halfserve."
Parse = Callable[[str], Any]  # from the text to the value; raises a ValueError that says what is expected


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
OWN_PARAMETERS: dict[str, Parse] = {
    "halfserve.compute_weight": number(0, above=True),
    "halfserve.cuda_graphs": switch,
    "halfserve.degraded_not_ready": switch,
    "halfserve.drift_threshold": number(0.0, above=True),
    "halfserve.fp32_twin": path,
    "halfserve.latency_target_ms": number(0, above=True),
    "halfserve.max_compute_s": number(0.0, above=True),
    "halfserve.optimization_level": one_of("all", "extended", "basic", "disabled"),
    "halfserve.pad_to_preferred": switch,
    "halfserve.precision_guard": one_of("off", "count", "reject", "fallback"),
    "halfserve.shadow_rate": number(0.0, 1.0),
    "halfserve.shadow_share": number(0.0, 1.0, above=True),
    "halfserve.warm_up": switch,
}
# The server writes these, to tell clients; what a config.pbtxt says of them has no effect.
REPORTED = frozenset({"halfserve.certificate", "halfserve.nodes", "halfserve.precision", "halfserve.provider"})


def check_own_parameters(config: ModelConfig, source: Path) -> None:
    """Check every key of ours and its value.

    Args:
        config: as read.
        source: its file, for the error's text.

    Raises:
        ModelLoadError: a key is not known, or its value is not what it takes.
    """
    for key in sorted(config.parameters):
        if not key.startswith(PREFIX) or key in REPORTED:
            continue
        if key not in OWN_PARAMETERS:
            raise ModelLoadError(f"{source}: parameter {key!r} is not known; {_nearest(key)}")
        own_parameter(config, key, source)


def drop_reported(config: ModelConfig) -> None:
    """Take out what the server alone says: a copied config.pbtxt may claim what was true of another model."""
    for key in REPORTED & set(config.parameters):
        del config.parameters[key]


def own_parameter(config: ModelConfig, key: str, source: Path | str = "config.pbtxt") -> Any:
    """The value of one of our parameters; None where the configuration does not give it.

    Raises:
        ModelLoadError: its value is not what it takes.
    """
    if key not in config.parameters:
        return None
    value = config.parameters[key].string_value
    try:
        return OWN_PARAMETERS[key](value)
    except ValueError as error:
        raise ModelLoadError(f"{source}: parameter {key!r} is {value!r}, {error}") from None


def _nearest(key: str) -> str:
    near = difflib.get_close_matches(key, OWN_PARAMETERS, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(OWN_PARAMETERS)}"
