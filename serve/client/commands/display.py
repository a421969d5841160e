"""What `halfserve infer` and `halfserve models` print: tables for people, JSON for machines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Column, Table

from protos.datatypes import DATATYPES
from serve.client.values.answer import InferAnswer
from serve.client.values.tensors import Array

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelMetadataResponse
    from protos.model_config_pb2 import ModelConfig

PROVIDER_PARAMETER = "halfserve.provider"
SHOWN_VALUES = 8
SHOWN_ROWS = 8


def outputs_table(answer: InferAnswer) -> Table:
    """One line per output: name, datatype, shape, first values, and for [rows, classes] each row's largest class."""
    table = Table(Column("output", no_wrap=True), "datatype", "shape", "values", "argmax", box=box.SIMPLE_HEAD)
    for name, array in answer.outputs.items():
        largest = _argmax(array)
        shown = "" if largest is None else _shortened(largest, SHOWN_ROWS)
        table.add_row(name, datatype_of(array), str(list(array.shape)), _values(array), shown)
    return table


def answer_json(answer: InferAnswer) -> dict[str, Any]:
    """The whole answer: {"model", "version", "outputs": {name: {"datatype", "shape", "data"[, "argmax"]}}[, "parameters"]}.

    Numbers that JSON lacks are the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON; bytes that are not UTF-8
    have their odd bytes escaped.
    """
    shown: dict[str, Any] = {"model": answer.model, "version": answer.version, "outputs": outputs_json(answer.outputs)}
    parameters = {name: _plain(value) for name, value in answer.parameters.items()}
    return shown | ({"parameters": parameters} if parameters else {})


def outputs_json(outputs: Mapping[str, Array]) -> dict[str, Any]:
    """{name: {"datatype", "shape", "data"[, "argmax"]}}; see `answer_json`."""
    shown: dict[str, Any] = {}
    for name, array in outputs.items():
        data = _plain(_as_float32(array).tolist())
        shown[name] = {"datatype": datatype_of(array), "shape": list(array.shape), "data": data}
        largest = _argmax(array)
        if largest is not None:
            shown[name]["argmax"] = largest
    return shown


def datatype_of(array: Array) -> str:
    """The wire's name for what an output's elements are."""
    return next(row.wire for row in DATATYPES if row.array_dtype == array.dtype)


def models_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """One line per model version, from the rows of `halfserve models --json`."""
    table = Table(Column("model", no_wrap=True), "version", Column("state", overflow="fold"), box=box.SIMPLE_HEAD)
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
    numbers = _as_float32(array)
    if numbers.ndim != 2 or numbers.shape[1] < 2 or numbers.dtype.kind not in "fiu":
        return None
    return [int(i) for i in numbers.argmax(axis=1)]


def _values(array: Array) -> str:
    flat = _as_float32(array).ravel()[: SHOWN_VALUES + 1].tolist()
    return _shortened([f"{v:.4g}" if isinstance(v, float) else _text(v) for v in flat], SHOWN_VALUES)


def _shortened(values: list[Any], limit: int) -> str:
    return " ".join(map(str, values[:limit])) + (" ..." if len(values) > limit else "")


def _as_float32(array: Array) -> Array:
    """BF16 in a dtype that numpy itself has."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _text(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return _text(value) if isinstance(value, bytes) else value
