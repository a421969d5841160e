from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime import session as onnxruntime_session
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.backends.onnx_runtime.session import SessionOpener, is_quick, may_be_quick
from halfserve.serve.backends.onnx_runtime.session_settings import SessionSettings
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.cuda_driver import device_count
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_loading import load_version
from halfserve.serve.engine.repository.model_repository import find_models
from tests.models import save_mlp, save_model, save_picky, save_unbatched
from tests.serve.backends.support import load_backend, open_session

ON_CPU, ONE_THREAD = DevicePlacement(use_gpu=False), DevicePlacement(use_gpu=False, threads=1)
FLOAT = TensorProto.FLOAT
PROGRAM = """
import sys, threading
from pathlib import Path
import numpy as np
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import DevicePlacement
from tests.serve.backends.support import load_backend

def keeps_subnormals():
    return bool(np.float32(1e-40) * np.float32(1) > 0)

path, flushes, seen = Path(sys.argv[1]), sys.argv[2:], []
for flush in flushes:
    config = ModelConfig()
    config.parameters["session.set_denormal_as_zero"].string_value = flush
    load_backend(path, DevicePlacement(use_gpu=False, threads=2), config)
    seen.append(keeps_subnormals())
    thread = threading.Thread(target=lambda: seen.append(keeps_subnormals()))
    thread.start()
    thread.join()
print(all(seen))
"""


