"""Errors in the form that each interface's clients read: OpenAI's, Cohere's, TEI's, and ours for all other routes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Annotated, Any, TypedDict

from halfserve.serve.engine.errors import InvalidArgumentError

FORM = "halfserve.error_form"  # the key of the route's ErrorForm in a request's scope
# https://platform.openai.com/docs/guides/error-codes
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_TEI_TYPES = {429: "Overloaded", 503: "Unhealthy"}


class ErrorJson(TypedDict):
    error: Annotated[str, "What was wrong, what was expected, and what to do."]


class OpenAiProblemJson(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiErrorJson(TypedDict):
    error: OpenAiProblemJson


class CohereErrorJson(TypedDict):
    message: str


class TeiErrorJson(TypedDict):
    error: str
    error_type: str


class ErrorForm(Enum):
    """Forms of errors, with the type of their JSON."""

    OURS = ErrorJson
    OPENAI = OpenAiErrorJson
    COHERE = CohereErrorJson
    TEI = TeiErrorJson


# Paths that have no route, by how they begin: clients of OpenAI ask for more than is served here.
_FORMS_WITHOUT_ROUTE = {"/v1/": ErrorForm.OPENAI}


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


def in_form(scope: Mapping[str, Any], status: int, text: str, error: Exception | None = None) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON of an error, from the request's scope, HTTP's usual status and the client's message."""
    form = scope.get(FORM) or next(
        (form for start, form in _FORMS_WITHOUT_ROUTE.items() if scope["path"].startswith(start)), ErrorForm.OURS
    )
    if form is ErrorForm.TEI:
        if isinstance(error, InputError):
            status = _TEI_STATUSES[error.fault]
            return status, {"error": text, "error_type": "Empty" if error.fault is Fault.EMPTY else "Validation"}
        kind = "Validation" if status in range(400, 429) else _TEI_TYPES.get(status, "Backend")
        return status, {"error": text, "error_type": kind}
    if form is ErrorForm.COHERE:
        return status, {"message": text}
    if form is ErrorForm.OPENAI:
        kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        param = error.param if isinstance(error, InputError) else None
        return status, {"error": {"message": text, "type": kind, "param": param, "code": _code(status, error)}}
    return status, {"error": text}


def _code(status: int, error: Exception | None) -> str | None:
    if isinstance(error, InputError):
        return "context_length_exceeded" if error.fault is Fault.TOO_LONG else None
    return {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}.get(status)
