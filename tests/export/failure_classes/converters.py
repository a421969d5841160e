"""What every failure class is tried with: conversions that should fail, and ours, which must not."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest
from numpy.typing import ArrayLike

from halfserve.export.half_types import BF16, FP16, HalfType
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.verification.simulation import round_every_node
from halfserve.serve.backends.openvino.fitness import computed_halves, why_unfit
from halfserve.serve.engine.backend import CpuPrecision
from halfserve.serve.engine.errors import ModelLoadError
from tests.export.conversions.cases import Value
from tests.export.conversions.closeness import difference
from tests.export.conversions.io_types import wrong_io_type
from tests.export.conversions.runtime import Session, rounded

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


def ours(model: onnx.ModelProto) -> onnx.ModelProto:
    """This project's."""
    return convert_float_to_float16(model)


def ours_in_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """This project's, to the other half-precision type."""
    return convert_float_to_float16(model, dtype="bfloat16", upgrade_opset=True)


@dataclass(frozen=True, kw_only=True)
class Converter:
    """A conversion, and whether it should survive."""

    convert: Convert
    survives: bool
    half: HalfType = FP16

    def try_on(self, model: onnx.ModelProto, *feeds: Feeds) -> None:
        """Convert and judge; fails the test when the outcome is not the one expected of this converter.

        The float32 model itself must be clean and answer every input.
        """
        named(model)
        onnx.checker.check_model(model, full_check=True)
        answers = references(model, feeds, self.half)
        try:
            problem = judged(model, self.convert(model), feeds, answers, self.half)
        except Exception as error:
            if self.survives:
                raise
            problem = str(error)
        if self.survives:
            assert problem is None, problem
        else:
            assert problem is not None, "the naive conversion survives: the case shows nothing"


OURS = Converter(convert=ours, survives=True)
OURS_IN_BFLOAT16 = Converter(convert=ours_in_bfloat16, survives=True, half=BF16)
NAIVE = Converter(convert=naive, survives=False)
NAIVE_ALL = Converter(convert=naive_all, survives=False)
# Of tests that are about float16, or about ONNX Runtime.
both_in_float16 = pytest.mark.parametrize(
    "converter", [pytest.param(NAIVE, id="naive-fails"), pytest.param(OURS, id="ours-passes")]
)
_OURS = [pytest.param(OURS, id="ours-passes"), pytest.param(OURS_IN_BFLOAT16, id="ours-passes-in-bfloat16")]
both = pytest.mark.parametrize("converter", [pytest.param(NAIVE, id="naive-fails"), *_OURS])
both_all = pytest.mark.parametrize("converter", [pytest.param(NAIVE_ALL, id="naive-fails"), *_OURS])


def references(model: onnx.ModelProto, feeds: tuple[Feeds, ...], half: HalfType = FP16) -> list[list[list[Value]]]:
    """For each feed, for each output, float32's answers to it and to it rounded to the half type."""
    session = Session(model.SerializeToString())
    runs = [(session.run(dict(feed)), session.run({k: rounded(v, half) for k, v in feed.items()})) for feed in feeds]
    return [[list(pair) for pair in zip(plain, coarse, strict=True)] for plain, coarse in runs]


def judged(
    model: onnx.ModelProto,
    converted: onnx.ModelProto,
    feeds: tuple[Feeds, ...],
    answers: list[list[list[Value]]],
    half: HalfType = FP16,
) -> str | None:
    """What is wrong with a conversion: checker, types, the answers of a machine that rounds every node and of runtimes."""
    onnx.checker.check_model(converted, full_check=True)
    if (wrong := wrong_io_type(model, converted, keep_io=True)) is not None:
        return wrong
    for what, session in runtimes(converted, half):
        for feed, outputs in zip(feeds, answers, strict=True):
            for i, (answer, right) in enumerate(zip(session.run(dict(feed)), outputs, strict=True)):
                if (text := difference(answer, right, half)) is not None:
                    return f"{what}, output {i}: {text}"
    return None


def runtimes(converted: onnx.ModelProto, half: HalfType) -> Iterator[tuple[str, Any]]:
    """The simulation; ONNX Runtime, which has no bfloat16 on CPUs; OpenVINO, where the processor computes the half type."""
    yield "rounded", Session(round_every_node(converted, half).SerializeToString(), "ORT_DISABLE_ALL")
    if half is FP16:
        yield "runtime", Session(converted.SerializeToString())
    if half.short in computed_halves() and find_spec("openvino") and why_unfit(converted) is None:
        from benchmarks.half_device.openvino_model import OpenVinoModel  # noqa: PLC0415  (an extra)

        with contextlib.suppress(ModelLoadError):  # what OpenVINO refuses stays with ONNX Runtime
            yield "OpenVINO", OpenVinoModel(converted.SerializeToString(), CpuPrecision(half.name))


def named(model: onnx.ModelProto) -> onnx.ModelProto:
    """Name the nodes, so that no case fails for a converter's trouble with unnamed ones (that is a case of its own)."""
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"{node.op_type}_{number}"
    return model


def parse(text: str, opset: int = 17, ir: int = 8, /, **weights: ArrayLike) -> onnx.ModelProto:
    """A model from ONNX's textual syntax, of the graph alone, with these initializers added."""
    model = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]>\n{text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items())
    return model


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random normal float32 numbers."""
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)
