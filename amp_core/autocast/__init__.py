"""Autocast regions on torch's own thread-local state, and the kernels that a policy adds."""

from __future__ import annotations
