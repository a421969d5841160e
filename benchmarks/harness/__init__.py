"""Shared parts of measuring programs and soaks: a server process and its resources, models with known answers, HTTP/2."""
