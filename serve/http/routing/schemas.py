"""JSON Schemas of types: of TypedDicts, of protobuf messages as `message_dict` writes them, and of what these are made of."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from halfserve.serve.http.routing.kserve_bodies import ALWAYS_SET, COMPONENTS, FIELDS
from halfserve.serve.http.routing.operations import OTHER_FIELDS, Component, Keyword

Schema = dict[str, Any]
PLAIN: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    NoneType: "null",
}
REFERENCE = "#/components/schemas/"
_NUMBERS = {FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE}
_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64}


class Schemas:
    """Makes schemas, and collects the named ones that they refer to.

    Attributes:
        components: schemas by name.
    """

    def __init__(self) -> None:
        self.components: dict[str, Schema] = {}
        self._sources: dict[str, Any] = {}

    def of(self, kind: Any) -> Schema:
        """Return the schema of a type.

        Raises:
            TypeError: the type has no JSON.
            ValueError: two types have the same name.
        """
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is None:
            return self._plain(kind)
        if origin is Annotated:
            return self._annotated(arguments[0], arguments[1:])
        if origin is NotRequired:
            return self.of(arguments[0])
        if origin is Literal:
            return {"type": "string", "enum": list(arguments)}
        if origin in {Union, UnionType}:
            return _merged([self.of(one) for one in arguments])
        return self._container(origin, arguments[-1])

    def _plain(self, kind: Any) -> Schema:
        if is_typeddict(kind):
            return self._named(kind.__name__.removesuffix("Json").replace("Body", "Request"), kind)
        if isinstance(kind, type) and issubclass(kind, Message):
            return self._message(kind.DESCRIPTOR)
        if kind not in PLAIN:
            raise TypeError(f"{kind} has no JSON schema, expected one of the types that operations.py lists")
        return {"type": PLAIN[kind]}

    def _container(self, kind: Any, of: Any) -> Schema:
        schema = self._plain(kind)
        return schema if of is Any else schema | {"items" if kind is list else "additionalProperties": self.of(of)}

    def _annotated(self, kind: Any, notes: tuple[Any, ...]) -> Schema:
        schema = dict(self.of(kind))
        for note in notes:
            if isinstance(note, str):
                schema["description"] = note
            elif isinstance(note, Keyword):
                schema[note.name] = list(note.value) if isinstance(note.value, tuple) else note.value
            elif isinstance(note, Component):
                schema = self._refer(note.name, kind, schema)
        return schema

    def _named(self, name: str, kind: Any) -> Schema:
        if name not in self._sources:
            self._refer(name, kind, {})  # before its fields, which may refer to it
            properties: Schema = {}
            required = []
            content: Schema = {"type": "object", "properties": properties}
            for field, hint in get_type_hints(kind, include_extras=True).items():
                if get_origin(hint) is Annotated and OTHER_FIELDS in get_args(hint)[1:]:
                    content["additionalProperties"] = self.of(hint)
                    continue
                properties[field] = self.of(hint)
                if get_origin(hint) is not NotRequired:
                    required.append(field)
            self.components[name] |= content | ({"required": required} if required else {})
        return self._refer(name, kind, self.components[name])

    def _refer(self, name: str, source: Any, schema: Schema) -> Schema:
        if self._sources.setdefault(name, source) != source:
            raise ValueError(
                f"{source} and {self._sources[name]} have the name {name} in the document, expected different names"
            )
        self.components.setdefault(name, schema)
        return {"$ref": REFERENCE + name}

    def _message(self, descriptor: Any) -> Schema:
        name: str = descriptor.full_name.partition(".")[2]
        component = COMPONENTS.get(name, name.removesuffix("Response").replace(".", ""))
        if component not in self._sources:
            self._refer(component, descriptor, {})
            required = [field.name for field in descriptor.fields if _is_always_there(field)]
            self.components[component] |= {
                "type": "object",
                "properties": {field.name: self._field(field) for field in descriptor.fields},
                **({"required": required} if required else {}),
            }
        return self._refer(component, descriptor, self.components[component])

    def _field(self, field: Any) -> Schema:
        known = FIELDS.get(_name_of(field))
        if known is not None:
            return self.of(known)
        if _is_map(field):
            return {"type": "object", "additionalProperties": self._one(field.message_type.fields_by_name["value"])}
        return {"type": "array", "items": self._one(field)} if field.is_repeated else self._one(field)

    def _one(self, field: FieldDescriptor) -> Schema:
        if field.message_type is not None:
            return self._message(field.message_type)
        if field.enum_type is not None:
            return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            return {"type": "string"}  # bytes are base64
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return {"type": "boolean"}
        if field.cpp_type in _NUMBERS:
            return {"type": "number"}
        return {"type": "integer", "minimum": 0} if field.cpp_type in _UNSIGNED else {"type": "integer"}


def _merged(schemas: list[Schema]) -> Schema:
    """Return the schema of a union: `type` lists the types, and each keyword holds for values of its type alone."""
    if any("type" not in schema for schema in schemas):
        return {"anyOf": schemas}
    merged: Schema = {}
    types = [schema.pop("type") for schema in map(dict, schemas)]
    for schema in schemas:
        merged |= {name: value for name, value in schema.items() if name != "type"}
    if "enum" in merged and "null" in types:
        merged["enum"] = [*merged["enum"], None]
    return {"type": types} | merged


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _is_always_there(field: FieldDescriptor) -> bool:
    return not field.has_presence or _name_of(field) in ALWAYS_SET


def _name_of(field: FieldDescriptor) -> str:
    return field.full_name.partition(".")[2]  # without the package
