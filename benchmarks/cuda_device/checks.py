"""Short checks of ONNX Runtime's CUDA provider on a device; `benchmarks/gpu.sh` runs each as a step.

    python -m benchmarks.cuda_device.checks kernels|rounding|placement|shapes [--models FOLDER]

"kernels" compares products, convolutions and attention with the standard's reference; "rounding" measures activations, TF32
products and split sums; "placement" opens a bfloat16 ResNet; "shapes" times a ResNet-50 in float16 at changing numbers of rows.
Each prints what it finds, and a verdict in the last line.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import typer
from onnx import parser
from onnx.reference import ReferenceEvaluator

from benchmarks.cuda_device.networks import BF16, FP16, networks_of
from benchmarks.cuda_device.ways import Alone
from halfserve.nvidia_libraries import load_nvidia_libraries
from halfserve.serve.backends.onnx_runtime.cuda_errors import reason_of
from halfserve.serve.backends.onnx_runtime.session import nodes_by_provider
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.tensors import Array

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
TYPES: dict[str, Any] = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TOLERANCES = {"float": 2.0**-9, "float16": 2.0**-8, "bfloat16": 2.0**-5}  # relative to the largest value
IMAGES = {"a": (4, 32, 14, 14), "b": (64, 32, 3, 3)}
CONVOLUTION = "y = Conv <pads = [1, 1, 1, 1]> (a, b)"


@dataclass(frozen=True)
class Kernel:
    """A node whose values are compared with the reference."""

    kind: str  # type of its inputs
    opset: int
    body: str  # computes y from the inputs
    shapes: Mapping[str, tuple[int, ...]]  # shapes of the inputs by name
    options: Mapping[str, str] = field(default_factory=dict)  # options of the CUDA provider


KERNELS = {
    "MatMul": Kernel("float16", 17, "y = MatMul (a, b)", {"a": (64, 256), "b": (256, 64)}),
    "Conv": Kernel("float16", 17, CONVOLUTION, IMAGES),
    "Conv NHWC": Kernel("float16", 17, CONVOLUTION, IMAGES, {"prefer_nhwc": "1"}),
    "Conv bf16": Kernel("bfloat16", 22, CONVOLUTION, IMAGES),
    "Attention": Kernel(
        "float16", 23, "y = Attention <q_num_heads = 4, kv_num_heads = 4> (a, b, c)", dict.fromkeys("abc", (2, 16, 64))
    ),
}
ACTIVATIONS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "Sigmoid": ("y = Sigmoid (a)", lambda x: 1 / (1 + np.exp(-x))),
    "SiLU": ("s = Sigmoid (a) y = Mul (a, s)", lambda x: x / (1 + np.exp(-x))),
    "Mish": ("p = Softplus (a) t = Tanh (p) y = Mul (a, t)", lambda x: x * np.tanh(np.logaddexp(0, x))),
    "SiLU by Tanh": (
        *("h = Constant <value_float = 0.5> () k = CastLike (h, a) g = Mul (a, k) t = Tanh (g) u = Mul (g, t) y = Add (g, u)",),
        lambda x: x / (1 + np.exp(-x)),
    ),
}
LONG_SUM = 1 << 15  # products of 16 whose first half sums to 262,144 before the second half takes it back
GEMM_OPTIONS = "ORT_CUDA_GEMM_OPTIONS"  # 2: sums of float16 products stay in float32
CONFIGURATIONS: dict[str, tuple[dict[str, str], bool]] = {
    "plain": ({}, False),
    "graphs": ({}, True),
    "NHWC": ({"prefer_nhwc": "1"}, False),
    "use_tf32=0": ({"use_tf32": "0"}, False),
}
STEADY, CHANGING = (32, 32, 32, 32), (31, 32, 31, 32)
PASSES = 3


def model_of(kind: str, opset: int, body: str, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """Return a model of a few nodes with inputs of one type, whose value y becomes the float32 output z, as NumPy lacks
    bfloat16.
    """
    inputs = ", ".join(f"{kind}[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    text = f'<ir_version: 10, opset_import: ["" : {opset}]> m ({inputs}) => (float z) {{ {body} z = Cast <to = 1> (y) }}'
    model = parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


def on_cuda(model: onnx.ModelProto, feeds: dict[str, Array], options: Mapping[str, str] | None = None) -> Array:
    """Compute z on the device, as float64; raises the runtime's exception if a node would run on the CPU."""
    load_nvidia_libraries()
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    session = ort.InferenceSession(model.SerializeToString(), settings, providers=[(CUDA, dict(options or {}))])
    binding = session.io_binding()
    for value, array in zip(model.graph.input, feeds.values(), strict=True):
        number = value.type.tensor_type.elem_type
        binding.bind_ortvalue_input(value.name, ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, number))
    binding.bind_output("z", "cpu")
    session.run_with_iobinding(binding)
    return np.asarray(binding.get_outputs()[0].numpy(), np.float64)


