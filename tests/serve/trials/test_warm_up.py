"""A model is run before it serves, and its short batches are measured."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import Backend, DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.dispatch.short_batches import LONE_S
from halfserve.serve.engine.errors import BackendError, ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_version, started
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors
from halfserve.serve.trials import at_load
from halfserve.serve.trials import tried_version as module
from halfserve.serve.trials.tried_version import TriedVersion
from halfserve.serve.trials.warm_up import short_sizes, warm_up
from tests.models import save_mlp, save_picky, save_text, save_unbatched
from tests.serve.model_control.controlled import loader

Ran = list[dict[str, Any]]


class Watched:
    """A backend whose inputs can be looked at afterwards."""

    def __init__(self, backend: Backend, ran: Ran) -> None:
        self._backend, self._ran = backend, ran

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, inputs: Tensors) -> Tensors:
        self._ran.append({name: array.copy() for name, array in inputs.items()})
        return self._backend.run(inputs)


class WatchedRuntime(OnnxRuntime):
    def __init__(self, ran: Ran) -> None:
        super().__init__()
        self._ran = ran

    def load(self, *arguments: Any) -> Any:
        return Watched(super().load(*arguments), self._ran)


def tried_out(root: Path, config: str = "", budget_s: float = 5.0) -> Ran:
    """What the model "m" in `root` ran on before it would have served."""
    if config:
        (root / "m" / "config.pbtxt").write_text(config)
    ran: Ran = []
    placement = DevicePlacement(use_gpu=False, threads=1)
    (files,) = find_models(root)
    warm_up(TriedVersion(load_version(files, WatchedRuntime(ran), placement, Defaults()), budget_s))
    return ran


def rows(ran: Ran) -> list[int]:
    return [next(iter(inputs.values())).shape[0] for inputs in ran]


def save(make: Callable[[Path], Path], root: Path) -> Path:
    make(root / "m" / "1" / "model.onnx")
    return root


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("", [1, 32]),
        ("max_batch_size: 1", [1]),
        ("max_batch_size: 16 dynamic_batching { preferred_batch_size: [4, 8] }", [1, 16, 8, 4]),
        ("max_batch_size: 4 instance_group { count: 2 kind: KIND_CPU }", [1, 4, 1, 4]),
        ('parameters { key: "halfserve.warm_up" value { string_value: "off" } }', []),
    ],
)
def test_every_size_of_batch_is_tried_on_every_copy(tmp_path: Path, config: str, expected: list[int]) -> None:
    assert rows(tried_out(save(save_mlp, tmp_path), config)) == expected


def test_when_time_is_up_one_row_has_been_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert rows(tried_out(save(save_mlp, tmp_path), budget_s=0)) == [1]
    assert caplog.messages == ["m/1: a batch of 32 and more were not tried out in 0 s"]


def test_a_batch_that_could_take_all_memory_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 4 * 8 * (64 + 10) * 2)
    config = "max_batch_size: 2000000000 dynamic_batching { preferred_batch_size: [8, 9] }"
    assert rows(tried_out(save(save_mlp, tmp_path), config)) == [1, 8]
    assert caplog.messages == ["m/1: batches of 2000000000, 9 were not tried out: they could take all memory that is available"]
    monkeypatch.setattr(module, "available_bytes", lambda: None)
    assert rows(tried_out(tmp_path, "max_batch_size: 9")) == [1, 9]


@pytest.mark.parametrize("dims", ["5000", "4611686018427387904"])
def test_declared_warm_up_requests_may_not_take_all_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dims: str
) -> None:
    save(save_lengths, tmp_path)
    describe = 'model_warmup {{ name: "{}" inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: {} zero_data: true }} }} }}'
    monkeypatch.setattr(module, "available_bytes", lambda: 4 * 4 * 4999)
    config = f"max_batch_size: 2 {describe.format('large', dims)} {describe.format('small', 3)}"
    assert [inputs["x"].shape for inputs in tried_out(tmp_path, config)] == [(1, 3), (1, 3), (2, 3)]
    assert caplog.messages == ["m/1: model_warmup 'large' was not run: it could take all memory that is available"]


def test_described_rows_count_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(save_lengths, tmp_path)
    describe = 'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: 99 zero_data: true } } }'
    monkeypatch.setattr(module, "available_bytes", lambda: 4 * 4 * 100 * 8)
    assert rows(tried_out(tmp_path, f"max_batch_size: 8 {describe}")) == [1, 1, 8]
    assert rows(tried_out(tmp_path, f"max_batch_size: 9 {describe}")) == [1, 1]


def test_a_model_without_batches_is_run_unpadded(tmp_path: Path) -> None:
    (inputs,) = tried_out(save(save_unbatched, tmp_path))
    assert inputs["x"].tolist() == [1, 1, 1]


WARM_UP = (
    'model_warmup {{ name: "w" batch_size: 2 count: 3 inputs {{ key: "x" value {{ data_type: TYPE_FP16 dims: 64 {} }} }} }}'
)


@pytest.mark.usefixtures("clock")
def test_a_huge_repeat_count_is_bounded_by_the_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(save_mlp, tmp_path)
    config = "max_batch_size: 4 " + WARM_UP.format("zero_data: true").replace("count: 3", "count: 4294967295")
    assert rows(tried_out(tmp_path, config, budget_s=0)) == [2, 1]
    assert "m/1: model_warmup 'w' was run 1 of 4294967295 times, for as long as 0 s" in caplog.text
    assert len(rows(tried_out(tmp_path, config, budget_s=0.05))) > 2


def test_declared_warm_up_requests_run_first(tmp_path: Path) -> None:
    save(save_mlp, tmp_path)
    (tmp_path / "m" / "warmup").mkdir()
    row = np.arange(64, dtype=np.float16)
    (tmp_path / "m" / "warmup" / "row.bin").write_bytes(row.tobytes())
    ran = tried_out(tmp_path, "max_batch_size: 4 " + WARM_UP.format('input_data_file: "row.bin"'))
    assert rows(ran) == [2, 2, 2, 1, 4]
    for inputs in ran:
        for given in inputs["x"]:
            np.testing.assert_array_equal(given, row)


@pytest.mark.parametrize(("data", "least"), [("zero_data: true", 1), ("random_data: true", 60)])
def test_data_is_made_up_as_described(tmp_path: Path, data: str, least: int) -> None:
    (inputs, *_) = tried_out(save(save_mlp, tmp_path), WARM_UP.format(data))
    assert len(np.unique(inputs["x"][0])) >= least
    np.testing.assert_array_equal(inputs["x"][0], inputs["x"][1])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (WARM_UP.format(""), "model_warmup 'w' input 'x' has no data, expected zero_data, random_data or input_data_file"),
        (WARM_UP.format('input_data_file: "../x"'), "has input_data_file '../x', expected a file name without folders"),
        (
            WARM_UP.format('input_data_file: "a\\000b"'),
            r"has input_data_file 'a\\x00b', expected a file name without folders or NUL",
        ),
        (WARM_UP.format('input_data_file: "x"'), "cannot read warmup/x: No such file or directory"),
        (WARM_UP.format('input_data_file: "short"'), "warmup/short has 3 bytes, expected 128 \\(one row\\)"),
        (WARM_UP.format("zero_data: true").replace("64", "63"), "has shape \\[1, 63\\], expected \\[-1, 64\\]"),
        (WARM_UP.format("zero_data: true").replace("FP16", "FP32"), "another data_type than the model, which takes TYPE_FP16"),
        (WARM_UP.format("zero_data: true").replace('"x"', '"z"'), "model_warmup 'w' has inputs 'z', expected 'x'"),
        ("max_batch_size: 1 " + WARM_UP.format("zero_data: true"), "has batch_size 2, expected at most 1"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path: Path, config: str, text: str) -> None:
    save(save_mlp, tmp_path)
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "short").write_bytes(b"abc")
    with pytest.raises(ModelLoadError, match=text):
        tried_out(tmp_path, config)


def test_data_may_not_be_a_link_out_of_the_repository(tmp_path: Path) -> None:
    root = save(save_mlp, tmp_path / "repository")
    (tmp_path / "row.bin").write_bytes(bytes(128))
    (root / "m" / "warmup").mkdir()
    (root / "m" / "warmup" / "row.bin").symlink_to(tmp_path / "row.bin")
    with pytest.raises(ModelLoadError, match=r"m/warmup/row.bin: is a link out of the repository"):
        tried_out(root, WARM_UP.format('input_data_file: "row.bin"'))


def test_a_model_that_cannot_run_is_refused(tmp_path: Path) -> None:
    save(save_picky, tmp_path)
    assert rows(tried_out(tmp_path)) == [1, 32]
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "nine.bin").write_bytes(np.int64(9).tobytes())
    nine = 'model_warmup { name: "w" inputs { key: "i" value { data_type: TYPE_INT64 dims: 1 input_data_file: "nine.bin" } } }'
    with pytest.raises(ModelLoadError, match="model.onnx: model_warmup 'w' failed: the model failed on this request: .*; mend"):
        tried_out(tmp_path, nine)


def test_a_model_with_open_sizes_may_refuse_guessed_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "(float[b, n] x) => (float[b, k, 4] y) { y = Reshape(x, shape) }"
    save_text(tmp_path / "m/1/model.onnx", text, shape=np.array([0, -1, 4]))
    assert rows(tried_out(tmp_path)) == [1]
    (message,) = caplog.messages
    assert message.startswith("m/1: cannot be tried out (the model failed on this request: ")
    describe = 'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_FP32 dims: 8 random_data: true } } }'
    assert [inputs["x"].shape for inputs in tried_out(tmp_path, describe)] == [(1, 8), (1, 8), (32, 8)]


class Wrong(Watched):
    def run(self, inputs: Tensors) -> Tensors:
        return {"y": super().run(inputs)["y"][:, :9]}


class Lost(Watched):
    def run(self, inputs: Tensors) -> Tensors:
        raise BackendError(f"CUDA failure 700: an illegal memory access was encountered ({len(inputs)})")


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        (Wrong, r"a batch of 1 failed: output 'y' has shape \[1, 9\], the model's file promises"),
        (Lost, "m/1/model.onnx: the device failed while it was tried out: .*memory access"),
    ],
    ids=["another shape", "lost device"],
)
def test_an_answer_that_does_not_come_or_fit_is_refused(tmp_path: Path, backend: type[Watched], text: str) -> None:
    version = loaded(tmp_path)
    with pytest.raises(ModelLoadError, match=text):
        warm_up(TriedVersion(replace(version, backends=[backend(version.backends[0], [])]), 5.0))


def test_the_log_is_silent_where_all_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tried_out(save(save_mlp, tmp_path))
    assert caplog.messages == []


def test_bfloat16_is_made_up_too(tmp_path: Path) -> None:
    save_text(tmp_path / "m/1/model.onnx", "(bfloat16[b, 2] x) => (bfloat16[b, 2] y) { y = Identity(x) }")
    describe = 'model_warmup { name: "w" inputs { key: "x" value { data_type: TYPE_BF16 dims: 2 random_data: true } } }'
    first, *others = tried_out(tmp_path, describe)
    assert first["x"].astype(np.float32).any()
    assert rows(others) == [1, 32]


SLOW_FROM = 8  # rows


class Clock:
    """On which nothing takes long that does not say so: other programs would make any run a long one."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += LONE_S / 100
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


