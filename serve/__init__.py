"""Serve models over gRPC: transport -> protocol -> engine -> backend, and back."""

from halfserve.compiled_build import build_in_use

build_in_use()  # before the first module of the hot path is imported
