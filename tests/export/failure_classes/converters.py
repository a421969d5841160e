"""What every failure class is tried with: conversions that should fail, and ours, which must not."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import onnx
import onnx_ir
import pytest

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.half_types import BF16, FP16, HalfType
from halfserve.export.onnx_fp16.convert import convert, convert_float_to_float16
from halfserve.export.verification.simulation import round_every_node
from halfserve.serve.backends.openvino.fitness import computed_halves, why_unfit
from halfserve.serve.engine.backend import CpuPrecision
from halfserve.serve.engine.errors import ModelLoadError
from tests.export.conversions.cases import Value
from tests.export.conversions.closeness import difference
from tests.export.conversions.io_types import wrong_io_type
from tests.export.conversions.runtime import Session, rounded
from tests.export.stored_models import parse

float16: Any = importlib.import_module("onnxconverter_common.float16")  # it has no types
Convert: TypeAlias = Callable[[onnx.ModelProto], onnx.ModelProto]
Feeds: TypeAlias = Mapping[str, Value]


def naive(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """onnxconverter-common's conversion."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of every weight that it changes
            converted: onnx.ModelProto = float16.convert_float_to_float16(copy.deepcopy(model), keep_io_types=True, **options)
            return converted
    finally:
        logging.disable(logging.NOTSET)


def naive_all(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same without its list of operators to keep: "everything to float16"."""
    return naive(model, op_block_list=[])


def ours_in_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """This project's conversion, to the other half-precision type."""
    return convert_float_to_float16(model, dtype="bfloat16", upgrade_opset=True)


@dataclass(frozen=True, kw_only=True)
class FailureCase:
    """A model that a naive conversion breaks, and the nodes that ours keeps in float32 for it.

    Attributes:
        model: The model, in float32.
        feeds: Inputs that show the defect.
        kept: Names of the nodes that the conversion to float16 leaves in float32.
        naive: The conversion that breaks it.
        in_bfloat16: Whether the case is about bfloat16 too, and not about float16 or ONNX Runtime alone.
        named: Whether the conversions see the names of the nodes.
    """

    model: onnx.ModelProto
    feeds: tuple[Feeds, ...]
    kept: frozenset[str]
    naive: Convert
    in_bfloat16: bool
    named: bool


def case(
    text: str | onnx.ModelProto,
    *feeds: Feeds,
    kept: str = "",
    naive: Convert = naive,
    in_bfloat16: bool = True,
    named: bool = True,
    typed: bool = False,
    opset: int = 17,
    ir: int = 8,
    **weights: Any,
) -> FailureCase:
    """A case by the text of its graph; `typed` writes the types of all values down, as torch's exporter does."""
    model = parse(text, opset=opset, ir=ir, **weights) if isinstance(text, str) else text
    return FailureCase(
        model=onnx.shape_inference.infer_shapes(model) if typed else model,
        feeds=feeds,
        kept=frozenset(kept.split()),
        naive=naive,
        in_bfloat16=in_bfloat16,
        named=named,
    )


def tried(cases: Mapping[str, FailureCase]) -> pytest.MarkDecorator:
    """Parametrize a test with `check` and its case: the naive conversion fails, and ours passes in both types."""
    rows = []
    for name, one in cases.items():
        checks = {"naive-fails": naive_fails, "ours-passes": ours_passes, "ours-passes-in-bfloat16": bfloat16_passes}
        rows += [
            pytest.param(check, one, id=f"{name}: {what}")
            for what, check in checks.items()
            if one.in_bfloat16 or check is not bfloat16_passes
        ]
    return pytest.mark.parametrize(("check", "case"), rows)


def naive_fails(case: FailureCase) -> None:
    try:
        problem = _problem(case, case.naive, FP16)
    except Exception as error:  # noqa: BLE001  (any failure shows the class)
        problem = str(error)
    assert problem is not None, "the naive conversion survives: the case shows nothing"


def ours_passes(case: FailureCase) -> None:
    doubles = any(value.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE for value in case.model.graph.input)
    for keep_io in (True,) if doubles else (True, False):  # of float64, test_float64.py
        problem = _problem(case, partial(convert_float_to_float16, keep_io_types=keep_io), FP16, keep_io=keep_io)
        assert problem is None, problem
    work = onnx_ir.from_proto(onnx.ModelProto.FromString(case.model.SerializeToString()))
    assert {node.name for node in convert(work, ConversionSettings()).report.kept} == case.kept


def bfloat16_passes(case: FailureCase) -> None:
    problem = _problem(case, ours_in_bfloat16, BF16)
    assert problem is None, problem


def _problem(case: FailureCase, convert: Convert, half: HalfType, *, keep_io: bool = True) -> str | None:
    """What is wrong with a conversion: checker, types, the answers of a machine that rounds every node and of runtimes."""
    onnx.checker.check_model(case.model, full_check=True)
    answers = _references(case, half)
    given = onnx.ModelProto.FromString(case.model.SerializeToString())
    for node in () if case.named else given.graph.node:
        node.name = ""
    converted = convert(given)
    onnx.checker.check_model(converted, full_check=True)
    if (wrong := wrong_io_type(case.model, converted, keep_io=keep_io)) is not None:
        return wrong
    for what, session in _runtimes(converted, half):
        for feed, outputs in zip(case.feeds, answers, strict=True):
            for i, (answer, right) in enumerate(zip(session.run(dict(feed)), outputs, strict=True)):
                if (text := difference(answer, right, half)) is not None:
                    return f"{what}, output {i}: {text}"
    return None


def _references(case: FailureCase, half: HalfType) -> list[list[list[Value]]]:
    """For each feed, for each output, float32's answers to it and to it rounded to the half type."""
    session = Session(case.model.SerializeToString())
    runs = [(session.run(dict(feed)), session.run({k: rounded(v, half) for k, v in feed.items()})) for feed in case.feeds]
    return [[list(pair) for pair in zip(plain, coarse, strict=True)] for plain, coarse in runs]


def _runtimes(converted: onnx.ModelProto, half: HalfType) -> Iterator[tuple[str, Any]]:
    """The simulation; ONNX Runtime, which has no bfloat16 on CPUs; OpenVINO, where the processor computes the half type."""
    yield "rounded", Session(round_every_node(converted, half).SerializeToString(), "ORT_DISABLE_ALL")
    if half is FP16:
        yield "runtime", Session(converted.SerializeToString())
    if half.short in computed_halves() and find_spec("openvino") and why_unfit(converted) is None:
        from benchmarks.half_device.openvino_model import OpenVinoModel  # noqa: PLC0415  (an extra)

        with contextlib.suppress(ModelLoadError):  # what OpenVINO refuses stays with ONNX Runtime
            yield "OpenVINO", OpenVinoModel(converted.SerializeToString(), CpuPrecision(half.name))
