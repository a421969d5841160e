from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static

from halfserve.export.certificate.budget import Budget
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import open_model, serialize
from halfserve.export.verification.comparison import Comparison
from halfserve.export.verification.executions import RuntimeLevels, run_levels
from halfserve.export.verification.samples import Array, Feed, inputs_of, make_feeds
from halfserve.export.verification.sandbox import CPU, CUDA, LEVELS, WORKER, Sandbox
from halfserve.export.verification.verify import verify
from tests.export.stored_models import both, parse

PROGRAM = """
import os, signal, sys, threading, runpy
import numpy as np
worker = runpy.run_path({worker!r})
right, load = worker["answer_to"], np.load
{before}

def answer_to(request):
    {deed}
    yield from right(request)

def loading(file, *arguments, **options):
    {on_load}
    return load(file, *arguments, **options)

np.load = loading
worker["serve"].__globals__["answer_to"] = answer_to
channel = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
worker["serve"](channel, sys.argv[1])
"""
ALL, EXTENDED = "ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED"
X = np.array([[1.0], [2.0]], np.float32)
SAMPLES = np.linspace(0, 1, 40, dtype=np.float32)[:, None]
AT_HIGHEST = "request['level'] == 'ORT_ENABLE_ALL'"
CRASHING = "g (T[N,L,4] x) => (T[L,N,5] y) { t = Transpose<perm=[1,0,2]>(x)  y = MatMul(t, w) }"

# Centred far from 0, a sum in another order crosses a step of the quantised product's integers.
CENTRED = """
g (float[N,16,8,8] x) => (float[N,10] y) {
    a = Conv(x, w)  mean = GlobalAveragePool(a)  b = Sub(a, mean)  rows = Flatten(b)  y = MatMul(rows, head)
}
"""


def misbehaving_worker(folder: Path, deed: str, *, before: str = "", on_load: str = "") -> Path:
    """A worker that does something else, in Python, before it answers a `request`, or before it loads a `file`."""
    path = folder / "worker.py"
    path.write_text(PROGRAM.format(worker=str(WORKER), deed=deed, before=before, on_load=on_load or "pass"))
    return path


@pytest.fixture
def file(model: onnx.ModelProto, tmp_path: Path) -> Path:
    path = tmp_path / "doubling.onnx"
    path.write_bytes(serialize(model))
    return path


def test_batches_return_in_order_despite_a_failing_one(file: Path) -> None:
    with Sandbox() as sandbox:
        answer = sandbox.run(file, sandbox.stage([{"x": X}, {"x": np.ones((2, 9))}, {"x": 3 * X}]), level=ALL)
    assert (answer.trouble, answer.providers) == (None, (CPU,))
    first, second, third = answer.batches
    values = [batch[0] for batch in (first, third) if not isinstance(batch, str)]
    assert [value.dtype for value in values if isinstance(value, np.ndarray)] == [np.float16, np.float16]
    assert [value.tolist() for value in values if isinstance(value, np.ndarray)] == [[[2], [4]], [[6], [12]]]
    assert "invalid dimensions for input: x" in str(second)


def test_cuda_libraries_are_preloaded_for_the_cuda_provider_only(tmp_path: Path, file: Path) -> None:
    sought = tmp_path / "sought"
    before = (
        "import pathlib\nfrom halfserve import nvidia_libraries\n"
        f"nvidia_libraries.load_nvidia_libraries = pathlib.Path({str(sought)!r}).touch"
    )
    with Sandbox(worker=misbehaving_worker(tmp_path, "pass", before=before)) as sandbox:
        assert sandbox.run(file, [], level=ALL).trouble is None
        assert not sought.exists()
        sandbox.run(file, [], level=ALL, provider=CUDA)
    assert sought.exists()


def test_a_refusal_is_one_line(tmp_path: Path, model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "NoSuchOperator"
    (tmp_path / "bad.onnx").write_bytes(serialize(model))
    with Sandbox() as sandbox:
        answer = sandbox.run(tmp_path / "bad.onnx", [], level=ALL)
    assert "NoSuchOperator" in str(answer.refusal)
    assert "\n" not in str(answer.trouble)


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("os.abort()", "killed by SIGABRT"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (out of memory?)"),
        ("sys.exit('libcuda is missing')", "ended with exit status 1: libcuda is missing"),
    ],
)
def test_a_crash_is_recorded_and_the_next_model_runs(file: Path, tmp_path: Path, deed: str, words: str) -> None:
    worker = misbehaving_worker(tmp_path, f"if request['level'] == '{ALL}': {deed}")
    with Sandbox(worker=worker) as sandbox:
        batches = sandbox.stage([{"x": X}])
        assert sandbox.run(file, batches, level=ALL).crash == words
        assert sandbox.run(file, batches, level=EXTENDED).trouble is None
        assert sandbox.run(file, batches, level=ALL).crash == words


