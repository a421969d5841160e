"""Tells what OpenVINO may compute here: half precisions of the processor, and ONNX models. OpenVINO need not be installed.

x86 has bf16 since AVX512-BF16 (Zen 4, Cooper Lake) and AMX (Sapphire Rapids), fp16 since AVX512-FP16 (Sapphire Rapids); the
latter is only as fast as float32, AMX-FP16 (Granite Rapids) is faster. Arm has both from Neoverse V1 on.

The operators are the ones whose node tests of ONNX OpenVINO 2026.4.1 answers with other values than the standard demands.
tests/serve/backends/test_openvino_operators.py runs these tests again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

from onnx import ModelProto, NodeProto, TensorProto

from halfserve.files.onnx_tensors import all_tensors
from halfserve.serve.backends.onnx_runtime.onnx_file import nodes_below
from halfserve.serve.backends.onnx_runtime.onnx_interface import STANDARD, is_open_ended

CPUINFO = Path("/proc/cpuinfo")
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})
FAST_FP16_FLAGS = frozenset({"amx_fp16", "asimdhp"})
# Values of ONEDNN_MAX_CPU_ISA, which OpenVINO obeys, that leave out the arithmetic of a type.
ISAS_WITHOUT_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"})
ISAS_WITHOUT_FP16 = ISAS_WITHOUT_BF16 | {"AVX512_CORE_BF16"}


def computed_halves() -> frozenset[str]:
    """Return the types among "bf16" and "fp16" in which this processor has arithmetic."""
    return _halves(FP16_FLAGS)


def fast_halves() -> frozenset[str]:
    """Return the types among "bf16" and "fp16" that this processor computes faster than float32."""
    return _halves(FAST_FP16_FLAGS)


@cache
def processor_name() -> str:
    """Return the processor's model, as the system names it; "" if it does not."""
    with contextlib.suppress(OSError), CPUINFO.open(encoding="utf-8", errors="replace") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))), "")
    return ""


def _halves(fp16: frozenset[str]) -> frozenset[str]:
    flags, isa = processor_flags(), os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    halves = (("bf16", BF16_FLAGS, ISAS_WITHOUT_BF16), ("fp16", fp16, ISAS_WITHOUT_FP16))
    return frozenset(name for name, known, without in halves if flags & known and isa not in without)


@cache
def processor_flags() -> frozenset[str]:
    """Return the names by which the system lists the processor's instructions; none where it lists none."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, "").split())


# Operators that OpenVINO computes differently in at least one case: windows and empty masks of attention; batches first in
# recurrent layers; rounded sizes and antialiasing in Resize; equal values in TopK; shifts of negative numbers; the rounding of
# halves in quantization. Operators that it refuses need not be listed.
WRONG = frozenset(
    {
        *("Attention", "BitShift", "DFT", "DynamicQuantizeLinear", "GRU", "LSTM", "NonMaxSuppression", "QuantizeLinear", "RNN"),
        *("Resize", "RoiAlign", "SpaceToDepth", "TopK"),
    }
)
# Operators whose result for only infinities is wrong. Integers have no infinities, so that masks of transformers are computed
# right: PyTorch's `any` is exported as a maximum of integers.
WRONG_OF_INFINITIES = frozenset({"ReduceMax", "ReduceMin"})
INTEGERS = frozenset({TensorProto.INT32, TensorProto.INT64})
# Operators without a right answer to compare with.
RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
# OpenVINO computes float64 in float32, and texts end its process.
UNFIT_TYPES: dict[int, str] = {TensorProto.DOUBLE: "float64", TensorProto.STRING: "text"}
# Reductions whose attribute `axes` (opsets 13 to 17) OpenVINO 2026.4.1 does not read: it reduces over every axis.
AXES_UNREAD = frozenset({"ReduceL1", "ReduceLogSum", "ReduceLogSumExp"})


def why_unfit(model: ModelProto) -> str | None:
    """Return why a model is left to ONNX Runtime; None if OpenVINO may compute it. Weights may be left out of the model."""
    own = {(function.domain, function.name) for function in model.functions}
    for scope in (model.graph.node, *(function.node for function in model.functions)):
        nodes = list(nodes_below(scope))
        integers = {node.output[0] for node in nodes if _makes_integers(node)}
        for node in nodes:
            if (node.domain, node.op_type) not in own and _is_unfit(node, integers):
                return f"OpenVINO does not compute its operator {node.op_type} as ONNX defines it"
    values = [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)]
    for number in (*values, *(tensor.data_type for tensor in all_tensors(model))):
        if number in UNFIT_TYPES:
            return f"OpenVINO does not compute in {UNFIT_TYPES[number]}, which it uses"
    if is_open_ended(model):
        return "sizes in it depend on values, which OpenVINO does not check"
    return None


def _makes_integers(node: NodeProto) -> bool:
    return node.op_type == "Cast" and any(attribute.name == "to" and attribute.i in INTEGERS for attribute in node.attribute)


def _is_unfit(node: NodeProto, integers: AbstractSet[str]) -> bool:
    if node.op_type in WRONG_OF_INFINITIES:
        return node.input[0] not in integers
    if node.op_type == "MaxPool":  # OpenVINO counts a last window that lies in the padding
        return any(attribute.name == "ceil_mode" and attribute.i for attribute in node.attribute)
    if node.op_type in AXES_UNREAD and any(attribute.name == "axes" for attribute in node.attribute):
        return True
    return node.op_type in WRONG | RANDOM or node.domain not in STANDARD
