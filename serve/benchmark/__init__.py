"""Load a server and report its throughput and latency."""

from __future__ import annotations


class BenchmarkArgumentError(ValueError):
    """Options of a measurement are malformed or contradict each other; the text says what was expected."""


class BenchmarkError(RuntimeError):
    """A measurement failed: no request succeeded, or a load process died."""
