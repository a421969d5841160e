"""What an exchange with a server is made of: calls to make and pauses to keep, free of any input or output.

An exchange is a generator. It yields steps, is sent their answers (or has their InferenceClientError thrown into it) and
returns the result. A client only carries the steps out, so that the synchronous and the asyncio client cannot differ.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message


@dataclass(frozen=True, kw_only=True)
class Call:
    """One unary RPC to make.

    Attributes:
        method: its name, such as "ModelInfer".
        request: the message to send.
        answer: the class of the answer.
        idempotent: whether making it twice does no more than making it once; then it may be repeated when nobody knows whether
            the server has seen it.
    """

    method: str
    request: Message
    answer: type[Message]
    idempotent: bool = True


@dataclass(frozen=True)
class Pause:
    """Time to wait before the next step."""

    seconds: float


Answer = TypeVar("Answer")
Exchange = Generator[Call | Pause, Any, Answer]
