"""Output of `halfserve infer` and `halfserve models`: tables for people, JSON for machines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from halfserve.protos.datatypes import DATATYPES
from halfserve.protos.inference_pb2 import ModelMetadataResponse
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.client.array_conversion import Array
from halfserve.serve.client.infer_messages import InferAnswer, Parameter

# A terminal would execute them: overwrite its contents, rename its window, type an answer.
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
PROVIDER_PARAMETER = "halfserve.provider"
PRECISION_PARAMETER = "halfserve.precision"
MEASURED_PARAMETER = "halfserve.measured"
STEPS_PARAMETER = "halfserve.steps"
SHOWN_VALUES = 8
SHOWN_ROWS = 8


def printable(text: str) -> str:
    """Escape the control characters of a text."""
    return text.translate(CONTROLS)


class PipedConsole(Console):
    """Console for texts from servers; its output may be a closed pipe.

    Names and values are printed literally: rich would read "[/INST]" as markup and ":fire:" as an emoji. Control characters
    are escaped. `print` raises BrokenPipeError, where rich would end the program with code 1.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a text; rich calls this for each one that it prints, table cells included."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Re-raise the error; called by rich while it handles BrokenPipeError."""
        raise  # noqa: PLE0704  (the error that is being handled)


def outputs_table(answer: InferAnswer) -> Table:
    """Return one line per output: name, datatype, shape, first values, and for [rows, classes] each row's largest class."""
    table = Table(Column("output", no_wrap=True), "datatype", "shape", "values", "argmax", box=box.SIMPLE_HEAD)
    for name, array in answer.outputs.items():
        largest = _argmax(array)
        shown = "" if largest is None else _shortened(largest, SHOWN_ROWS)
        table.add_row(name, datatype_of(array), str(list(array.shape)), _values(array), shown)
    return table


def answer_json(answer: InferAnswer) -> dict[str, Any]:
    """Return the whole answer: {"model", "version", "outputs": {name: {"datatype", "shape", "data"[, "argmax"]}}[,
    "parameters"]}.

    Numbers that JSON lacks become the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON; in bytes that are not
    UTF-8, invalid bytes are escaped.
    """
    shown: dict[str, Any] = {"model": answer.model, "version": answer.version, "outputs": outputs_json(answer.outputs)}
    return shown | parameters_json(answer.parameters)


def parameters_json(parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return {"parameters": {name: value}}; empty for a response without parameters."""
    return {"parameters": {name: _plain(value) for name, value in parameters.items()}} if parameters else {}


def outputs_json(outputs: Mapping[str, Array]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, array in outputs.items():
        data = _plain(_as_float32(array).tolist())
        shown[name] = {"datatype": datatype_of(array), "shape": list(array.shape), "data": data}
        largest = _argmax(array)
        if largest is not None:
            shown[name]["argmax"] = largest
    return shown


def datatype_of(array: Array) -> str:
    """Return the wire's name for the dtype of an output."""
    return next(row.wire for row in DATATYPES if row.array_dtype == array.dtype)


def models_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Return a row per model version, from the rows of `halfserve models --json`. What was measured at the load, and the steps
    of an ensemble in full, are in that JSON alone.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("model", overflow="fold")
    table.add_column("version", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("computed", overflow="fold", max_width=24)
    table.add_column("inputs -> outputs", overflow="fold")
    for row in rows:
        lines = [row["reason"]] if row["reason"] else []
        for arrow, key in (("", "inputs"), ("-> ", "outputs")):
            lines += [f"{arrow}{t['name']} {t['datatype']}[{','.join(map(str, t['shape']))}]" for t in row[key]]
        steps = [line.split("  ")[0] for line in row.get("steps", ())]
        lines += [f"steps: {', '.join(steps)}"] if steps else []
        computes = (row["provider"] or row["platform"]).removesuffix("ExecutionProvider")
        precision = f"{computes}: {row['precision']}" if row.get("precision") else computes
        table.add_row(row["name"], row["version"], row["state"], precision, "\n".join(lines))
    return table


def short_names(table: Table, names: Iterable[str], longest: int, noun: str, known: Iterable[str] = ()) -> dict[str, str]:
    """Return the form of each name in a table: names over `longest` characters become numbers, which the caption explains.

    `known` are the names of an earlier table, whose numbers hold in this one too.
    """
    numbered = {name: f"{noun} {number}" for number, name in enumerate(dict.fromkeys((*known, *names)), 1)}
    shown = {name: name if len(name) <= longest else numbered[name] for name in dict.fromkeys(names)}
    table.caption = "\n".join(f"{short}: {printable(name)}" for name, short in shown.items() if short != name) or None
    table.caption_justify = "left"
    return shown


def tensors_json(tensors: Iterable[ModelMetadataResponse.TensorMetadata]) -> list[dict[str, Any]]:
    return [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in tensors]


def provider_of(config: ModelConfig) -> str | None:
    """Return the execution provider of a model, such as "CUDAExecutionProvider"; None if the server does not say."""
    return config.parameters[PROVIDER_PARAMETER].string_value if PROVIDER_PARAMETER in config.parameters else None


def computation_of(config: ModelConfig) -> dict[str, str]:
    """Precision of a model's computation, and the measured speed of each precision that was tried, if the server says so."""
    keys = {"precision": PRECISION_PARAMETER, "measured": MEASURED_PARAMETER}
    return {name: config.parameters[key].string_value for name, key in keys.items() if key in config.parameters}


def steps_of(config: ModelConfig) -> list[str]:
    """Return one line per step of an ensemble: model, provider and precision; empty for other models."""
    return config.parameters[STEPS_PARAMETER].string_value.splitlines() if STEPS_PARAMETER in config.parameters else []


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
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _text(value: Any) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return _text(value) if isinstance(value, bytes) else value
