"""Copies of a model that break are taken out and loaded again; their requests are retried once."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import Backend, Runtime
from halfserve.serve.engine.errors import InferenceError, ModelLoadError, is_device_lost
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Array
from tests.models import save_counter, save_mlp, save_text
from tests.serve.conftest import load_repository
from tests.serve.engine.fragile_copies import WAIT_S, Copies, Fragile, Scene, Slow, runner_of
from tests.serve.engine.precision_guard.guarded_models import ask_model


async def test_a_copy_with_a_lost_device_is_reloaded_and_its_requests_replayed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = Fragile(lost=True), Fragile()
    scene = Scene([first], lambda: second)
    assert await scene.ask(1, 2, 3) == [2, 3, 4]
    assert (first.batches, second.batches) == ([[1, 2, 3]], [[1], [2], [3]])
    (instance,) = scene.instances
    assert (scene.reloads, instance.restarts, instance.is_up) == (1, 1, True)
    assert instance.fault == "CUDA failure 700: an illegal memory access was encountered"
    assert (scene.statistics.totals.success.count, scene.statistics.totals.fail.count) == (3, 0)
    await scene.batcher.drain()
    out, up = (record.getMessage() for record in caplog.records)
    assert out == (
        "m/1 instance 0: is taken out (CUDA failure 700: an illegal memory access was encountered); it is loaded again "
        "in 0.001 s"
    )
    assert up == "m/1 instance 0: is up again"


async def test_a_request_that_breaks_two_copies_fails(copies: Copies) -> None:
    scene = copies([Fragile()], Fragile)
    assert await scene.ask(-1) == ["the device failed while it computed this request; send it again"]
    assert await scene.ask(5) == [6]
    assert scene.reloads == 2


async def test_a_request_that_breaks_copies_fails_alone(copies: Copies) -> None:
    scene = copies([Fragile()], Fragile)
    assert await scene.ask(1, -1, 3) == [2, "the device failed while it computed this request; send it again", 4]
    assert scene.reloads == 2


async def test_another_copy_takes_over_at_once(copies: Copies) -> None:
    good, broken = Fragile(), Fragile(lost=True)
    scene = copies([good, broken], Fragile, first_wait_s=3600.0)
    assert await scene.ask(1, 2) == [2, 3]
    assert [instance.is_up for instance in scene.instances] == [True, False]
    assert await scene.ask(7) == [8]
    assert scene.reloads == 0


async def test_a_copy_that_cannot_be_reloaded_leaves_the_others_serving(copies: Copies) -> None:
    def load() -> Fragile:
        raise ModelLoadError("the file is gone")

    broken = Fragile(lost=True)
    scene = copies([Fragile(), broken], load)
    assert await scene.ask(1) == [2]
    while scene.reloads < 2:  # so it could not be loaded the first time
        await scene.tried_again()
    assert broken.batches == [[1]]
    assert await scene.ask(3) == [4]


async def test_a_request_cancelled_while_its_copy_breaks_is_not_replayed(copies: Copies) -> None:
    first, second = Slow(), Fragile()
    scene = copies([first], lambda: second)
    gone = InferRequest({"x": np.array([[-1.0]], np.float32)}, ("y",), 1, (1,), None, lambda _: None)
    scene.batcher.submit(gone)
    assert await asyncio.to_thread(first.entered.wait, WAIT_S)
    scene.batcher.cancel(gone)
    first.release.set()
    await scene.up_again()
    assert second.batches == []


async def test_draining_waits_for_replayed_requests() -> None:
    broken = Fragile(lost=True)
    scene = Scene([broken], Fragile)
    answer = scene.submit(1)
    await asyncio.sleep(0)
    await scene.batcher.drain()
    assert not isinstance(answer.result(), InferenceError)


class OnCpu(Fragile):
    provider = "CPUExecutionProvider"


class SlowOnCpu(Slow):
    provider = "CPUExecutionProvider"


async def test_requests_replayed_before_a_short_batch_leave_its_copy_free(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, told = asyncio.get_running_loop(), threading.Event()
    good, broken = OnCpu(), SlowOnCpu()
    scene = copies([good, broken], OnCpu, short_s={1: 1e-6})
    broken._lost = True
    lost = scene.submit(1, rows=2)  # nothing is known of batches of two rows: it is computed on a thread
    assert await asyncio.to_thread(broken.entered.wait, WAIT_S)
    tell = loop.call_soon_threadsafe

    def tell_both(*what: Any) -> None:
        tell(*what)
        told.set()

    monkeypatch.setattr(loop, "call_soon_threadsafe", tell_both)
    broken.release.set()
    assert told.wait(WAIT_S)  # the end of the one and the beginning of the other are for the same turn of the loop
    short = scene.submit(5)
    answers = await asyncio.gather(lost, short)
    assert [not isinstance(answer, InferenceError) and answer["y"][:, 0].tolist() for answer in answers] == [[2, 2], [6]]
    assert good.batches == [[5], [1, 1]]


STICKY = "CUDA failure 700: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        (STICKY, True),
        ("CUDA error: operation not supported on global/shared address space", True),
        ("CUDA failure 220: uncorrectable NVLink error detected during the execution", True),
        ("CUDA failure 2: out of memory", False),
        ("CUDA failure 900: operation not permitted when stream is capturing", False),
    ],
)
def test_runtime_errors_of_a_lost_device_are_recognized(text: str, *, is_lost: bool) -> None:
    assert is_device_lost(RuntimeError(text)) is is_lost


class Refusing:
    """Loads nothing, but raises this, so often; then a copy that works."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def __call__(self) -> Backend:
        if self._errors:
            raise self._errors.pop(0)
        return Fragile()