class Slow:
    """Takes long for many rows."""

    provider = "CPUExecutionProvider"

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self.threads: list[int] = []
        self.runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def run(self, inputs: Tensors) -> Tensors:
        self.threads.append(threading.get_ident())
        if len(inputs["x"]) >= SLOW_FROM:
            self.runs += 1
            self._clock.now += 3 * LONE_S
        return self._backend.run(inputs)


def loaded(root: Path, make: Callable[[Path], Path] = save_mlp, config: str = "") -> Model:
    make(root / "m" / "1" / "model.onnx")
    if config:
        (root / "m" / "config.pbtxt").write_text(config)
    (files,) = find_models(root)
    return loader().load(files)


def slow(root: Path, clock: Clock) -> tuple[Model, Slow]:
    preferred = "dynamic_batching { preferred_batch_size: [4, 8, 16] }"
    version = loaded(root, config="max_batch_size: 32 " + preferred)
    backend = Slow(version.backends[0], clock)
    return replace(version, backends=[backend], short_s={}), backend


def test_sizes_are_tried_until_one_is_not_short(tmp_path: Path, clock: Clock) -> None:
    version, backend = slow(tmp_path, clock)
    found = short_sizes(TriedVersion(version, 5.0))
    assert list(found) == [1, 4]
    assert all(0 < seconds <= LONE_S for seconds in found.values())
    assert backend.runs == 1, "nothing larger, and that one no second time"


