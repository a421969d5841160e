"""Load a server and report its throughput and latency."""

from __future__ import annotations


class BenchmarkArgumentError(ValueError):
    """Options of a measurement that are malformed or contradict each other; the text says what was expected."""


class BenchmarkError(RuntimeError):
    """A measurement that failed: no request succeeded, or the load generator died."""
