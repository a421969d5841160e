"""Queueing policy: which requests wait, run together, and are refused. Pure: no thread, no event loop."""
