"""A closed loop of HTTP/1.1 clients on one event loop: each sends its next text when the last one is answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def openai_body(model: str) -> Callable[[str], dict[str, Any]]:
    """The body that the package `openai` sends for a text; it requests base64."""
    return lambda text: {"model": model, "input": text, "encoding_format": "base64"}


def triton_body(text: str) -> dict[str, Any]:
    """The body of KServe's REST protocol for a text, requesting the answer's numbers as bytes."""
    tensor = {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    return {"inputs": [tensor], "parameters": {"binary_data_output": True}}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server that embeds.

    Attributes:
        name: The name in the table.
        port: The port on 127.0.0.1.
        path: The path of the POST request.
        body: Makes the JSON for a text.
    """

    name: str
    port: int
    path: str
    body: Callable[[str], dict[str, Any]]

    def request(self, text: str) -> bytes:
        """The bytes of a request."""
        body = json.dumps(self.body(text)).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        return f"{head}\r\n\r\n".encode() + body


async def rate(target: Target, texts: Sequence[str], in_flight: int, seconds: float) -> float:
    """Requests a second over `seconds`, after a quarter of that time as warm-up.

    Raises:
        RuntimeError: A request was not answered with 200.
    """
    counted = 0
    begins = time.monotonic() + seconds / 4
    ends = begins + seconds

    async def client(number: int) -> None:
        nonlocal counted
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        at = number
        while time.monotonic() < ends:
            writer.write(target.request(texts[at % len(texts)]))
            at += in_flight
            await _answer(reader)
            counted += begins <= time.monotonic() <= ends
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client(number) for number in range(in_flight)))
    return counted / seconds


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    body = await reader.readexactly(length)
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(f"{head.decode().splitlines()[0]}: {body[:200].decode()}")
    return body
