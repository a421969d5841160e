from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from protos.model_config_pb2 import ModelConfig
from serve.backends.onnx_runtime import session as onnxruntime_session
from serve.backends.onnx_runtime import thread_choice
from serve.backends.onnx_runtime.session import SessionOpener
from serve.backends.onnx_runtime.session_settings import SessionSettings
from serve.backends.onnx_runtime.thread_choice import is_quick, may_be_quick
from serve.engine.backend import DevicePlacement
from tests.models import save_mlp, save_model, save_picky, save_unbatched
from tests.serve.backends.loading import load_backend

ON_CPU = DevicePlacement(use_gpu=False)
FLOAT = TensorProto.FLOAT


def threads(session: ort.InferenceSession) -> int:
    return int(session.get_session_options().intra_op_num_threads)


def session(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.fixture
def several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr("serve.backends.cores.group_folders", lambda *_: [])


@pytest.mark.usefixtures("several_cores")
@pytest.mark.parametrize(("limit_s", "expected"), [(float("1e9"), 1), (0.0, 0)])
def test_a_quick_model_gets_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float, expected: int) -> None:
    monkeypatch.setattr(thread_choice, "QUICK_S", limit_s)
    path = save_mlp(tmp_path / "m.onnx")
    assert threads(SessionOpener(path=path, placement=ON_CPU, rows=8).open().session) == expected


@pytest.mark.usefixtures("several_cores")
def test_a_slow_model_gets_no_more_threads_than_the_process_may_use_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_choice, "QUICK_S", 0.0)
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


def test_a_large_file_or_a_single_core_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_mlp(tmp_path / "m.onnx")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert may_be_quick(path, ON_CPU)
    monkeypatch.setattr(thread_choice, "SMALL_FILE_BYTES", 10)
    assert not may_be_quick(path, ON_CPU)
    monkeypatch.undo()
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert not may_be_quick(path, ON_CPU)


def test_a_batch_of_unknown_size_is_not_called_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_choice, "QUICK_S", 1e9)
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    sequence = save_model(tmp_path / "s.onnx", nodes, [("x", FLOAT, ["batch", "length"])], [("y", FLOAT, ["batch", "length"])])
    mixed = [helper.make_node("Add", ["x", "z"], ["y"])]
    one_open = [("x", FLOAT, ["n"]), ("z", FLOAT, [1])]
    half_known = save_model(tmp_path / "h.onnx", mixed, one_open, [("y", FLOAT, ["n"])])  # type: ignore[arg-type]  # (lists of both)
    assert not is_quick(session(sequence), 8)
    assert not is_quick(session(half_known), 8)
    assert is_quick(session(save_unbatched(tmp_path / "u.onnx")), 1)


def test_a_model_that_takes_no_ones_is_not_called_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_choice, "QUICK_S", 1e9)
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
        monkeypatch.setattr(thread_choice, "QUICK_S", limit_s)
        backend = load_backend(path, ON_CPU, ModelConfig())
        answers.append(backend.run({"x": np.ones(3, np.float32)})["y"].tolist())
    assert answers == [[2.0] * 3] * 2


def test_a_batch_of_gigabytes_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = session(save_mlp(tmp_path / "m.onnx"))
    monkeypatch.setattr(thread_choice, "QUICK_S", 1e9)
    assert is_quick(opened, 8)
    assert not is_quick(opened, 2_000_000_000)
