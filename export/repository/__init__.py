"""Triton's model repository, written atomically."""
