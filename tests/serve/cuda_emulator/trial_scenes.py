"""How the ways to compute on a device are chosen when a model is loaded; see scenes.py. The times are given."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends import cuda_trials
from halfserve.serve.backends.cuda_trials import WayCost, measured
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntimeBackend
from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import Backend, DevicePlacement
from halfserve.serve.engine.cuda_driver import cuda_driver
from halfserve.serve.engine.tensors import Array
from halfserve.serve.trials.decisions import Decisions
from tests.export.stored_models import parse
from tests.serve.cuda_emulator.copying_model import check, log, save, with_graphs, with_options
from tests.serve.cuda_emulator.copying_model import load as load_with

WAYS = "halfserve.cuda_ways"


@dataclass
class GivenTimes:
    """Measures what a test says, in the order of the ways that are measured."""

    ms: Sequence[tuple[float, float]]  # times, and times on the processor; the first are those of the usual way
    answers: list[float] = field(default_factory=list)
    recorded: list[bool] = field(default_factory=list)  # whether each backend that was measured records CUDA graphs

    def __call__(self, backend: Backend, batch: Mapping[str, Array]) -> WayCost:
        assert isinstance(backend, OnnxRuntimeBackend)
        for _ in range(3):  # of which the second records, and the third replays
            backend.run({name: array.astype(backend.compute_dtype(name)) for name, array in batch.items()})
        number = len(self.recorded)
        self.recorded.append(backend.records_graphs)
        answer = self.answers[number] if self.answers else 1.0
        return WayCost(*self.ms[number], {"y": np.full(3, answer, np.float32)})


def save_convolution(path: Path, kind: str = "float16") -> Path:
    model = parse(
        f"m ({kind}[n, 8, 4, 4] x) => ({kind}[n, 8, 4, 4] y) {{ y = Conv <pads = [1, 1, 1, 1]> (x, w) }}", opset=17, ir=8
    )
    weight = np.ones((8, 8, 3, 3), np.float32 if kind == "float" else np.float16)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, path)
    return path


def load(
    path: Path,
    measure: Callable[[Backend, Mapping[str, Array]], WayCost] = measured,
    config: ModelConfig | None = None,
    *,
    decisions: Decisions | None = None,
    clock: Callable[[], float] | None = None,
) -> tuple[OnnxRuntimeBackend, ModelConfig]:
    runtimes, config = Runtimes(decisions=decisions), config or ModelConfig(max_batch_size=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_trials, "measured", measure)
        if clock is not None:
            patch.setattr(cuda_trials, "time", SimpleNamespace(monotonic=clock))
        backend = runtimes.load(path, runtimes.describe(path), DevicePlacement(), config)
    assert isinstance(backend, OnnxRuntimeBackend)
    assert backend.provider == "CUDAExecutionProvider"
    return backend, config


def options(backend: OnnxRuntimeBackend) -> dict[str, str]:
    found: dict[str, str] = backend._session.get_provider_options()["CUDAExecutionProvider"]
    return found


@pytest.fixture(autouse=True)
def awake() -> None:
    driver = cuda_driver()
    assert driver is not None
    driver.set_blocking_waits(0, on=False)


@pytest.mark.parametrize(
    ("ms", "chosen"),
    [
        ([(9, 9), (5, 5), (20, 20), (6, 6)], "nhwc"),
        ([(9, 9), (8.9, 8.9), (20, 20), (8.9, 1)], "blocking"),
        ([(9, 9), (5, 5), (20, 20), (5.2, 1)], "nhwc, blocking"),
        ([(9, 9), (10, 9), (20, 20), (9.6, 1)], "none"),
    ],
    ids=["faster", "frees the processor", "both", "neither"],
)
def test_the_ways_that_pay_are_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ms: list[tuple[float, float]], chosen: str
) -> None:
    path, times = save_convolution(tmp_path / "m.onnx"), GivenTimes(ms)
    with caplog.at_level(logging.INFO):
        backend, config = load(path, times)
    assert config.parameters[WAYS].string_value == chosen
    assert options(backend)["prefer_nhwc"] == ("1" if "nhwc" in chosen else "0")
    driver = cuda_driver()
    assert driver is not None
    assert driver.blocking == ({0} if "blocking" in chosen else set())
    said = config.parameters["halfserve.measured"].string_value
    assert said.startswith("on CUDA 9 ms (9 ms on the processor) for a batch of 4; nhwc ")
    assert "; copies 20 ms (20 ms on the processor); blocking " in said
    assert f"is computed on CUDA by {chosen.replace(', ', ' and ').replace('none', 'the usual way')} ({said})" in caplog.text


def test_a_way_with_other_answers_is_left_out(tmp_path: Path) -> None:
    times = GivenTimes([(9, 9), (1, 1), (9, 9), (9, 9)], answers=[1.0, 1.2, 1.0, 1.0])
    _, config = load(save_convolution(tmp_path / "m.onnx"), times)
    assert config.parameters[WAYS].string_value == "none"
    assert "nhwc gives answers that differ by 0.2 of the largest value" in config.parameters["halfserve.measured"].string_value


def test_the_choice_is_remembered_by_file_and_settings(tmp_path: Path) -> None:
    path, decisions = save_convolution(tmp_path / "m.onnx"), Decisions(tmp_path / "cache")
    for times in (GivenTimes([(9, 9), (5, 5), (6, 6), (6, 6)]), GivenTimes([])):
        backend, config = load(path, times, decisions=decisions)
        assert config.parameters[WAYS].string_value == "nhwc"
        assert "nhwc 5 ms" in config.parameters["halfserve.measured"].string_value
        assert options(backend)["prefer_nhwc"] == "1"
    again = GivenTimes([(9, 9), (10, 9), (9, 9), (9, 9)])
    _, config = load(path, again, ModelConfig(max_batch_size=8), decisions=decisions)
    assert config.parameters[WAYS].string_value == "none"
    assert len(again.recorded) == 4


def test_no_way_is_tried_when_the_time_is_over(tmp_path: Path) -> None:
    clock = iter([0.0, 19.0, 21.0, 22.0])
    times = GivenTimes([(9, 9), (5, 5)])
    _, config = load(save_convolution(tmp_path / "m.onnx"), times, clock=lambda: next(clock))
    assert config.parameters[WAYS].string_value == "nhwc"
    assert config.parameters["halfserve.measured"].string_value.endswith("copies not tried in 20 s; blocking not tried in 20 s")


def test_graphs_are_tried_for_a_model_of_fixed_sizes(tmp_path: Path, device: ctypes.CDLL) -> None:
    times = GivenTimes([(9, 9), (5, 5), (9, 9), (9, 9)])
    backend, config = load(save(tmp_path / "m.onnx"), times)
    assert config.parameters[WAYS].string_value == "graphs"
    assert times.recorded == [False, True, True, True]
    log(device)
    for _ in range(3):
        backend.run({"x": np.zeros((2, 4), np.float32)})
    assert log(device).count("replay") == 2


def test_a_way_that_fails_is_left_out(tmp_path: Path, device: ctypes.CDLL) -> None:
    device.emulated_break()
    _, config = load(save(tmp_path / "m.onnx"), GivenTimes([(9, 9), (1, 1), (1, 1), (9, 9)]))
    assert config.parameters[WAYS].string_value == "none"
    said = config.parameters["halfserve.measured"].string_value
    assert "; graphs cannot be recorded; copies needs CUDA graphs, which fail or are off; blocking 9 ms" in said


def test_copies_by_the_driver_give_the_same_answers(tmp_path: Path, device: ctypes.CDLL) -> None:
    backend = load_with(tmp_path / "m.onnx", with_graphs(**{WAYS: "copies"}))
    log(device)
    for start in range(4):
        check(backend, 2, start)
    made = log(device)
    assert made.count("replay") == 3
    copies = [sum(line.startswith(name) for line in made) for name in ("cuMemcpyHtoD", "cuMemcpyDtoH")]
    assert copies == [3, 3], made


def test_configured_ways_are_not_tried(tmp_path: Path) -> None:
    config = ModelConfig(max_batch_size=4)
    config.parameters[WAYS].string_value = "nhwc"
    backend, _ = load(save_convolution(tmp_path / "m.onnx"), GivenTimes([]), config)
    assert options(backend)["prefer_nhwc"] == "1"
    single = with_options(prefer_nhwc="0")
    single.max_batch_size = 4
    backend, single = load(save_convolution(tmp_path / "m.onnx"), GivenTimes(4 * [(9, 9)]), single)
    assert options(backend)["prefer_nhwc"] == "0"
    assert "nhwc" not in single.parameters["halfserve.measured"].string_value


def test_only_float16_convolutions_are_tried_in_nhwc(tmp_path: Path) -> None:
    _, config = load(save_convolution(tmp_path / "m.onnx", "float"), GivenTimes(4 * [(9, 9)]))
    assert "nhwc" not in config.parameters["halfserve.measured"].string_value


def test_real_times_choose_something(tmp_path: Path) -> None:
    _, config = load(save_convolution(tmp_path / "m.onnx"))
    assert config.parameters["halfserve.measured"].string_value.startswith("on CUDA ")
