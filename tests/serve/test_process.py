"""The garbage collector while a server runs."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from halfserve.serve import process
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.process import (
    DUE_COLLECTIONS,
    NEW_OBJECTS,
    SWITCH_S,
    collect_when_idle,
    infrequent_collection,
    short_switch_interval,
)
from halfserve.serve.server import ServerOptions, serve
from halfserve.serve.startup_report import StartupReport
from halfserve.serve.transports.transport import TransportName
from tests.models import save_counter, save_mlp, save_model

ROOT = Path(__file__).parents[2]
# A runtime that computes for minutes on a thread that nobody can end, in a process that is done.
PROGRAM = """
import sys, threading
import numpy as np, onnxruntime
from halfserve.serve.process import leave_threads_behind
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
begun = threading.Event()
def compute():
    begun.set()
    session.run(None, {"n": np.array([int(sys.argv[2])])})
thread = threading.Thread(target=compute, daemon=True)
thread.start()
begun.wait()
print("served", end="")
leave_threads_behind(3)
thread.join()
"""


@pytest.mark.parametrize(("steps", "code"), [(1_000_000_000, 3), (1, 0)], ids=["stuck", "done"])
def test_a_thread_inside_a_runtime_does_not_make_the_end_a_crash(tmp_path: Path, steps: int, code: int) -> None:
    model = save_counter(tmp_path / "model.onnx")
    command = [sys.executable, "-c", PROGRAM, str(model), str(steps)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "served", "")


# A model that is being loaded by then, and whose weights are in a file for that.
LOADING = """
import sys, threading
from pathlib import Path
from halfserve.serve.backends.onnx_runtime.onnx_preparation import prepared
from halfserve.serve.process import leave_threads_behind
begun = threading.Event()
def load():
    with prepared(Path(sys.argv[1]), for_gpu=False) as model:
        print(Path(model.source).with_name("weights.bin").stat().st_size, end="")
        begun.set()
        threading.Event().wait()
threading.Thread(target=load, daemon=True).start()
begun.wait()
leave_threads_behind(3)
"""


def test_a_model_that_is_being_loaded_leaves_no_files_behind(tmp_path: Path) -> None:
    half, temporary = TensorProto.FLOAT16, tmp_path / "temporary"
    temporary.mkdir()
    model = save_model(
        tmp_path / "model.onnx",
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [("x", half, ["n", 1 << 18])],
        [("y", half, ["n", 1 << 18])],
        {"w": np.zeros(1 << 18, np.float16)},
    )
    command = [sys.executable, "-c", LOADING, str(model)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=500, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, str(4 << 18), "")
    assert list(temporary.iterdir()) == []


class Circle:
    """Keeps itself."""

    def __init__(self) -> None:
        self.me = self


def test_it_looks_seldom_and_not_at_what_was_there() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with infrequent_collection():
        assert gc.get_threshold()[0] == NEW_OBJECTS
        assert gc.get_freeze_count() > frozen
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_circles_are_found_all_the_same() -> None:
    with infrequent_collection():
        circles = [weakref.ref(Circle()) for _ in range(3 * NEW_OBJECTS)]
        assert circles[0]() is None


def test_no_collection_of_a_busy_server_looks_at_many_objects() -> None:
    seen: list[int] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

    with infrequent_collection():
        gc.callbacks.append(count)
        try:
            kept = [[index] for index in range(40 * NEW_OBJECTS)]
        finally:
            gc.callbacks.remove(count)
    assert len(kept) == 40 * NEW_OBJECTS
    assert len(seen) >= 30
    assert max(seen) < 3 * NEW_OBJECTS


def test_old_circles_are_found_in_an_idle_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOOK_S", 0.01)

    async def gone(circle: weakref.ref[Circle]) -> bool:
        looks = asyncio.create_task(collect_when_idle())
        while circle() is not None:  # noqa: ASYNC110  (nothing tells when an object has gone)
            await asyncio.sleep(0.001)
        return looks.cancel()

    with infrequent_collection():
        circle = Circle()
        for _ in range(DUE_COLLECTIONS + 1):
            gc.collect(1)
        old = weakref.ref(circle)
        del circle
        gc.collect(1)
        assert old() is not None
        assert asyncio.run(gone(old))


def test_threads_give_way_soon_until_the_server_ends() -> None:
    before_s = sys.getswitchinterval()
    try:
        for usual_s, expected_s in ((0.005, SWITCH_S), (SWITCH_S / 2, SWITCH_S / 2)):
            sys.setswitchinterval(usual_s)
            with short_switch_interval():
                assert sys.getswitchinterval() == pytest.approx(expected_s, abs=2e-6)
            assert sys.getswitchinterval() == pytest.approx(usual_s, abs=2e-6)
    finally:
        sys.setswitchinterval(before_s)


def test_an_error_leaves_the_collector_as_it_was() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), infrequent_collection():
        raise KeyError
    assert gc.get_threshold() == before


@pytest.mark.parametrize(("transport", "is_seldom"), [(TransportName.NGHTTP2, True), (TransportName.GRPCIO, False)])
def test_serving_has_its_collection_and_switch_interval(tmp_path: Path, transport: TransportName, is_seldom: bool) -> None:
    placement = DevicePlacement(use_gpu=False, threads=1)
    options = ServerOptions(
        path=save_mlp(tmp_path / "mlp.onnx"), grpc_port=0, placement=placement, http=None, transport=transport
    )
    seen: list[int] = []
    before_s = sys.getswitchinterval()

    def end(_: StartupReport) -> None:
        seen.append(gc.get_threshold()[0])
        assert sys.getswitchinterval() == pytest.approx(SWITCH_S, abs=2e-6)
        os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(serve(options, OnnxRuntime(), end))
    assert [threshold == NEW_OBJECTS for threshold in seen] == [is_seldom]
    assert sys.getswitchinterval() == before_s