def wrapped() -> ModelLoadError:
    error = ModelLoadError("m.onnx: cannot be loaded")
    error.__cause__ = RuntimeError(STICKY)
    return error


@pytest.mark.parametrize("error", [RuntimeError(f"{STICKY}\n in x"), wrapped()], ids=["plain", "wrapped"])
async def test_a_failed_reload_on_a_lost_device_is_reported(copies: Copies, error: Exception) -> None:
    told: list[str] = []
    first = Fragile(lost=True)
    scene = copies([first], Refusing(error, error))
    scene.instances[0].recovery.on_lost_device = told.append
    assert "cannot be loaded just now" in str((await scene.ask(1))[0])
    assert told == [str(error).split("\n")[0]]
    await scene.up_again()
    assert len(told) == 2


@pytest.mark.parametrize("file", ["m", "illegal memory access"])
async def test_other_reasons_are_not_told(file: str) -> None:
    told: list[str] = []
    first = Fragile(lost=True)
    scene = Scene([first], Refusing(ModelLoadError(f"/models/{file}/1/model.onnx: not found")))
    scene.instances[0].recovery.on_lost_device = told.append
    await scene.ask(1)
    await scene.up_again()
    await asyncio.sleep(0)
    await scene.batcher.drain()
    assert told == []


LONG = 10**12  # weeks


def number(n: int) -> Array:
    return np.array([n], np.int64)


def save_products(path: Path) -> Path:
    """h0 FP32 [1, rows, 512] -> y FP32 [1], the sum of h0 after 300 products with the identity."""
    products = " ".join(f"h{step + 1} = MatMul(h{step}, w)" for step in range(300))
    text = (
        f"(float[1, rows, 512] h0) => (float[1] y) {{ {products} sum = ReduceSum<keepdims = 0>(h300)  y = Reshape(sum, one) }}"
    )
    return save_text(path, text, w=np.eye(512, dtype=np.float32), one=np.array([1]))


def rows(n: int) -> Array:
    return np.full((1, n, 512), 1 / 512, np.float32)


@pytest.mark.parametrize(
    ("save", "inputs", "too_long"),
    # A loop is one node, which OpenVINO does not leave; of many nodes both runtimes leave the next out.
    [(save_counter, number, LONG), pytest.param(save_products, rows, 1 << 15, marks=pytest.mark.long)],
)
async def test_a_copy_that_exceeds_its_time_limit_is_replaced(
    tmp_path: Path, save: Callable[[Path], Path], inputs: Callable[[int], Array], too_long: int, runtime: Runtime
) -> None:
    if save is save_counter and not isinstance(runtime, OnnxRuntime):
        pytest.skip("OpenVINO computes a loop to its end")
    save(tmp_path / "counter" / "1" / "model.onnx")
    limit = 'parameters { key: "halfserve.max_compute_s" value { string_value: "0.5" } }'
    (tmp_path / "counter" / "config.pbtxt").write_text(f"max_batch_size: 0 {limit}")
    before = set(threading.enumerate())
    (model,) = load_repository(tmp_path, runtime)
    (instance,) = model.batcher.instances
    first = runner_of(instance).backend
    assert await ask_model(model, inputs(5)) == [5.0]
    assert await ask_model(model, inputs(too_long)) == (
        "the model did not answer within its 0.5 s and is being restarted; try again later"
    )
    ready = [model.is_ready]
    assert await ask_model(model, inputs(7)) == [7.0]
    assert [*ready, model.is_ready] == [False, True]
    assert (instance.restarts, instance.fault) == (1, "a batch was not computed within 0.5 s")
    assert runner_of(instance).backend is not first
    await model.batcher.drain()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "what was given up computes no further"


async def test_a_model_answers_again_after_a_batch_that_its_runtime_fails_on(tmp_path: Path, runtime: Runtime) -> None:
    """OpenVINO's compiled model can answer wrongly afterwards, and is compiled again."""
    text = "(int64[1, 2] sizes) => (float[n, m] y) { s = Reshape(sizes, flat)  r = Reshape(w, s)  y = Add(r, r) }"
    path = save_text(tmp_path / "m" / "1" / "model.onnx", text, w=np.ones(4, np.float32), flat=np.array([-1]))
    (path.parents[1] / "config.pbtxt").write_text("max_batch_size: 0")
    (model,) = load_repository(tmp_path, runtime)
    assert await ask_model(model, np.array([[2, 2]])) == [2.0] * 4
    refused = await ask_model(model, np.array([[3, 2]]))
    assert isinstance(refused, str)
    assert await ask_model(model, np.array([[1, 4]])) == [2.0] * 4
    await model.batcher.drain()


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "weights.bin"])
def test_a_copy_is_not_reloaded_from_changed_files(tmp_path: Path, name: str, runtime: Runtime) -> None:
    path = save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    folder = path.parent
    (folder / "model.onnx.data").write_bytes(b"weights")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (model,) = load_repository(tmp_path, runtime)
    assert model.reload is not None
    file = folder / name
    before, content = file.stat(), file.read_bytes()
    (folder / f"{name}.bak").write_bytes(content)
    model.reload(0)
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(
        ModelLoadError, match=f"{name}: has been changed since the model was loaded; put the file back, or load"
    ):
        model.reload(0)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    model.reload(0)