@pytest.fixture
def unusable_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that the driver offers and whose libraries the runtime does not find."""
    if device_count():
        pytest.skip("this machine's GPU can be used")
    monkeypatch.setattr(onnxruntime_session, "device_count", lambda: 1)


def answer(session: onnxruntime_session.OpenSession) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.asarray(
        session.session.run(None, {next(iter(session.given_names.values()), "x"): np.ones((1, 64), np.float16)})[0]
    )


@pytest.mark.parametrize(("save", "precision"), [(save_unbatched, "fp32"), (save_mlp, "fp32 (the fp16 model, upcast)")])
def test_on_the_cpu_fp16_is_upcast_and_fp32_stays(tmp_path: Path, save: Callable[[Path], Path], precision: str) -> None:
    opened = open_session(save(tmp_path / "m.onnx"), ONE_THREAD)
    assert (opened.provider, opened.precision) == ("CPUExecutionProvider", precision)


def test_without_a_device_the_cpu_is_used_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(onnxruntime_session, "device_count", lambda: 0)
    assert open_session(save_mlp(tmp_path / "m.onnx"), DevicePlacement()).provider == "CPUExecutionProvider"
    assert caplog.text == ""


def test_a_required_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_session, "device_count", lambda: 1)
    with pytest.raises(ModelLoadError, match=r"a GPU is required, but CUDA device 1 is not there \(1 found"):
        open_session(save_mlp(tmp_path / "m.onnx"), DevicePlacement(require_gpu=True, device_id=1))


@pytest.mark.usefixtures("unusable_gpu")
def test_a_device_that_cannot_be_used_is_named_and_the_model_upcast(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save_mlp(tmp_path / "m.onnx")
    with caplog.at_level(logging.WARNING):
        opened = open_session(path, DevicePlacement(threads=1))
    assert (opened.provider, opened.precision) == ("CPUExecutionProvider", "fp32 (the fp16 model, upcast)")
    np.testing.assert_array_equal(answer(opened), answer(open_session(path, ONE_THREAD)))
    assert "ONNX Runtime cannot use CUDA device 0" in caplog.text
    assert "make install EXTRAS=cuda" in caplog.text
    assert capfd.readouterr() == ("", ""), "the runtime's own lines stay out of the ready line"


@pytest.mark.usefixtures("unusable_gpu")
def test_a_required_device_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="a GPU is required, but ONNX Runtime cannot use CUDA device 0"):
        open_session(save_mlp(tmp_path / "m.onnx"), DevicePlacement(require_gpu=True))


def test_weights_in_a_file_beside_the_model_are_found(tmp_path: Path) -> None:
    model = onnx.load(save_mlp(tmp_path / "whole.onnx"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    whole, split = (answer(open_session(tmp_path / name, ONE_THREAD)) for name in ("whole.onnx", "m.onnx"))
    np.testing.assert_array_equal(whole, split)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelLoadError, match="weights.bin"):
        open_session(tmp_path / "m.onnx", ONE_THREAD)


def test_a_model_that_the_runtime_refuses_is_a_load_error(tmp_path: Path) -> None:
    node = helper.make_node("NoSuchOperator", ["x"], ["y"], domain="nowhere")
    value = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [value("x", 1, ["b"])], [value("y", 1, ["b"])])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("nowhere", 1)]), path)
    with pytest.raises(ModelLoadError, match="m.onnx: ONNX Runtime refuses the model: ") as refused:
        open_session(path, ONE_THREAD)
    assert "\n" not in str(refused.value)


@pytest.mark.gpu
def test_cuda_runs_the_fp16_model_as_it_is(tmp_path: Path) -> None:
    if not device_count():
        pytest.skip("no CUDA device")
    opened = open_session(save_mlp(tmp_path / "m.onnx"), DevicePlacement(require_gpu=True))
    assert (opened.provider, opened.precision) == ("CUDAExecutionProvider", "fp16")


def threads(session: ort.InferenceSession) -> int:
    return int(session.get_session_options().intra_op_num_threads)


def session(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.fixture
def several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr("halfserve.serve.engine.resource_limits.group_folders", lambda *_: [])


@pytest.mark.usefixtures("several_cores")
@pytest.mark.parametrize(("limit_s", "expected"), [(float("1e9"), 1), (0.0, 0)])
def test_a_quick_model_gets_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float, expected: int) -> None:
    monkeypatch.setattr(onnxruntime_session, "QUICK_S", limit_s)
    path = save_mlp(tmp_path / "m.onnx")
    assert threads(SessionOpener(path=path, placement=ON_CPU, rows=8).open().session) == expected


@pytest.mark.usefixtures("several_cores")
def test_a_slow_model_gets_no_more_threads_than_the_process_may_use_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime_session, "QUICK_S", 0.0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3}, raising=False)
    path = save_mlp(tmp_path / "m.onnx")
    for settings in (SessionSettings(), SessionSettings(intra_op_threads=0, parallel=True)):
        opened = SessionOpener(path=path, placement=ON_CPU, settings=settings, rows=8).open().session
        assert (threads(opened), opened.get_session_options().inter_op_num_threads) == (2, 2)


@pytest.mark.usefixtures("several_cores")
@pytest.mark.parametrize(
    ("placement", "settings", "expected"),
    [(DevicePlacement(use_gpu=False, threads=3), SessionSettings(), 3), (ON_CPU, SessionSettings(intra_op_threads=2), 2)],
)
def test_what_somebody_says_is_taken_without_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: DevicePlacement, settings: SessionSettings, expected: int
) -> None:
    monkeypatch.setattr(onnxruntime_session, "is_quick", lambda *_: pytest.fail("no trial is needed"))
    opener = SessionOpener(path=save_mlp(tmp_path / "m.onnx"), placement=placement, settings=settings, rows=8)
    assert threads(opener.open().session) == expected


@pytest.mark.usefixtures("several_cores")
def test_a_large_file_or_a_single_core_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_mlp(tmp_path / "m.onnx")
    assert may_be_quick(path, ON_CPU)
    with monkeypatch.context() as limited:
        limited.setattr(onnxruntime_session, "SMALL_FILE_BYTES", 10)
        assert not may_be_quick(path, ON_CPU)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2}, raising=False)
    assert not may_be_quick(path, ON_CPU)


def test_a_batch_of_unknown_size_is_not_called_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_session, "QUICK_S", 1e9)
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    sequence = save_model(tmp_path / "s.onnx", nodes, [("x", FLOAT, ["batch", "length"])], [("y", FLOAT, ["batch", "length"])])
    mixed = [helper.make_node("Add", ["x", "z"], ["y"])]
    one_open = [("x", FLOAT, ["n"]), ("z", FLOAT, [1])]
    half_known = save_model(tmp_path / "h.onnx", mixed, one_open, [("y", FLOAT, ["n"])])  # type: ignore[arg-type]  # (lists of both)
    assert not is_quick(session(sequence), 8)
    assert not is_quick(session(half_known), 8)
    assert is_quick(session(save_unbatched(tmp_path / "u.onnx")), 1)


def test_a_model_that_takes_no_ones_is_not_called_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_session, "QUICK_S", 1e9)
    choose = [helper.make_node("Gather", ["table", "i"], ["y"], axis=0)]
    shapes = [("i", TensorProto.INT64, ["batch", 1])], [("y", FLOAT, ["batch", 1])]
    table = {"table": np.array([10.0], np.float32)}
    path = save_model(tmp_path / "m.onnx", choose, *shapes, table)  # type: ignore[arg-type]  # (lists of names and numbers)
    assert not is_quick(session(path), 4)
    assert is_quick(session(save_picky(tmp_path / "p.onnx")), 4)


@pytest.mark.usefixtures("several_cores")
def test_a_loaded_model_answers_the_same_either_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, answers = save_unbatched(tmp_path / "m.onnx"), []
    for limit_s in (0.0, 1e9):
        monkeypatch.setattr(onnxruntime_session, "QUICK_S", limit_s)
        backend = load_backend(path, ON_CPU, ModelConfig())
        answers.append(backend.run({"x": np.ones(3, np.float32)})["y"].tolist())
    assert answers == [[2.0] * 3] * 2


def test_a_batch_of_gigabytes_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(save_mlp(tmp_path / "m.onnx"))
    monkeypatch.setattr(onnxruntime_session, "QUICK_S", 1e9)
    assert is_quick(opened, 8)
    assert not is_quick(opened, 2_000_000_000)


@pytest.mark.parametrize(
    "flushes",
    [*(pytest.param(given, marks=pytest.mark.long) for given in (["1"], ["1", "1"])), ["1", "0"], ["0", "1"]],
    ids="-".join,
)
def test_a_model_that_flushes_subnormals_does_so_to_nobody_else(tmp_path: Path, flushes: list[str]) -> None:
    asking = [sys.executable, "-c", PROGRAM, str(save_mlp(tmp_path / "m.onnx")), *flushes]
    done = subprocess.run(asking, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr


@pytest.mark.parametrize(("threads", "warns"), [("1", True), ("2", False)])
def test_a_wish_that_one_thread_cannot_fulfil_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, threads: str, warns: bool
) -> None:
    config = ModelConfig()
    config.parameters["session.set_denormal_as_zero"].string_value = "1"
    config.parameters["intra_op_thread_count"].string_value = threads
    load_backend(save_mlp(tmp_path / "m.onnx"), DevicePlacement(use_gpu=False), config)
    assert ("set_denormal_as_zero has no effect with one thread; set intra_op" in caplog.text) is warns


@pytest.mark.parametrize(("save", "nodes"), [(save_mlp, range(3, 20)), (save_unbatched, range(1, 2))])
def test_every_node_has_its_provider_in_the_config(tmp_path: Path, save: object, nodes: range) -> None:
    (files,) = find_models(save(tmp_path / "m.onnx"))  # type: ignore[operator]  # (a function of the list above)
    version = load_version(files, OnnxRuntime(), DevicePlacement(use_gpu=False, threads=1), Defaults())
    name, count = version.config.parameters["halfserve.nodes"].string_value.split("=")
    assert name == version.backends[0].provider == "CPUExecutionProvider"
    assert int(count) in nodes