def test_batches_before_a_crash_are_kept(file: Path, tmp_path: Path) -> None:
    deed = "if '1-0.npy' in str(request['batches'][1:]): request['batches'][1]['x'] = 'boom'"
    worker = misbehaving_worker(tmp_path, deed, on_load="if file == 'boom': os.abort()")
    with Sandbox(worker=worker) as sandbox:
        answer = sandbox.run(file, sandbox.stage([{"x": X}, {"x": X}]), level=ALL)
    assert answer.crash == "killed by SIGABRT"
    assert len(answer.batches) == 1


def test_a_hang_ends_and_leaves_no_process(file: Path, tmp_path: Path) -> None:
    worker = misbehaving_worker(tmp_path, "print(os.getpid(), file=open(sys.argv[0] + '.pid', 'w')); threading.Event().wait()")
    with Sandbox(worker=worker, silence_seconds=2) as sandbox:
        assert sandbox.run(file, [], level=ALL).crash == "no answer within 2 s"
        pid = int(Path(f"{worker}.pid").read_text())
        assert not Path(f"/proc/{pid}").exists() or sys.platform != "linux"


def test_a_model_that_crashes_a_reused_process_runs_again(file: Path, tmp_path: Path) -> None:
    worker = misbehaving_worker(tmp_path, "served.append(1)\n    if len(served) == 2: os.abort()", before="served = []")
    with Sandbox(worker=worker) as sandbox:
        assert [sandbox.run(file, [], level=ALL).crash for _ in range(3)] == [None, None, None]


def test_files_are_removed_after_an_error(file: Path) -> None:
    folders: list[Path] = []

    def fails() -> None:
        with Sandbox() as sandbox:
            folders.append(sandbox.new_folder())
            sandbox.run(file, sandbox.stage([{"x": X}]), level=ALL)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not folders[0].parent.exists()


