"""Whether a device takes what the converter writes, and whether float nodes on the CPU are warned of; see scenes.py.

Converted models are opened with the optimizations that a server uses. `on_the_cpu` names the float nodes that the runtime left
to the CPU; the server's warning at load must name as many, and the converter's prediction must name each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import HalfName, TargetDevice
from halfserve.export.onnx_files.proto_graphs import typed_graphs
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.placement.cuda_kernels import predict_cuda
from halfserve.serve.backends.onnx_runtime.cuda_errors import floats_on_cpu
from halfserve.serve.backends.onnx_runtime.session import RECORD_ENTRY
from halfserve.serve.engine.backend import DevicePlacement
from tests.export.conversions.cases import cases
from tests.export.onnx_fp16.models import normal
from tests.export.stored_models import parse
from tests.serve.backends.support import load_backend
from tests.serve.cuda_emulator.placement_scenes import OPSETS, PROVIDERS, opsets_of, single_nodes, with_type

Precision: TypeAlias = Literal["float32", "float16", "bfloat16"]
HALVES: tuple[HalfName, ...] = ("float16", "bfloat16")
TARGETS: tuple[TargetDevice, ...] = ("any", "cuda")
FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
READ_NO_NUMBERS = frozenset({"Shape", "Size"})
SIZES = "[n,4,8,8]"
MOST, FEWEST = 2, 500  # models of one operator; models of one operator in all

# Operators by ONNX's names, applied to x [n, 4, 8, 8] as it is.
PLAIN = (
    "Relu Sigmoid Tanh Elu Selu Softplus Softsign LeakyRelu HardSigmoid HardSwish Abs Neg Exp Log Sqrt Reciprocal Floor Ceil "
    "Round Sign Erf Sin Cos Softmax LogSoftmax GlobalAveragePool GlobalMaxPool Flatten Identity"
)
BY_A_NUMBER = "Add Sub Mul Div Pow Max Min Sum Mean PRelu"
OPERATORS = {
    **{name: f"y = {name} (x)" for name in PLAIN.split()},
    **{name: f"y = {name} (x, v)" for name in BY_A_NUMBER.split()},
    **{name: f"y = {name} <keepdims = 1, axes = [2, 3]> (x)" for name in ("ReduceMax", "ReduceMin", "ReduceMean")},
    "ReduceSum": "y = ReduceSum (x, axes)",
    "Clip": "y = Clip (x, low, high)",
    "MatMul": "y = MatMul (x, square)",
    "Gemm": "f = Flatten (x) y = Gemm (f, wide)",
    "Conv": "y = Conv <pads = [1, 1, 1, 1]> (x, w)",
    "ConvTranspose": "y = ConvTranspose (x, w)",
    "MaxPool": "y = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x)",
    "AveragePool": "y = AveragePool <kernel_shape = [2, 2]> (x)",
    "BatchNormalization": "y = BatchNormalization (x, ones, ones, ones, ones)",
    "InstanceNormalization": "y = InstanceNormalization (x, ones, ones)",
    "LayerNormalization": "y = LayerNormalization (x, scale, scale)",
    "Pad": "y = Pad (x, pads)",
    "Resize": 'y = Resize <mode = "nearest"> (x, , factors)',
    "DepthToSpace": "y = DepthToSpace <blocksize = 2> (x)",
    "SpaceToDepth": "y = SpaceToDepth <blocksize = 2> (x)",
    "Where": "c = Greater (x, v) y = Where (c, x, v)",
    "Concat": "y = Concat <axis = 1> (x, x)",
    "Transpose": "y = Transpose <perm = [0, 2, 3, 1]> (x)",
}
TO_CLASSES = "j = GlobalAveragePool (i) k = Flatten (j) y = Gemm (k, classes)"
NETWORKS = {
    "ResNet": f"""a = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (x, w) b = Relu (a)
        c = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (b)
        d = Conv <pads = [1, 1, 1, 1]> (c, w) e = Relu (d) f = Add (e, c) i = Relu (f) {TO_CLASSES}""",
    "MobileNet": f"""a = Conv <pads = [1, 1, 1, 1]> (x, w) b = Clip (a, low, high)
        c = Conv <group = 4, pads = [1, 1, 1, 1]> (b, each) d = Clip (c, low, high) i = Conv (d, point) {TO_CLASSES}""",
    "YOLO": """a = Conv <pads = [1, 1, 1, 1]> (x, w) s = Sigmoid (a) b = Mul (a, s) c = LeakyRelu <alpha = 0.1> (b)
        p = MaxPool <kernel_shape = [5, 5], pads = [2, 2, 2, 2]> (c)
        q = MaxPool <kernel_shape = [5, 5], pads = [2, 2, 2, 2]> (p) r = Add (p, q) t = Conv <strides = [2, 2]> (r, point)
        u = Resize <mode = "nearest"> (t, , factors) y = Conv (u, point)""",
    "U-Net": """a = Conv <pads = [1, 1, 1, 1]> (x, w) b = Relu (a) c = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
        d = Conv <pads = [1, 1, 1, 1]> (c, w) e = Relu (d) f = ConvTranspose <strides = [2, 2]> (e, even)
        h = Concat <axis = 1> (b, f) g, m = Split <axis = 1> (h) y = Add (g, m)""",
    "BERT": """q = MatMul (x, square) k = MatMul (x, square) t = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, t)
        m = Mul (s, v) p = Softmax <axis = -1> (m) a = MatMul (p, x) r = Add (a, x) n = LayerNormalization (r, scale, scale)
        h = MatMul (n, square) e = Erf (h) o = Mul (h, e) u = Add (o, n) y = LayerNormalization (u, scale, scale)""",
}
WEIGHTS: dict[str, Any] = {
    "v": np.array(0.5),
    "low": np.array(0.0),
    "high": np.array(6.0),
    "ones": np.ones(4),
    "scale": np.ones(8),
    "axes": np.array([2, 3]),
    "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "factors": np.array([1.0, 1, 2, 2]),
    "square": normal(8, 8) / 3,
    "wide": normal(256, 3) / 16,
    "classes": normal(4, 3) / 2,
    "w": normal(4, 4, 3, 3) / 6,
    "each": normal(4, 1, 3, 3) / 3,
    "point": normal(4, 4, 1, 1) / 2,
    "even": normal(4, 4, 2, 2) / 2,
}


def made_of(nodes: str) -> onnx.ModelProto:
    """A float32 model of opset 17 over x [n, 4, 8, 8]."""
    words = set(nodes.replace(",", " ").replace("(", " ").replace(")", " ").split())
    shape = "float[a,b]" if "Flatten" in nodes else "float[a,b,c,d]"
    text = f"g (float{SIZES} x) => ({shape} y) {{ {nodes} }}"
    return parse(text, opset=17, ir=8, **{name: array for name, array in WEIGHTS.items() if name in words})


def quiet() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(*RECORD_ENTRY)
    return options


def opened(model: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(model.SerializeToString(), quiet(), providers=PROVIDERS)


def is_taken(model: onnx.ModelProto) -> bool:
    try:
        opened(model)
    except Exception:  # noqa: BLE001  (the runtime's exceptions have no common class of their own)
        return False
    return True


def on_the_cpu(session: ort.InferenceSession, model: onnx.ModelProto) -> set[str]:
    """The names of the float nodes that the runtime left to the CPU."""
    parts = session.get_provider_graph_assignment_info()
    names = {node.name for part in parts if part.ep_name == PROVIDERS[1] for node in part.get_nodes()}
    return {
        node.name
        for graph, types in typed_graphs(model)
        for node in graph.node
        if node.name in names - {""}
        and node.op_type not in READ_NO_NUMBERS
        and any(types.get(value) in FLOATS for value in (*node.input, *node.output))
    }


def found_wrong(model: onnx.ModelProto, folder: Path) -> str | None:
    """What is wrong with a model on the device: it is refused, or a float node is on the CPU without a warning."""
    try:
        session = opened(model)
    except Exception as error:  # noqa: BLE001  (the runtime's exceptions have no common class of their own)
        return f"refused: {str(error)[-90:]}"
    nodes = on_the_cpu(session, model)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    text = floats_on_cpu(session, path)
    if (text is None) != (not nodes) or (text is not None and f"no kernel for {len(nodes)} of its nodes" not in text):
        return f"{nodes} on the CPU, at load: {text}"
    missed = nodes - {warning.node for warning in predict_cuda(model)}
    return f"{missed} on the CPU, not predicted" if missed else None


def converted(model: onnx.ModelProto, precision: Precision, target_device: TargetDevice) -> onnx.ModelProto | None:
    """The model in a type; None where nothing can be converted."""
    if precision == "float32":
        return model
    try:
        return convert_float_to_float16(model, dtype=precision, upgrade_opset=True, target_device=target_device)
    except ExportError:
        return None


@pytest.mark.parametrize("target_device", TARGETS)
@pytest.mark.parametrize("dtype", HALVES)
def test_operators_and_networks_are_taken_in_half_precision(
    dtype: HalfName, target_device: TargetDevice, tmp_path: Path
) -> None:
    sources = {name: made_of(nodes) for name, nodes in (OPERATORS | NETWORKS).items()}
    made = {
        name: convert_float_to_float16(m, dtype=dtype, upgrade_opset=True, target_device=target_device)
        for name, m in sources.items()
    }
    assert len(made) == 65
    assert {name: text for name, model in made.items() if (text := found_wrong(model, tmp_path))} == {}
    assert not any(on_the_cpu(opened(made[name]), made[name]) for name in NETWORKS)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("target_device", TARGETS)
@pytest.mark.parametrize("precision", ["float32", *HALVES])
def test_the_model_zoo_is_taken(precision: Precision, target_device: TargetDevice, tmp_path: Path) -> None:
    found = {}
    for case in cases("light"):
        model = converted(onnx.load_from_string(case.model), precision, target_device)
        assert model is not None
        found[case.name] = found_wrong(model, tmp_path)
    assert len(found) >= 8
    assert set(found.values()) == {None}, found


def operators_in(precision: Precision) -> Iterator[tuple[str, onnx.ModelProto]]:
    """One operator each, at each opset at which it changes, converted; those that the runtime takes in float32."""
    seen = Counter[str]()
    for model in single_nodes():
        op_type = model.graph.node[0].op_type
        seen[op_type] += 1
        for opset in opsets_of(op_type) if seen[op_type] <= MOST else ():
            source = with_type(model, opset, TensorProto.FLOAT)
            made = converted(source, precision, "any") if is_taken(source) else None
            if made is not None:
                yield f"{op_type} of opset {opset}", made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["float32", *HALVES])
def test_float_operators_are_taken_at_every_opset(precision: Precision, tmp_path: Path) -> None:
    assert {13, 25} <= {*OPSETS}
    found = [(name, found_wrong(model, tmp_path)) for name, model in operators_in(precision)]
    assert len(found) > FEWEST
    wrong = sorted({(name, text) for name, text in found if text})
    assert [entry for entry in wrong if not entry[0].startswith("CastLike ")] == []


def test_float_nodes_on_the_cpu_are_named_at_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = "a = Relu (x) b = Tan (a) c = Atan (b) s = Shape (c) d = Reshape (c, s) e = Tan (d) y = Tan (e)"
    (tmp_path / "tan.onnx").write_bytes(made_of(nodes).SerializeToString())
    load_backend(tmp_path / "tan.onnx", DevicePlacement())
    (record,) = caplog.records
    assert "tan.onnx: CUDA has no kernel for 4 of its nodes, which run on the CPU" in record.message
    assert ": Tan 'b', Atan 'c', Tan 'e' and 1 more; convert the float32 model again" in record.message


@pytest.mark.parametrize(("target_device", "fused", "casts"), [("any", 0, 6), ("cuda", 1, 2)])
def test_a_residual_norm_in_bfloat16_is_fused_for_cuda(
    target_device: TargetDevice, fused: int, casts: int, tmp_path: Path
) -> None:
    nodes = """a = MatMul (x, square) p = Softmax (a) b = MatMul (p, square) r = Add (b, a)
        n = LayerNormalization (r, scale, scale) y = MatMul (n, square)"""
    text = f"g (float[n,s,8] x) => (float[n,s,8] y) {{ {nodes} }}"
    source = parse(text, opset=17, ir=8, square=WEIGHTS["square"], scale=WEIGHTS["scale"])
    made = convert_float_to_float16(source, dtype="bfloat16", target_device=target_device)
    options = quiet()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(made.SerializeToString(), options, providers=PROVIDERS)
    counts = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert (counts["SkipLayerNormalization"], counts["Cast"]) == (fused, casts)


@pytest.mark.parametrize("dtype", HALVES)
def test_attention_in_one_node_runs_on_the_device(dtype: HalfName) -> None:
    nodes = "q = Relu (x) a = Attention (q, x, x, seen) y = MatMul (a, square)"
    text = f"g (float[n,4,8,8] x, bool[n,1,8,8] seen) => (float[n,4,8,8] y) {{ {nodes} }}"
    source = parse(text, opset=23, ir=10, square=WEIGHTS["square"])
    made = convert_float_to_float16(source, dtype=dtype, target_device="cuda")
    session = opened(made)
    assert on_the_cpu(session, made) == set()
    assert predict_cuda(made) == ()
    feeds = {"x": normal(2, 4, 8, 8), "seen": np.ones((2, 1, 8, 8), np.bool_)}
    (answer,) = session.run(None, feeds)
    assert answer.shape == (2, 4, 8, 8)
