"""`pb_utils.TritonError` and its codes, and `pb_utils.TritonModelException`."""

from __future__ import annotations

from enum import IntEnum


class TritonModelException(Exception):  # noqa: N818  (Triton's name)
    """An error that a model raises, or that a wrong call of this interface raises."""


# Triton's texts of errors by name, of a server that speaks as Triton does.
phrases: dict[str, str] = {}


def phrased(name: str, text: str, **facts: str) -> str:
    """Return an error's text; Triton's alone where there is one, since models compare it as a whole."""
    return phrases[name].format_map(facts) if name in phrases else text


class ErrorCode(IntEnum):
    """Triton's numbers."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """The error of one response."""

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: int = ErrorCode.INTERNAL) -> None:
        self._message = str(message)
        self._code = ErrorCode(code)

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code
