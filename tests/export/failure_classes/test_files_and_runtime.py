"""Failure classes 12 and 14: memory and shards of weights in files, and models that crash ONNX Runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import external_data_helper, numpy_helper

from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from tests.export.conversions.closeness import difference
from tests.export.conversions.crash_pool import Crash, CrashPool
from tests.export.conversions.judge import Case, Verdict, judge
from tests.export.conversions.runtime import Session
from tests.export.failure_classes.converters import Convert, naive
from tests.export.onnx_fp16.models import normal
from tests.export.stored_models import parse, with_data_files

MEGABYTE = 2**20
LAYERS, WIDTH = 12, 1024
NAIVE = """
import onnx
from onnxconverter_common.float16 import convert_float_to_float16
{before}
onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)
"""
OURS = """
from halfserve.export.onnx_fp16.convert import convert_file
{before}
convert_file(source, target)
"""
# How far the peak lies above what the imports alone take; VmHWM is what the kernel saw, in kB.
PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
source, target = sys.argv[1:]
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
{work}
print(peak() - before)
"""


def path_session(path: Path) -> Session:
    """A session of a model with its external data taken in."""
    return Session(onnx.load(path).SerializeToString())


@pytest.mark.long
@pytest.mark.parametrize(("work", "right"), [(NAIVE, False), (OURS, True)], ids=["naive-fails", "ours-passes"])
def test_memory_stays_under_half_of_the_weights_and_shards_stay_shards(work: str, right: bool, tmp_path: Path) -> None:
    """12 weights of 4 MB each lie in two files beside the model."""
    lines = " ".join(f"v{i + 1} = MatMul (v{i}, w{i})" for i in range(LAYERS))
    text = f"g (float[N, {WIDTH}] v0) => (float[N, {WIDTH}] v{LAYERS}) {{ {lines} }}"
    weights: dict[str, Any] = {f"w{i}": np.roll(normal(WIDTH, WIDTH, scale=WIDTH**-0.5), i) for i in range(LAYERS)}
    model = parse(text, opset=17, ir=8, **weights)
    source, target = with_data_files(model, tmp_path / "model.onnx", files=2), tmp_path / "half.onnx"
    assert source.stat().st_size < MEGABYTE
    program = PROGRAM.format(work=work.format(before="before = peak()"))
    done = subprocess.run([sys.executable, "-c", program, source, target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, whole = float(done.stdout) * 1024, LAYERS * WIDTH * WIDTH * 4
    assert (grown < whole / 2) == right, f"{grown / MEGABYTE:.0f} MB more for {whole / MEGABYTE:.0f} MB of weights"
    x = {"v0": normal(2, WIDTH)}
    assert difference(path_session(target).run(x)[0], path_session(source).run(x)) is None
    half = onnx.load(target, load_external_data=False)
    places = {entry.value for tensor in half.graph.initializer for entry in tensor.external_data if entry.key == "location"}
    assert (len(places) == 2) == right
    external_data_helper.load_external_data_for_model(half, str(tmp_path))
    assert {numpy_helper.to_array(tensor).dtype for tensor in half.graph.initializer} == {np.dtype(np.float16)}


@pytest.mark.parametrize(
    ("convert", "expected"),
    [
        pytest.param(naive, Crash("killed by SIGSEGV"), id="naive-fails"),
        pytest.param(convert_float_to_float16, Verdict(ok=True), id="ours-passes"),
    ],
)
def test_a_product_behind_a_swap_of_dynamic_axes(convert: Convert, expected: Crash | Verdict) -> None:
    """As torch's MultiheadAttention begins: ONNX Runtime 1.31.1 fuses the two in float16 and dereferences nothing."""
    text = "g (float[N, T, 4] x) => (float[T, N, 5] y) { t = Transpose <perm = [1, 0, 2]> (x) y = MatMul (t, w) }"
    model = parse(text, opset=17, ir=8, w=normal(4, 5))
    case = Case(kind="own", name="swapped", model=model.SerializeToString(), inputs=({"x": normal(2, 3, 4)},))
    with CrashPool(judge, workers=1) as pool:
        assert next(pool.map([(case, convert(model).SerializeToString(), True)])) == expected
