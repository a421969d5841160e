"""Measures the load generator's own limit in a comparison."""
