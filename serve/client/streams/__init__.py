"""Streams of inference requests over one call."""