def check_kernels() -> str:
    """Compare kernels with the reference in float32."""
    verdicts = []
    random = np.random.default_rng(0)
    for name, kernel in KERNELS.items():
        feeds = {key: random.standard_normal(shape).astype(TYPES[kernel.kind]) for key, shape in kernel.shapes.items()}
        reference = ReferenceEvaluator(model_of("float", kernel.opset, kernel.body, kernel.shapes))
        outputs: Any = reference.run(None, {key: array.astype(np.float32) for key, array in feeds.items()})
        exact = np.asarray(outputs[0])
        model = model_of(kernel.kind, kernel.opset, kernel.body, kernel.shapes)
        try:
            error = np.abs(on_cuda(model, feeds, kernel.options) - exact).max() / np.abs(exact).max()
        except Exception as failure:  # noqa: BLE001  (ONNX Runtime has no exception class)
            verdicts.append(f"{name} refused")
            print(f"{name}: {failure}")
            continue
        verdicts.append(f"{name} {'right' if error <= TOLERANCES[kernel.kind] else 'WRONG'} ({error:.1e})")
    return ", ".join(verdicts)


def check_rounding() -> str:
    """Measure activations in both halves, products of float32, and long sums of float16."""
    verdicts = []
    for kind in ("float16", "bfloat16"):
        x = np.unique(np.linspace(-20, 20, 100_001).astype(TYPES[kind]).astype(np.float32)).astype(TYPES[kind])
        for name, (body, function) in ACTIVATIONS.items():
            exact = function(x.astype(np.float64))
            try:
                error = np.abs(on_cuda(model_of(kind, 22, body, {"a": x.shape}), {"a": x}) - exact)
            except Exception as failure:  # noqa: BLE001  (see above)
                print(f"{name} in {kind}: {failure}")
                verdicts.append(f"{name} {kind} refused")
                continue
            once = np.abs(exact.astype(TYPES[kind]).astype(np.float64) - exact)
            below = x.astype(np.float32) < 0
            largest, negative = f"{error.max():.1e}", f"{error[below].max():.1e}"
            print(f"{name} in {kind}: error {largest} ({negative} below 0), rounded once {once[below].max():.1e} below 0")
            verdicts.append(f"{name} {kind} {negative}")
    random = np.random.default_rng(0)
    shapes = dict.fromkeys("ab", (256, 256))
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    exact = feeds["a"].astype(np.float64) @ feeds["b"].astype(np.float64)
    for value in ("1", "0"):
        found = on_cuda(model_of("float", 17, "y = MatMul (a, b)", shapes), feeds, {"use_tf32": value})
        verdicts.append(f"use_tf32={value} {np.abs(found - exact).max() / np.abs(exact).max():.1e}")
    for value in ("", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.cuda_device.checks", "sum"],
            env=os.environ | ({GEMM_OPTIONS: value} if value else {}),
            capture_output=True,
            text=True,
            check=False,
        )
        verdicts.append(f"long sum{f' with {GEMM_OPTIONS}={value}' if value else ''} {done.stdout.strip()[9:] or 'failed'}")
    return ", ".join(verdicts)


