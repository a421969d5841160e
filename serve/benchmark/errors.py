"""What can go wrong with a measurement."""

from __future__ import annotations


class BenchmarkArgumentError(ValueError):
    """A measurement that was asked for in a way that makes no sense; the text says what was expected."""


class BenchmarkError(RuntimeError):
    """A measurement that failed: no request succeeded, or the load generator died."""
