"""Triton's Python models: each copy in a process of its own, with `triton_python_backend_utils` beside its model.py."""