def long_sum() -> str:
    """Return the sum of products whose parts exceed float16's largest number, though the whole is 0."""
    a = np.full((1, LONG_SUM), 4, np.float16)
    b = np.full((LONG_SUM, 16), 4, np.float16)
    b[LONG_SUM // 2 :] = -4
    found = on_cuda(model_of("float16", 17, "y = MatMul (a, b)", {"a": a.shape, "b": b.shape}), {"a": a, "b": b})
    return "finite" if np.isfinite(found).all() else "INFINITE"


def check_placement(models: Path, *, tiny: bool) -> str:
    """Open the ResNet in bfloat16 as a server does, and a pooling whose newest version has no kernel on CUDA."""
    pooling = model_of("float16", 22, "y = MaxPool <kernel_shape = [2, 2]> (a)", {"a": (1, 2, 8, 8)})
    with tempfile.TemporaryDirectory() as folder:
        (network,) = networks_of(models, Path(folder), ["resnet"], tiny=tiny)
        alone = Alone(network.path(BF16), DevicePlacement(require_gpu=True))
        x = network.rows(4).astype(alone.backend.compute_dtype("x"))
        alone.backend.run({"x": x})
        for part in alone.session.get_provider_graph_assignment_info():
            if part.ep_name != CUDA:
                print(part.ep_name, sorted({node.op_type for node in part.get_nodes()}))
        path = Path(folder) / "pooling.onnx"
        onnx.save(pooling, path)
        placed = nodes_by_provider(Alone(path, DevicePlacement(require_gpu=True)).session)
        resnet = f"bfloat16 ResNet computes in {alone.backend.precision}: {nodes_by_provider(alone.session)}"
        return f"{resnet}; MaxPool of opset 22: {placed}"


def check_shapes(models: Path, *, tiny: bool) -> str:
    """Time batches of the ResNet-50 in float16, at steady and at changing numbers of rows."""
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        (network,) = networks_of(models, Path(folder), ["resnet"], tiny=tiny)
        feeds = {rows: network.feeds(FP16, rows) for rows in {*STEADY, *CHANGING}}
        for name, (options, graphs) in CONFIGURATIONS.items():
            try:
                alone = Alone(network.path(FP16), DevicePlacement(require_gpu=True), options, graphs=graphs)
                runs = {rows: alone.batch(batch) for rows, batch in feeds.items()}
                times = [_milliseconds(runs, rows) for rows in (STEADY, CHANGING)]
            except Exception as failure:  # noqa: BLE001  (see above)
                print(f"{name}: {failure}")
                verdicts.append(f"{name} failed")
                continue
            print(f"{name}: {STEADY} rows {times[0]:.2f} ms a batch, {CHANGING} rows {times[1]:.2f} ms", flush=True)
            verdicts.append(f"{name} {times[0]:.2f} ms steady, {times[1]:.2f} changing")
    return ", ".join(verdicts)


def _milliseconds(runs: dict[int, Callable[[], object]], sequence: tuple[int, ...]) -> float:
    """Median time of a batch, after one pass that makes plans and recordings."""
    taken = []
    for number in range(PASSES + 2):
        for rows in sequence:
            began = time.perf_counter()
            runs[rows]()
            if number >= 2:
                taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def main(
    check: str,
    models: Annotated[Path, typer.Option(help="Folder with networks of the bundle.")] = Path("build/gpu-bundle/models"),
    *,
    tiny: Annotated[bool, typer.Option("--tiny", help="The networks have a size for tests.")] = False,
) -> None:
    """Run one check, and print its verdict."""
    checks: dict[str, Callable[[], str]] = {
        "kernels": check_kernels,
        "rounding": check_rounding,
        "sum": long_sum,
        "placement": lambda: check_placement(models, tiny=tiny),
        "shapes": lambda: check_shapes(models, tiny=tiny),
    }
    if check not in checks:
        raise typer.BadParameter(f"there is no {check}; expected one of {', '.join(checks)}")
    try:
        verdict = checks[check]()
    except Exception as failure:
        traceback.print_exc()
        print(f"verdict: ended early: {reason_of(failure)}")
        raise typer.Exit(1) from failure
    print(f"verdict: {verdict}")


if __name__ == "__main__":
    typer.run(main)
