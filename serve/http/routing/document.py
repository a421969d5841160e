"""The OpenAPI document of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from halfserve.serve.http.routing.error_forms import ErrorForm
from halfserve.serve.http.routing.operations import JSON_TYPE, OF_BODY, BodyContent, RestOperation, Tag
from halfserve.serve.http.routing.route_table import RestRoute
from halfserve.serve.http.routing.schemas import Schema, Schemas

DESCRIPTION: Final = (
    "KServe v2, the Open Inference Protocol, over REST, with Triton's extensions. Every error is an object with one text, "
    "`error`; the text endpoints answer errors in the form of the interface that they follow. A server that asks for tokens "
    "may answer any request but those about its own health with 401 or 403, one that limits its clients with 429. Where a "
    "request that a model computes has the header `halfserve-timings: true`, its answer has the header `Server-Timing`."
)
SECURITY: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A token, where the server asks for one."},
    "password": {"type": "http", "scheme": "basic", "description": "The same as the password, whatever the name."},
}
CONFLICT: Final = (
    "The state of the server does not allow it: it is there already, or this server was started so that it may not be changed."
)
# Names and texts of errors in our own form, by status.
ERRORS: Final = {
    400: ("BadRequest", "The request contradicts the model or the protocol; sending it again cannot help."),
    404: ("NotFound", "Nothing of this name is here."),
    409: ("Conflict", CONFLICT),
    413: ("TooLarge", "The body is over the server's limit."),
    429: ("QueueFull", "The queue is full."),
    500: ("Failed", "The model failed on this request."),
    501: ("Unsupported", "The protocol has this, this server does not, or it is off."),
    503: ("Unavailable", "The server or the model takes no requests now; another replica may."),
    504: ("TooLate", "The request's time ran out before it was computed."),
}
ERROR_HEADERS: Final = {429: {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}}
# Names and texts of errors of all statuses in other forms.
OTHER_ERRORS: Final = {
    ErrorForm.OPENAI: ("OpenAiProblem", "What was wrong, in OpenAI's form."),
    ErrorForm.COHERE: ("CohereProblem", "What was wrong, in Cohere's form."),
    ErrorForm.TEI: ("TeiProblem", "What was wrong, in the form of text-embeddings-inference."),
}
PARAMETERS: Final = {"version": {"pattern": "^[0-9]+$"}}  # keywords of parameters of paths


def openapi_document(routes: Iterable[RestRoute], version: str) -> dict[str, Any]:
    """Return the document of the routes that have an operation, of a server of this version."""
    parts = _Parts()
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if route.operation is None:
            continue
        names = re.findall(r"\{(\w+)\}", route.path)
        item = paths.setdefault(route.path, {"parameters": [parts.parameter(name) for name in names]} if names else {})
        item[route.method.lower()] = parts.operation(route.operation, route.form)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "halfserve",
            "version": version,
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{}, *({name: []} for name in SECURITY)],
        "tags": [{"name": tag.value} for tag in Tag],
        "paths": paths,
        "components": {
            "securitySchemes": SECURITY,
            "parameters": parts.parameters,
            "responses": parts.errors,
            "schemas": parts.schemas.components,
        },
    }


class _Parts:
    """Parts of the document, and the components that they refer to."""

    def __init__(self) -> None:
        self.schemas = Schemas()
        self.parameters: dict[str, Any] = {}
        self.errors: dict[str, Any] = {}

    def parameter(self, name: str) -> Schema:
        keywords = PARAMETERS.get(name, {})
        self.parameters[name] = {"name": name, "in": "path", "required": True, "schema": {"type": "string", **keywords}}
        return {"$ref": f"#/components/parameters/{name}"}

    def operation(self, told: RestOperation, form: ErrorForm) -> dict[str, Any]:
        content: dict[str, Any] = {"tags": [told.tag.value], "operationId": told.name, "summary": told.summary}
        if told.description:
            content["description"] = told.description
        if told.takes:
            content["requestBody"] = {"required": not told.is_body_optional, "content": self._contents(told.takes)}
        if told.headers:
            content["parameters"] = [
                {"name": name, "in": "header"} | value for name, value in self._headers(told.headers).items()
            ]
        answer: dict[str, Any] = {"description": told.answer.text}
        if told.answer.contents:
            answer["content"] = self._contents(told.answer.contents)
        if told.answer.headers:
            answer["headers"] = self._headers(told.answer.headers)
        errors = sorted(told.errors | (OF_BODY if told.takes else set()))
        content["responses"] = {"200": answer, **{str(status): self._error(form, status) for status in errors}}
        return content

    def _contents(self, contents: Iterable[BodyContent]) -> dict[str, Any]:
        return {one.media_type: self._content(one) for one in contents}

    def _content(self, body: BodyContent) -> dict[str, Any]:
        schema = {} if body.kind is None else {"schema": self.schemas.of(body.kind)}
        return schema if body.example is None else schema | {"example": body.example}

    def _headers(self, kinds: Mapping[str, Any]) -> dict[str, Any]:
        """Headers, with the description of each beside its schema."""
        found = {}
        for name, kind in kinds.items():
            schema = self.schemas.of(kind)
            found[name] = {"description": schema.pop("description"), "schema": schema}
        return found

    def _error(self, form: ErrorForm, status: int) -> Schema:
        name, text = ERRORS[status] if form is ErrorForm.OURS else OTHER_ERRORS[form]
        if name not in self.errors:
            headers = ERROR_HEADERS.get(status) if form is ErrorForm.OURS else None
            self.errors[name] = {
                "description": text,
                **({"headers": headers} if headers else {}),
                "content": {JSON_TYPE: {"schema": self.schemas.of(form.value)}},
            }
        return {"$ref": f"#/components/responses/{name}"}
