"""Triton's own QA, run against this server and beside a real Triton."""
