"""Attacks on a running server, each measured by its peak memory and by what a well-behaved client notices."""
