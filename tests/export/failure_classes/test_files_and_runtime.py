from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import external_data_helper, numpy_helper

from tests.export.conversions.closeness import difference
from tests.export.conversions.crash_pool import Crash, CrashPool
from tests.export.conversions.judge import Case, Verdict, judge
from tests.export.conversions.runtime import Session
from tests.export.failure_classes.converters import naive, named, normal, ours, parse

# Class 12: weights in files beside the model; memory stays bounded and shards stay shards.

MEGABYTE = 2**20
LAYERS, WIDTH = 12, 1024
CONVERT = {
    "naive": """
import onnx
from onnxconverter_common.float16 import convert_float_to_float16
onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)
""",
    "ours": """
from pathlib import Path
from halfserve.export.onnx_fp16.convert import convert_file
convert_file(Path(source), Path(target))
""",
}
# How far the peak lies above what the imports alone take; VmHWM is what the kernel saw, in kB.
PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
source, target = sys.argv[1:]
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
{imports}
before = peak()
{work}
print(peak() - before)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 12 weights of 4 MB each, which lie in two files beside it."""
    lines = "\n".join(f"v{i + 1} = MatMul (v{i}, w{i})" for i in range(LAYERS - 1))
    text = f"g (float[N, {WIDTH}] v0) => (float[N, {WIDTH}] y) {{ {lines}\n y = MatMul (v{LAYERS - 1}, w{LAYERS - 1}) }}"
    model = named(parse(text, **{f"w{i}": normal(WIDTH, WIDTH, scale=WIDTH**-0.5, seed=i) for i in range(LAYERS)}))
    for number, tensor in enumerate(model.graph.initializer):
        external_data_helper.set_external_data(tensor, f"shard_{number % 2}.bin")
    path = tmp_path_factory.mktemp("external") / "model.onnx"
    onnx.save(model, path)
    assert path.stat().st_size < MEGABYTE
    return path


def converted(kind: str, source: Path, folder: Path) -> tuple[Path, float]:
    """The converted model's path, and by how many bytes its making raised the peak of memory."""
    target = folder / "half.onnx"
    imports = "\n".join(line for line in CONVERT[kind].splitlines() if "import" in line)
    program = PROGRAM.format(imports=imports, work=CONVERT[kind])
    done = subprocess.run([sys.executable, "-c", program, source, target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target, float(done.stdout) * 1024


@pytest.mark.long
@pytest.mark.parametrize(("kind", "bounded"), [("naive", False), ("ours", True)], ids=["naive-fails", "ours-passes"])
def test_memory_stays_under_half_of_the_weights(kind: str, bounded: bool, source: Path, tmp_path: Path) -> None:
    target, grown = converted(kind, source, tmp_path)
    weights = LAYERS * WIDTH * WIDTH * 4
    assert (grown < weights / 2) == bounded, f"{grown / MEGABYTE:.0f} MB more for {weights / MEGABYTE:.0f} MB of weights"
    x = {"v0": normal(2, WIDTH)}
    (right,) = path_session(source).run(x)
    (answer,) = path_session(target).run(x)
    assert difference(answer, [right]) is None


def path_session(path: Path) -> Session:
    """A session of a model with its external data taken in."""
    return Session(onnx.load(path).SerializeToString())


@pytest.mark.long
@pytest.mark.parametrize(("kind", "kept"), [("naive", False), ("ours", True)], ids=["naive-fails", "ours-passes"])
def test_shards_stay_shards(kind: str, kept: bool, source: Path, tmp_path: Path) -> None:
    target, _ = converted(kind, source, tmp_path)
    model = onnx.load(target, load_external_data=False)
    places = {entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"}
    assert (len(places) == 2) == kept
    external_data_helper.load_external_data_for_model(model, str(target.parent))
    assert {numpy_helper.to_array(tensor).dtype for tensor in model.graph.initializer} == {np.dtype(np.float16)}


# Class 14: float16 models that end the process in which ONNX Runtime opens them.


def swapped_batch() -> onnx.ModelProto:
    """What torch's MultiheadAttention begins with: (batch, time, width) to (time, batch, width), then a product.

    With dynamic sizes and the weight in float16, ONNX Runtime 1.31.1 fuses the two and dereferences nothing.
    """
    return named(
        parse(
            """g (float[N, T, 4] x) => (float[T, N, 5] y) {
            t = Transpose <perm = [1, 0, 2]> (x)
            y = MatMul (t, w) }""",
            w=normal(4, 5),
        )
    )


@pytest.fixture(scope="module")
def judged() -> Callable[[onnx.ModelProto], Verdict | Crash]:
    """The judge in a child process, which a crash ends."""

    def verdict(converted: onnx.ModelProto) -> Verdict | Crash:
        case = Case(
            kind="own", name="swapped_batch", model=swapped_batch().SerializeToString(), inputs=({"x": normal(2, 3, 4)},)
        )
        with CrashPool(judge, workers=1) as pool:
            return next(pool.map([(case, converted.SerializeToString(), True)]))

    return verdict


@pytest.mark.parametrize(
    ("convert", "expected"),
    [pytest.param(naive, Crash("killed by SIGSEGV"), id="naive-fails"), pytest.param(ours, Verdict(ok=True), id="ours-passes")],
)
def test_a_product_behind_a_swap_of_dynamic_axes(
    convert: Callable[[onnx.ModelProto], onnx.ModelProto],
    expected: Crash | Verdict,
    judged: Callable[[onnx.ModelProto], Verdict | Crash],
) -> None:
    assert judged(convert(swapped_batch())) == expected