@pytest.mark.usefixtures("clock")
def test_a_runtime_that_keeps_its_caller_waiting_is_not_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(Slow):
        def run(self, inputs: Tensors) -> Tensors:
            threading.Event().wait(3 * LONE_S)  # as one with threads of its own does: no processor time of the caller's
            return self._backend.run(inputs)

    monkeypatch.setattr(module, "time", time)  # whose clock can only say that it was longer
    version = loaded(tmp_path)
    assert short_sizes(TriedVersion(replace(version, backends=[Waiting(version.backends[0], Clock())]), 5.0)) == {}


@pytest.mark.usefixtures("clock")
def test_a_model_that_takes_long_is_not_run_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_load, "QUICK_S", 0.0)
    assert loaded(tmp_path).short_s == {}


def save_lengths(path: Path) -> Path:
    return save_text(path, "(float[b, n] x) => (float[b, n] y) { y = Relu(x) }")


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("make", "config", "sizes"),
    [
        (save_mlp, "", [1, 32]),
        (save_mlp, 'parameters { key: "halfserve.warm_up" value { string_value: "off" } }', []),
        (save_lengths, "", []),
        (save_unbatched, "", [1]),
    ],
    ids=["in batches", "not to be run", "of any length", "without batches"],
)
def test_the_loader_finds_sizes_that_are_short(
    tmp_path: Path, make: Callable[[Path], Path], config: str, sizes: list[int]
) -> None:
    assert list(loaded(tmp_path, make, config).short_s) == sizes


