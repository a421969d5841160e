"""Whether `predict_cuda` says what ONNX Runtime's CUDA provider does with each operator; see scenes.py.

The models are ONNX's own tests of single nodes, at each opset at which the runtime has another version of the operator, and in
three types. A model that the runtime does not take at an opset or in a type is no model, and is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper

from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import BF16, FP16, HALF_TYPES, HalfName, TargetDevice
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.placement.cuda_kernels import WarningKind, cuda_kernels, predict_cuda
from tests.export.conversions.cases import cases
from tests.export.stored_models import parse

OPSETS = range(13, 28)  # 1.31.1 knows none after 27
MOST = 4  # models of one operator
FEWEST = 4000  # models in all types together
WITH_BODIES = frozenset({"If", "Loop", "Scan", "SequenceMap"})
PROVIDERS = ["CUDAExecutionProvider", "CPUExecutionProvider"]
NUMPY: dict[TensorProto.DataType, np.dtype[Any]] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: FP16.dtype,
    TensorProto.BFLOAT16: BF16.dtype,
}
OUTCOMES: dict[WarningKind | None, str] = {
    None: "CUDA",
    "on the CPU": "CPU",
    "no float16 kernel": "CPU",
    "broken up": "broken up",
    "refused": "refused",
}


def single_nodes() -> Iterator[onnx.ModelProto]:
    """Models of one node named "n" that reads or makes float32, a few of each operator."""
    found = Counter[str]()
    for case in cases("node"):
        model = onnx.load_from_string(case.model)
        (node, *others), graph = model.graph.node, model.graph
        floats = any(value.type.tensor_type.elem_type == TensorProto.FLOAT for value in (*graph.input, *graph.output))
        if floats and not others and not node.domain and node.op_type not in WITH_BODIES | {"Constant"}:
            found[node.op_type] += 1
            if found[node.op_type] <= MOST:
                node.name, model.ir_version = "n", 10
                yield model


def opsets_of(op_type: str) -> list[int]:
    """The opsets at which the operator changes; all of them for one that is defined by smaller operators, which change too."""
    starts = set(cuda_kernels().versions.get(op_type, ())) | {OPSETS[0]}
    schemas: list[Any] = [schema for schema in onnx.defs.get_all_schemas_with_history() if schema.name == op_type]
    changes = any(schema.has_function or schema.has_context_dependent_function for schema in schemas)
    first = min(schema.since_version for schema in schemas)
    return [opset for opset in OPSETS if opset >= first and (changes or opset in starts)]


def with_type(model: onnx.ModelProto, opset: int, elem_type: TensorProto.DataType) -> onnx.ModelProto:
    """The model at another opset, with another type in the place of float32."""
    made = onnx.ModelProto.FromString(model.SerializeToString())
    made.opset_import[0].version = opset
    for value in (*made.graph.input, *made.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = elem_type
    attributes = made.graph.node[0].attribute
    tensors = [attribute.t for attribute in attributes if attribute.HasField("t")]
    for tensor in (*made.graph.initializer, *tensors):
        if tensor.data_type == TensorProto.FLOAT:
            numbers = numpy_helper.to_array(tensor).astype(NUMPY[elem_type])
            tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
    for attribute in attributes:
        if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
            attribute.i = elem_type
    return made


def outcome(model: onnx.ModelProto) -> str | None:
    """The provider of the node, or what else becomes of it; None for what is no model."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=PROVIDERS)
    except Exception as error:  # noqa: BLE001  (the runtime's exceptions have no common class of their own)
        return "refused" if "Provider type for" in str(error) else None
    parts = session.get_provider_graph_assignment_info()
    places = [part.ep_name for part in parts for node in part.get_nodes() if node.name == "n"]
    return places[0].removesuffix("ExecutionProvider") if places else "broken up"


def mistakes(elem_types: Sequence[TensorProto.DataType]) -> tuple[list[str], int]:
    """Predictions that are wrong, and the number of all."""
    wrong, count = [], 0
    for model in single_nodes():
        op_type = model.graph.node[0].op_type
        for opset in opsets_of(op_type):
            for elem_type in elem_types:
                typed = with_type(model, opset, elem_type)
                found = outcome(typed)
                if found is None:
                    continue
                count += 1
                kinds = [warning.kind for warning in predict_cuda(typed)]
                if OUTCOMES[kinds[0] if kinds else None] != found:
                    name = TensorProto.DataType.Name(elem_type)
                    wrong.append(f"{op_type} of opset {opset} in {name}: {found}, predicted {kinds}")
    return wrong, count


@pytest.mark.timeout(400)
def test_each_operator_runs_where_the_table_says() -> None:
    wrong, count = mistakes([*NUMPY])
    assert not wrong
    assert count > FEWEST


def converted(model: onnx.ModelProto, dtype: HalfName, target_device: TargetDevice) -> onnx.ModelProto | None:
    """The model in half precision; None where nothing can be converted."""
    try:
        return convert_float_to_float16(model, dtype=dtype, upgrade_opset=True, target_device=target_device)
    except ExportError:
        return None


def refused(models: Iterator[onnx.ModelProto], dtype: HalfName, target_device: TargetDevice) -> tuple[list[str], int]:
    """The models that the runtime takes in float32 and refuses in half precision, and the number of all converted ones."""
    found, count = [], 0
    for model in models:
        half = converted(model, dtype, target_device)
        if half is not None and outcome(model) not in (None, "refused"):
            count += 1
            if outcome(half) in (None, "refused"):
                found.append(model.graph.node[0].op_type)
    return found, count


@pytest.mark.timeout(400)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_converted_operator_is_refused(dtype: HalfName) -> None:
    found, count = refused(single_nodes(), dtype, "any")
    assert set(found) <= {"CastLike"}, "the one that makes float4 from float16, for which there is no kernel"
    assert count > 300


def test_for_cpus_alone_nodes_without_a_kernel_become_bfloat16() -> None:
    found, _ = refused(single_nodes(), "bfloat16", "cpu")
    assert {"MaxPool", "GlobalMaxPool", "LeakyRelu", "ReduceMax"} <= set(found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.timeout(400)
def test_no_converted_network_is_refused(dtype: HalfName) -> None:
    networks = (onnx.load_from_string(case.model) for case in cases("light"))
    found, count = refused(networks, dtype, "any")
    assert not found
    assert count >= 8


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_silu_for_cuda_is_not_fused_to_the_kernel_that_rounds_inside(tmp_path: Path, dtype: HalfName) -> None:
    model = parse("g (float[n,4] x) => (float[n,4] y) { s = Sigmoid(x)  y = Mul(x, s) }", opset=17, ir=8)
    found: dict[TargetDevice, list[str]] = {}
    for target_device in ("any", "cuda"):
        half, options = convert_float_to_float16(model, dtype=dtype, target_device=target_device), ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        ort.InferenceSession(half.SerializeToString(), options, providers=PROVIDERS)
        nodes = onnx.load(tmp_path / "optimized.onnx").graph.node
        found[target_device] = [node.op_type for node in nodes if node.op_type != "Cast"]
    assert found == {"any": ["QuickGelu"], "cuda": ["Neg", "Exp", "Add", "Div"]}
