"""Models of the server under test: their tensors as metadata describes them, and inputs that fit."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

# Name of the typed contents and width in bytes of a raw element. FP16 and BF16 have no typed contents; BYTES has no width.
WIDTHS = {
    "BOOL": ("bool_contents", 1),
    "INT8": ("int_contents", 1),
    "INT16": ("int_contents", 2),
    "INT32": ("int_contents", 4),
    "INT64": ("int64_contents", 8),
    "UINT8": ("uint_contents", 1),
    "UINT16": ("uint_contents", 2),
    "UINT32": ("uint_contents", 4),
    "UINT64": ("uint64_contents", 8),
    "FP16": ("", 2),
    "BF16": ("", 2),
    "FP32": ("fp32_contents", 4),
    "FP64": ("fp64_contents", 8),
    "BYTES": ("bytes_contents", 0),
}
# The element 1 on the wire; integers are little-endian.
ONES = {
    "BOOL": b"\1",
    "FP16": struct.pack("<e", 1.0),
    "BF16": struct.pack("<f", 1.0)[2:],
    "FP32": struct.pack("<f", 1.0),
    "FP64": struct.pack("<d", 1.0),
    "BYTES": struct.pack("<I", 1) + b"1",
}


@dataclass(frozen=True)
class DescribedTensor:
    """An input or output in a model's metadata."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def sent_shape(self) -> list[int]:
        """The shape of a request: 1 for each dimension that may vary."""
        return [max(dimension, 1) if dimension != 0 else 0 for dimension in self.shape]

    @property
    def elements(self) -> int:
        """Number of elements of a request."""
        return math.prod(self.sent_shape)

    @property
    def raw(self) -> bytes:
        """All elements 1, as raw contents."""
        width = WIDTHS[self.datatype][1]
        return ONES.get(self.datatype, (1).to_bytes(max(width, 1), "little")) * self.elements

    @property
    def values(self) -> list[Any]:
        """All elements 1, flat, as Python values."""
        one: Any = {"BOOL": True, "BYTES": "1"}.get(self.datatype, 1.0 if "F" in self.datatype else 1)
        return [one] * self.elements

    @property
    def nested(self) -> Any:
        """All elements 1 in nested lists of the shape."""
        made: Any = self.values
        for size in reversed(self.sent_shape[1:]):
            made = [made[start : start + size] for start in range(0, len(made), size)] if size else made
        return made

    @property
    def head(self) -> dict[str, Any]:
        """The input in a REST request, without data."""
        return {"name": self.name, "datatype": self.datatype, "shape": self.sent_shape}

    @property
    def json(self) -> dict[str, Any]:
        """The input in a REST request."""
        return {**self.head, "data": self.values}


@dataclass(frozen=True)
class TargetModel:
    """A model to infer with."""

    name: str
    inputs: tuple[DescribedTensor, ...]
    outputs: tuple[DescribedTensor, ...]

    @property
    def has_typed_contents(self) -> bool:
        """Whether each input has a field of typed contents."""
        return all(WIDTHS[tensor.datatype][0] for tensor in self.inputs)

    @property
    def rank(self) -> tuple[bool, bool, str]:
        """Sorts models with numbers before those with texts, and those before models without typed contents."""
        return not self.has_typed_contents, "BYTES" in self.datatypes, self.name

    @property
    def datatypes(self) -> str:
        """Data types of the inputs, for the reader of a result."""
        return ", ".join(sorted({tensor.datatype for tensor in self.inputs}))


def model_of(metadata: Any, name: str) -> TargetModel:
    """Return the model that metadata describes: a ModelMetadataResponse, or the object of REST."""
    if isinstance(metadata, dict):
        inputs, outputs = (
            tuple(DescribedTensor(t["name"], t["datatype"], tuple(int(d) for d in t["shape"])) for t in metadata.get(kind, []))
            for kind in ("inputs", "outputs")
        )
    else:
        inputs, outputs = (
            tuple(DescribedTensor(t.name, t.datatype, tuple(t.shape)) for t in tensors)
            for tensors in (metadata.inputs, metadata.outputs)
        )
    return TargetModel(name, inputs, outputs)


def unpacked(raw: bytes, datatype: str) -> list[Any]:
    """Return the elements of raw contents as values of JSON; of FP16 and BF16, as floats."""
    if datatype == "BYTES":
        found, at = [], 0
        while at < len(raw):
            (length,) = struct.unpack_from("<I", raw, at)
            found.append(raw[at + 4 : at + 4 + length].decode("utf-8", "replace"))
            at += 4 + length
        return found
    width = WIDTHS[datatype][1]
    if datatype == "BF16":
        return [struct.unpack("<f", b"\0\0" + raw[at : at + 2])[0] for at in range(0, len(raw), 2)]
    letter = {"BOOL": "?", "FP16": "e", "FP32": "f", "FP64": "d"}.get(datatype) or {1: "b", 2: "h", 4: "i", 8: "q"}[width]
    return list(struct.unpack(f"<{len(raw) // width}{letter.upper() if datatype.startswith('U') else letter}", raw))


def same_values(first: list[Any], second: list[Any]) -> bool:
    """Return whether values are equal; floats as far as their text in JSON may differ."""
    return len(first) == len(second) and all(
        math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5) if isinstance(a, float) or isinstance(b, float) else a == b  # True is 1
        for a, b in zip(first, second, strict=True)
    )
