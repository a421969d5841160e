"""What an operator takes and gives, at a model's opsets: from ONNX's schemas, and from ONNX Runtime's for its own domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx
import onnx_ir

RUNTIME_DOMAINS = frozenset({"com.microsoft", "com.microsoft.nchwc"})


@dataclass(frozen=True, kw_only=True)
class Formal:
    """One formal input or output.

    Attributes:
        type_str: A type variable such as "T", or a type such as "tensor(float)".
        types: The types that it may have, such as "seq(tensor(float16))".
        variadic: It stands for any number of actual ones; only the last formal may.
        homogeneous: Of a variadic one: all have the same type.
    """

    type_str: str
    types: frozenset[str]
    variadic: bool
    homogeneous: bool


@dataclass(frozen=True, kw_only=True)
class Signature:
    """An operator at one version.

    Attributes:
        inputs: Formal inputs.
        outputs: Formal outputs.
        attributes: Defaults of the integer attributes, by name; None where there is none.
    """

    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]
    attributes: Mapping[str, int | None]

    def input(self, index: int) -> Formal | None:
        """The formal that the actual input at an index belongs to."""
        return _at(self.inputs, index)

    def output(self, index: int) -> Formal | None:
        """The formal that the actual output at an index belongs to."""
        return _at(self.outputs, index)


def signature_of(node: onnx_ir.Node, opsets: Mapping[str, int]) -> Signature | None:
    """The signature of a node's operator at the model's opset of its domain; None where nobody knows it."""
    return signature_named(node.domain, node.op_type, opsets)


def signature_named(domain: str, op_type: str, opsets: Mapping[str, int]) -> Signature | None:
    """The same for an operator by its names."""
    version = opsets.get(domain)
    if version is None and domain == "":
        version = opsets.get("ai.onnx")
    return _signature(domain, op_type, version if version is not None else 1)


def first_opset_with_half(node: onnx_ir.Node, opsets: Mapping[str, int]) -> int | None:
    """The first opset after the model's whose version of the operator takes float16 somewhere; None where no version does."""
    if node.domain:
        return None
    for version in range(opsets.get("", 1) + 1, onnx.defs.onnx_opset_version() + 1):
        signature = _signature("", node.op_type, version)
        if signature and any("tensor(float16)" in formal.types for formal in (*signature.inputs, *signature.outputs)):
            return version
    return None


def _at(formals: Sequence[Formal], index: int) -> Formal | None:
    if index < len(formals):
        return formals[index]
    return formals[-1] if formals and formals[-1].variadic else None


@cache
def _signature(domain: str, op_type: str, version: int) -> Signature | None:
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return _runtime_signatures().get((domain, op_type)) if domain in RUNTIME_DOMAINS else None
    return _from_schema(schema)


def _from_schema(schema: Any) -> Signature:
    types = {constraint.type_param_str: frozenset(constraint.allowed_type_strs) for constraint in schema.type_constraints}
    defaults = {
        name: attribute.default_value.i if attribute.default_value.name else None
        for name, attribute in schema.attributes.items()
        if attribute.type == onnx.defs.OpSchema.AttrType.INT
    }
    return Signature(
        inputs=tuple(_formal(formal.type_str, formal, types) for formal in schema.inputs),
        outputs=tuple(_formal(formal.type_str, formal, types) for formal in schema.outputs),
        attributes=defaults,
    )


def _formal(type_str: str, formal: Any, types: Mapping[str, frozenset[str]]) -> Formal:
    return Formal(
        type_str=type_str,
        types=types.get(type_str, frozenset({type_str})),
        variadic=formal.option.name == "Variadic",
        homogeneous=bool(getattr(formal, "is_homogeneous", getattr(formal, "isHomogeneous", True))),
    )


@cache
def _runtime_signatures() -> Mapping[tuple[str, str], Signature]:
    """What the installed ONNX Runtime says of its own operators; loaded only for models that use them."""
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime  # noqa: PLC0415  (a tenth of a second; see above)

    newest: dict[tuple[str, str], Any] = {}
    for schema in runtime.get_all_operator_schema():
        key = schema.domain, schema.name
        if schema.domain in RUNTIME_DOMAINS and (key not in newest or newest[key].since_version < schema.since_version):
            newest[key] = schema
    return {key: _from_runtime(schema) for key, schema in newest.items()}


def _from_runtime(schema: Any) -> Signature:
    types = {constraint.type_param_str: frozenset(constraint.allowed_type_strs) for constraint in schema.type_constraints}
    return Signature(
        inputs=tuple(_formal(formal.typeStr, formal, types) for formal in schema.inputs),
        outputs=tuple(_formal(formal.typeStr, formal, types) for formal in schema.outputs),
        attributes=dict.fromkeys(schema.attributes),
    )