async def test_a_first_batch_known_to_be_short_runs_on_the_event_loop(tmp_path: Path, clock: Clock) -> None:
    version, backend = slow(tmp_path, clock)
    model = started(replace(version, short_s=short_sizes(TriedVersion(version, 5.0))))

    async def first(rows: int) -> int:
        answered = asyncio.Event()
        inputs = {"x": np.ones((rows, 64), np.float16)}
        model.batcher.submit(
            InferRequest(inputs=inputs, outputs=("y",), rows=rows, bucket=None, deadline=None, done=lambda _: answered.set())
        )
        await asyncio.wait_for(answered.wait(), 60)
        return backend.threads[-1]

    here = threading.get_ident()
    assert await first(1) == here
    assert await first(3) == here, "smaller than one that is short"
    assert await first(SLOW_FROM) != here
    await model.batcher.drain()


def test_a_model_that_fails_on_guessed_inputs_has_no_short_batches(tmp_path: Path, clock: Clock) -> None:
    class Failing(Slow):
        def run(self, inputs: Tensors) -> Tensors:
            raise BackendError(f"not {len(inputs)} of those")

    version = loaded(tmp_path, save_picky)
    assert short_sizes(TriedVersion(replace(version, backends=[Failing(version.backends[0], clock)]), 5.0)) == {}
