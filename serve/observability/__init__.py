"""Metrics, traces and the access log of a running server."""
