"""Stands in for the package sseclient-py where it is missing: events of a response of `requests`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Event:
    """One server-sent event; `data` joins its lines."""

    data: str


class SSEClient:
    """Reads events from a response."""

    def __init__(self, response: Any) -> None:
        self._chunks: Iterator[bytes] = iter(response)

    def _read(self) -> Iterator[bytes]:
        """Yield the blocks that end with an empty line, as bytes; what is left at the end comes last."""
        held = b""
        for chunk in self._chunks:
            for line in chunk.splitlines(True):
                held += line
                if held.endswith((b"\n\n", b"\r\r", b"\r\n\r\n")):
                    yield held
                    held = b""
        if held:
            yield held

    def events(self) -> Iterator[Event]:
        """Yield each event."""
        for block in self._read():
            lines = block.decode().splitlines()
            data = [line[len("data:") :].removeprefix(" ") for line in lines if line.startswith("data:")]
            if data:
                yield Event("\n".join(data))
