"""Carriers of the protocol: each takes the same service and serves it on a port."""
