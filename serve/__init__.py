"""Serve models over gRPC: transport -> protocol -> engine -> backend, and back."""
