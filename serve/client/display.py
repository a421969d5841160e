"""What `halfserve infer` and `halfserve models` print: tables for people, JSON for machines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Column, Table

from serve.client.tensors import Array

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelInferResponse, ModelMetadataResponse
    from protos.model_config_pb2 import ModelConfig

PROVIDER_PARAMETER = "halfserve.provider"
SHOWN_VALUES = 8
SHOWN_ROWS = 8


def outputs_table(response: ModelInferResponse, arrays: Mapping[str, Array]) -> Table:
    """One line per output: name, datatype, shape, first values, and for [rows, classes] each row's largest class."""
    table = Table(Column("output", no_wrap=True), "datatype", "shape", "values", "argmax", box=box.SIMPLE_HEAD)
    for tensor in response.outputs:
        array = arrays[tensor.name]
        largest = _argmax(array)
        shown = "" if largest is None else _shortened(largest, SHOWN_ROWS)
        table.add_row(tensor.name, tensor.datatype, str(list(array.shape)), _values(array, tensor.datatype), shown)
    return table


def outputs_json(response: ModelInferResponse, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The whole answer: {"model", "version", "outputs": {name: {"datatype", "shape", "data"[, "argmax"]}}}.

    Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON; bytes that are not UTF-8
    have their odd bytes escaped.
    """
    outputs: dict[str, Any] = {}
    for tensor in response.outputs:
        array = arrays[tensor.name]
        outputs[tensor.name] = {
            "datatype": tensor.datatype,
            "shape": list(array.shape),
            "data": _plain(_as_float32(array, tensor.datatype).tolist()),
        }
        largest = _argmax(array)
        if largest is not None:
            outputs[tensor.name]["argmax"] = largest
    return {"model": response.model_name, "version": response.model_version, "outputs": outputs}


def models_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """One line per model version, from the rows of `halfserve models --json`."""
    table = Table(Column("model", no_wrap=True), "version", "state", box=box.SIMPLE_HEAD)
    for heading in ("inputs", "outputs"):
        table.add_column(heading, overflow="fold")
    table.add_column("provider", no_wrap=True)
    for row in rows:
        state = row["state"] + (f" ({row['reason']})" if row["reason"] else "")
        tensors = (
            "\n".join(f"{t['name']} {t['datatype']}{_compact(t['shape'])}" for t in row[key]) for key in ("inputs", "outputs")
        )
        table.add_row(row["name"], row["version"], state, *tensors, row["provider"] or row["platform"])
    return table


def tensors_json(tensors: Iterable[ModelMetadataResponse.TensorMetadata]) -> list[dict[str, Any]]:
    """[{"name", "datatype", "shape"}] of a model's inputs or outputs."""
    return [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors]


def provider_of(config: ModelConfig) -> str | None:
    """What the server computes a model with, such as "CUDAExecutionProvider"; None if it does not say."""
    return config.parameters[PROVIDER_PARAMETER].string_value if PROVIDER_PARAMETER in config.parameters else None


def _compact(shape: Iterable[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _argmax(array: Array) -> list[int] | None:
    if array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind not in "fiu":
        return None
    return [int(i) for i in array.argmax(axis=1)]


def _values(array: Array, datatype: str) -> str:
    flat = _as_float32(array, datatype).ravel()[: SHOWN_VALUES + 1].tolist()
    return _shortened([f"{v:.4g}" if isinstance(v, float) else _text(v) for v in flat], SHOWN_VALUES)


def _shortened(values: list[Any], limit: int) -> str:
    return " ".join(map(str, values[:limit])) + (" ..." if len(values) > limit else "")


def _as_float32(array: Array, datatype: str) -> Array:
    """BF16 arrives as bit patterns: the upper halves of float32's."""
    return (array.astype(np.uint32) << 16).view(np.float32) if datatype == "BF16" else array


def _text(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return _text(value) if isinstance(value, bytes) else value
