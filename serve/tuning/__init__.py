"""Find the settings of a model with the highest throughput within a latency limit, by measuring."""

from __future__ import annotations


class TuningArgumentError(ValueError):
    """Options of a tuning are malformed or do not fit the model; the text says what was expected."""


class TuningError(RuntimeError):
    """A tuning found no settings within the limit, or its server failed; the text gives the reason."""
