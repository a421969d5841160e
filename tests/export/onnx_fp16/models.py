"""Small models as text, converted and judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import onnx
import onnx_ir
from numpy.typing import ArrayLike

from halfserve.export.conversion_settings import ConversionKeywords, ConversionSettings
from halfserve.export.onnx_fp16.conversion_report import ConversionReport
from halfserve.export.onnx_fp16.convert import convert
from tests.export.conversions.cases import Case
from tests.export.conversions.judge import Verdict, judge
from tests.export.conversions.runtime import Session

FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
CLEAN = Verdict(ok=True)


def halve(model: onnx.ModelProto, **options: Unpack[ConversionKeywords]) -> tuple[onnx.ModelProto, ConversionReport]:
    """Convert, by default without repairs, which are tested elsewhere."""
    source = onnx.ModelProto()
    source.CopyFrom(model)
    done = convert(onnx_ir.from_proto(source), replace(ConversionSettings(repair=False), **options))
    return onnx_ir.to_proto(done.model), done.report


def judged(model: onnx.ModelProto, feeds: Mapping[str, Any], *, keep: bool = True, **settings: Any) -> onnx.ModelProto:
    """Convert, and fail the test unless the result is clean: checked, loaded, of the right types, close to float32."""
    converted, _ = halve(model, keep_io_types=keep, **settings)
    case = Case(kind="own", name="own", model=model.SerializeToString(), inputs=(dict(feeds),))
    assert judge(case, converted.SerializeToString(), keep) == CLEAN, onnx.printer.to_text(converted)
    return converted


def assert_clean_both_ways(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> onnx.ModelProto:
    """Convert with and without keeping the types of inputs and outputs; both must be clean.

    Returns:
        The one that keeps them.
    """
    judged(model, feeds, keep=False)
    return judged(model, feeds, keep=True)


def run(model: onnx.ModelProto, **feeds: ArrayLike) -> list[Any]:
    """The outputs, by ONNX Runtime on the CPU."""
    return Session(model.SerializeToString()).run({name: np.asarray(value) for name, value in feeds.items()})


def ops(model: onnx.ModelProto) -> list[str]:
    """Operators of the main graph, in order."""
    return [node.op_type for node in model.graph.node]


def types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types by name: of inputs, outputs, initializers and everything between."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    known = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output, *graph.value_info)}
    return known | {tensor.name: tensor.data_type for tensor in graph.initializer}


def reasons(report: ConversionReport) -> dict[str, str]:
    """Why nodes were kept, by name."""
    return {node.name: node.reason for node in report.kept}


def normal(*shape: int, scale: float = 1.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Normally distributed numbers, the same ones each time."""
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32)