def test_a_worker_whose_parent_is_killed_cleans_up_and_ends(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "left.npy").touch()
    command = [sys.executable, "-P", str(WORKER), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(timeout=60) == 0
    assert not folder.exists()


def test_the_worker_verification_and_search_do_not_load_torch() -> None:
    modules = "halfserve.export.verification.verify, halfserve.export.search.smallest_fp32_set, halfserve.export.search.result"
    program = f"import sys, runpy, {modules}; runpy.run_path({str(WORKER)!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == "False\n"


def test_samples_that_cannot_be_written_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with Sandbox() as sandbox, pytest.raises(ExportError, match="cannot write the samples to .*: No space left on device"):
        sandbox.stage([{"x": X}])


def levels(model: onnx.ModelProto, worker: Path = WORKER) -> RuntimeLevels:
    candidate = open_model(model)
    with Sandbox(worker=worker) as sandbox:
        feeds = make_feeds(inputs_of(model), SAMPLES, 16)
        return run_levels(Comparison(model, candidate, sandbox, feeds, []), Budget())


def test_a_sound_model_runs_at_every_level(model: onnx.ModelProto) -> None:
    runtime = levels(model)
    assert runtime.probe.level == "ORT_ENABLE_ALL"
    assert runtime.probe.crashes == ()
    assert [verdict.level for verdict in runtime.levels] == list(LEVELS)
    assert all(verdict.trouble is None and verdict.max_scaled_error == 0 for verdict in runtime.levels)


def test_a_crash_is_recorded_and_the_next_level_taken(model: onnx.ModelProto, tmp_path: Path) -> None:
    crashing = misbehaving_worker(tmp_path, f"if {AT_HIGHEST} and request['provider']: os.kill(os.getpid(), signal.SIGSEGV)")
    runtime = levels(model, crashing)
    assert runtime.probe.level == "ORT_ENABLE_EXTENDED"
    assert runtime.probe.crashes == ("ORT_ENABLE_ALL: killed by SIGSEGV",)
    assert len(runtime.answer.batches) == 3


def test_a_level_that_changes_answers_is_not_sound(model: onnx.ModelProto, tmp_path: Path) -> None:
    deed = "global wrong; wrong = len(asked) == 1; asked.append(1)"
    wrong = misbehaving_worker(tmp_path, deed, before="asked = []", on_load="if wrong: return 2 * load(file)")
    runtime = levels(model, wrong)
    assert runtime.probe.level == "ORT_ENABLE_EXTENDED"
    (trouble,) = runtime.probe.crashes
    assert trouble.startswith("ORT_ENABLE_ALL: over budget: output 'y': max error 1 of the output's largest magnitude 2")


@pytest.mark.long
def test_crashing_at_every_level_is_one_line(model: onnx.ModelProto, tmp_path: Path) -> None:
    crashing = misbehaving_worker(tmp_path, "os.abort()")
    with pytest.raises(ExportError, match=r"crashes when it opens the reference \(ORT_ENABLE_ALL: killed by SIGABRT; ORT_EN"):
        levels(model, crashing)


def test_a_candidate_alone_that_crashes_everywhere_is_one_line(model: onnx.ModelProto, tmp_path: Path) -> None:
    deed = f"if {str(tmp_path / 'half.onnx')!r} == request['model']: os.abort()"
    path = tmp_path / "half.onnx"
    path.write_bytes(serialize(model))
    with Sandbox(worker=misbehaving_worker(tmp_path, deed)) as sandbox:
        comparison = Comparison(model, open_model(path), sandbox, make_feeds(inputs_of(model), SAMPLES, 16), [])
        with pytest.raises(
            ExportError, match=r"crashes on the model \(ORT_ENABLE_ALL: killed by SIGABRT; .*try another release"
        ):
            run_levels(comparison, Budget())


def test_a_model_that_crashes_onnx_runtime_1_31_is_verified() -> None:
    reference, candidate = both(CRASHING, w=np.random.default_rng(0).standard_normal((4, 5)))
    x = np.random.default_rng(1).standard_normal((3, 2, 4)).astype(np.float32)
    certificate = verify(reference, candidate, x, cuda=False)
    assert certificate.passed
    crashed = [f"{verdict.level}: {verdict.trouble}" for verdict in certificate.levels if verdict.trouble]
    assert list(certificate.probe.crashes) == crashed  # which release crashes where is its own affair
    assert all("killed by SIGSEGV" in text for text in crashed)


class Calibration(CalibrationDataReader):  # type: ignore[misc]  # (has no types)
    def __init__(self, x: Array) -> None:
        self._feeds = iter([{"x": x}])

    def get_next(self) -> Feed | None:
        return next(self._feeds, None)


def quantised_model(kind: str, folder: Path) -> tuple[Path, Array]:
    """A quantised model, and samples of it."""
    random = np.random.default_rng(0)
    plain, quantised = folder / "plain.onnx", folder / "quantised.onnx"
    w, head = random.standard_normal((16, 16, 3, 3)) / 12, random.standard_normal((576, 10)) / 32
    model = parse(CENTRED, opset=17, ir=8, w=w, head=head)
    plain.write_bytes(serialize(model))
    x = (1000 + random.standard_normal((64, 16, 8, 8))).astype(np.float32)
    if kind == "dynamic":
        quantize_dynamic(plain, quantised, op_types_to_quantize=["MatMul"])
    else:
        quantize_static(plain, quantised, Calibration(x), quant_format=QuantFormat.QDQ, op_types_to_quantize=["MatMul"])
    return quantised, x


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_quantised_model_equals_itself_exactly(kind: str, tmp_path: Path) -> None:
    quantised, x = quantised_model(kind, tmp_path)
    certificate = verify(quantised, quantised, x, budget=Budget(max_abs_error=0.0), cuda=False)
    assert certificate.passed
    assert {verdict.figures.max_abs_error for verdict in certificate.outputs} == {0.0}


def test_a_quantised_model_beside_bfloat16_numbers_equals_itself_exactly(tmp_path: Path) -> None:
    quantised, x = quantised_model("dynamic", tmp_path)
    beside: list[onnx.ModelProto] = []
    for dtype in (np.float32, ml_dtypes.bfloat16):
        model = onnx.load(quantised)
        model.graph.initializer.append(numpy_helper.from_array(np.ones((1, 2), dtype), "numbers"))
        model.graph.node.append(helper.make_node("Identity", ["numbers"], ["z"]))
        model.graph.output.append(helper.make_tensor_value_info("z", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [1, 2]))
        beside.append(model)
    reference, candidate = beside
    certificate = verify(reference, candidate, x, budget=Budget(max_abs_error=0.0), cuda=False)
    assert (certificate.passed, certificate.precision) == (True, "bfloat16")
