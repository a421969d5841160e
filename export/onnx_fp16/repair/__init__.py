"""Rewrites of a float32 graph, equal in exact arithmetic, that float16 can hold."""
