"""Description of one REST route: what it takes, what it answers, and which errors it has.

Bodies are described by types: TypedDicts, messages of `protos/`, lists, dicts, Literals, unions and Annotated. A note of
Annotated is a description (text), a `Keyword`, a `Component`, or OTHER_FIELDS.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final

from halfserve.protos.datatypes import BY_WIRE

JSON_TYPE: Final = "application/json"
BYTES_TYPE: Final = "application/octet-stream"
OTHER_FIELDS: Final = object()  # a note of the field of a TypedDict that stands for all fields without a name

# Statuses of errors besides those of a body, which every route with a body has.
OF_BODY: Final = frozenset({400, 413, 501, 503, 504})
OF_MODEL: Final = frozenset({400, 404, 503})  # the path names a model
OF_INFERENCE: Final = OF_MODEL | {429, 500}


@dataclass(frozen=True)
class Keyword:
    """A note of Annotated: a keyword of JSON Schema."""

    name: str
    value: Any


@dataclass(frozen=True)
class Component:
    """A note of Annotated: the type has this name in the document."""

    name: str


class Tag(StrEnum):
    """Groups of the document, in its order."""

    SERVER = "server"
    MODELS = "models"
    INFERENCE = "inference"
    TEXT = "text"
    REPOSITORY = "repository"
    SHARED_MEMORY = "shared memory"
    SETTINGS = "settings"


@dataclass(frozen=True)
class BodyContent:
    """A body of one media type.

    Attributes:
        kind: type of the JSON value; None for a body without a description.
        example: JSON value; None without one.
    """

    kind: Any
    example: Any = None
    media_type: str = JSON_TYPE


class DescribedAnswer:
    """A successful answer, which has one of some bodies or none, and headers with the type of their values."""

    def __init__(self, text: str, *contents: BodyContent, headers: Mapping[str, Any] | None = None) -> None:
        self.text = text
        self.contents = contents
        self.headers = headers or {}


@dataclass(frozen=True)
class RestOperation:
    """Description of a route.

    Attributes:
        name: operationId, unique in the document.
        description: long text; "" without one.
        takes: possible bodies of a request; empty for a route that reads none.
        is_body_optional: whether a request may have no body.
        errors: statuses of errors, besides OF_BODY where a body is read.
        headers: headers of a request, with the type of their values.
    """

    name: str
    tag: Tag
    summary: str
    answer: DescribedAnswer
    description: str = ""
    takes: tuple[BodyContent, ...] = ()
    is_body_optional: bool = False
    errors: AbstractSet[int] = frozenset()
    headers: Mapping[str, Any] = field(default_factory=dict)


DONE: Final = DescribedAnswer("Done.", BodyContent(Annotated[dict[str, Any], Keyword("maxProperties", 0)], example={}))

# Types of values that several bodies have.
Count = Annotated[int, Keyword("minimum", 0)]
Positive = Annotated[int, Keyword("minimum", 1)]
Parameter = str | int | float | bool
Datatype = Annotated[str, Keyword("enum", tuple(BY_WIRE)), Component("Datatype")]
Bytes = Annotated[str, Keyword("contentMediaType", BYTES_TYPE)]
