"""Errors in the form that each interface's clients read: OpenAI's, Cohere's, TEI's, and ours for all other paths."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from halfserve.serve.engine.errors import InvalidArgumentError

TEI_PATHS = frozenset({"/embed", "/rerank", "/predict", "/info", "/tokenize"})
COHERE_PATHS = frozenset({"/v1/rerank", "/v2/rerank"})
OPENAI_PREFIX = "/v1/"
# https://platform.openai.com/docs/guides/error-codes
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_TEI_TYPES = {429: "Overloaded", 503: "Unhealthy"}


class Fault(StrEnum):
    """Kinds of wrong input; text-embeddings-inference has a status for each."""

    WRONG = "wrong"
    EMPTY = "empty"
    TOO_LONG = "too long"
    TOO_MANY = "too many"


# As text-embeddings-inference answers them.
_TEI_STATUSES = {Fault.WRONG: 422, Fault.EMPTY: 400, Fault.TOO_LONG: 413, Fault.TOO_MANY: 413}


class InputError(InvalidArgumentError):
    """A field of a request is wrong."""

    def __init__(self, text: str, *, param: str, fault: Fault = Fault.WRONG) -> None:
        super().__init__(text)
        self.param = param  # the field's name
        self.fault = fault  # kind of the fault


def in_form(path: str, status: int, text: str, error: Exception | None = None) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of an error, from the usual status of HTTP and the message for the client."""
    if path in TEI_PATHS:
        if isinstance(error, InputError):
            status = _TEI_STATUSES[error.fault]
            return status, {"error": text, "error_type": "Empty" if error.fault is Fault.EMPTY else "Validation"}
        kind = "Validation" if status in range(400, 429) else _TEI_TYPES.get(status, "Backend")
        return status, {"error": text, "error_type": kind}
    if path in COHERE_PATHS:
        return status, {"message": text}
    if path.startswith(OPENAI_PREFIX):
        kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        param = error.param if isinstance(error, InputError) else None
        return status, {"error": {"message": text, "type": kind, "param": param, "code": _code(status, error)}}
    return status, {"error": text}


def _code(status: int, error: Exception | None) -> str | None:
    if isinstance(error, InputError):
        return "context_length_exceeded" if error.fault is Fault.TOO_LONG else None
    return {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}.get(status)
