"""What every failure class is tried with: conversions that should fail, and ours, which must not."""

from __future__ import annotations

import copy
import importlib
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest
from numpy.typing import ArrayLike

from benchmarks.converters.cases import Value
from benchmarks.converters.closeness import difference
from benchmarks.converters.io_types import wrong_io_type
from benchmarks.converters.runtime import Session, rounded
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.verification.simulation import round_every_node

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


@dataclass(frozen=True, kw_only=True)
class Converter:
    """A conversion, and whether it should survive."""

    convert: Convert
    survives: bool

    def try_on(self, model: onnx.ModelProto, *feeds: Feeds) -> None:
        """Convert and judge; fails the test when the outcome is not the one expected of this converter.

        The float32 model itself must be clean and answer every input.
        """
        named(model)
        onnx.checker.check_model(model, full_check=True)
        answers = references(model, feeds)
        try:
            problem = judged(model, self.convert(model), feeds, answers)
        except Exception as error:
            if self.survives:
                raise
            problem = str(error)
        if self.survives:
            assert problem is None, problem
        else:
            assert problem is not None, "the naive conversion survives: the case shows nothing"


OURS = Converter(convert=ours, survives=True)
NAIVE = Converter(convert=naive, survives=False)
NAIVE_ALL = Converter(convert=naive_all, survives=False)
both = pytest.mark.parametrize("converter", [pytest.param(NAIVE, id="naive-fails"), pytest.param(OURS, id="ours-passes")])
both_all = pytest.mark.parametrize(
    "converter", [pytest.param(NAIVE_ALL, id="naive-fails"), pytest.param(OURS, id="ours-passes")]
)


def references(model: onnx.ModelProto, feeds: tuple[Feeds, ...]) -> list[list[list[Value]]]:
    """For each feed, for each output, float32's answers to it and to it rounded to float16."""
    session = Session(model.SerializeToString())
    runs = [(session.run(dict(feed)), session.run({k: rounded(v) for k, v in feed.items()})) for feed in feeds]
    return [[list(pair) for pair in zip(plain, coarse, strict=True)] for plain, coarse in runs]


def judged(
    model: onnx.ModelProto, converted: onnx.ModelProto, feeds: tuple[Feeds, ...], answers: list[list[list[Value]]]
) -> str | None:
    """What is wrong with a conversion: checker, types, the runtime's answers, and those of a machine that rounds every node."""
    onnx.checker.check_model(converted, full_check=True)
    if (wrong := wrong_io_type(model, converted, keep_io=True)) is not None:
        return wrong
    simulation = round_every_node(converted).SerializeToString()
    for what, session in (
        ("runtime", Session(converted.SerializeToString())),
        ("rounded", Session(simulation, "ORT_DISABLE_ALL")),
    ):
        for feed, outputs in zip(feeds, answers, strict=True):
            for i, (answer, right) in enumerate(zip(session.run(dict(feed)), outputs, strict=True)):
                if (text := difference(answer, right)) is not None:
                    return f"{what}, output {i}: {text}"
    return None


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
