"""Malformed messages of many kinds, each with the answers that the protocol's rules allow."""
