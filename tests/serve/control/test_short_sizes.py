"""What is found out about a model's short batches before it serves, and that it serves accordingly."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from serve.control import loader as loader_module
from serve.control import short_sizes as short_sizes_module
from serve.control.short_sizes import short_sizes
from serve.engine.backend import Backend
from serve.engine.errors import BackendError
from serve.engine.instances.short_batches import LONE_S
from serve.engine.repository.loaded_version import LoadedVersion
from serve.engine.repository.model_repository import find_models
from serve.engine.requests import InferRequest
from serve.engine.tensors import Tensors
from tests.models import save_mlp, save_model, save_picky, save_unbatched
from tests.serve.control.controlled import loader

SLOW_FROM = 8  # rows


class Clock:
    """On which nothing takes long that does not say so: other programs would make any run a long one."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += LONE_S / 100
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(short_sizes_module, "time", made)
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


def loaded(root: Path, make: Callable[[Path], Path] = save_mlp, config: str = "") -> LoadedVersion:
    make(root / "m" / "1" / "model.onnx")
    if config:
        (root / "m" / "config.pbtxt").write_text(config)
    (files,) = find_models(root)
    return loader().load(files)


def slow(root: Path, clock: Clock) -> tuple[LoadedVersion, Slow]:
    preferred = "dynamic_batching { preferred_batch_size: [4, 8, 16] }"
    version = loaded(root, config="max_batch_size: 32 " + preferred)
    backend = Slow(version.backends[0], clock)
    return replace(version, backends=[backend], short_s={}), backend


def test_sizes_are_tried_until_one_is_not_short(tmp_path: Path, clock: Clock) -> None:
    version, backend = slow(tmp_path, clock)
    found = short_sizes(version)
    assert list(found) == [1, 4]
    assert all(0 < seconds <= LONE_S for seconds in found.values())
    assert backend.runs == 1, "nothing larger, and that one no second time"


def test_a_runtime_that_keeps_its_caller_waiting_is_not_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(Slow):
        def run(self, inputs: Tensors) -> Tensors:
            threading.Event().wait(3 * LONE_S)  # as one with threads of its own does: no processor time of the caller's
            return self._backend.run(inputs)

    monkeypatch.setattr(short_sizes_module, "time", time)  # whose clock can only say that it was longer
    version = loaded(tmp_path)
    assert short_sizes(replace(version, backends=[Waiting(version.backends[0], Clock())])) == {}


def test_a_model_that_takes_long_is_not_run_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "QUICK_S", 0.0)
    assert loaded(tmp_path).short_s == {}


def test_the_loader_finds_them(tmp_path: Path) -> None:
    assert list(loaded(tmp_path).short_s) == [1, 32]


def save_lengths(path: Path) -> Path:
    nodes, fp32 = [helper.make_node("Relu", ["x"], ["y"])], TensorProto.FLOAT
    return save_model(path, nodes, [("x", fp32, ["b", "n"])], [("y", fp32, ["b", "n"])])


@pytest.mark.parametrize(
    ("make", "config"),
    [(save_mlp, 'parameters { key: "halfserve.warm_up" value { string_value: "off" } }'), (save_lengths, "")],
    ids=["not to be run", "of any length"],
)
def test_nothing_is_known_where_it_would_be_a_guess(tmp_path: Path, make: Callable[[Path], Path], config: str) -> None:
    assert loaded(tmp_path, make, config).short_s == {}


def test_a_model_without_batches_has_one_size(tmp_path: Path) -> None:
    assert list(loaded(tmp_path, save_unbatched).short_s) == [1]


def test_the_first_batch_that_serves_runs_on_the_event_loop_if_it_is_short(tmp_path: Path, clock: Clock) -> None:
    version, backend = slow(tmp_path, clock)
    model = replace(version, short_s=short_sizes(version)).model()

    async def first(rows: int) -> int:
        answered = asyncio.Event()
        inputs = {"x": np.ones((rows, 64), np.float16)}
        model.batcher.submit(
            InferRequest(inputs=inputs, outputs=("y",), rows=rows, bucket=None, deadline=None, done=lambda _: answered.set())
        )
        await asyncio.wait_for(answered.wait(), 20)
        return backend.threads[-1]

    async def scene() -> None:
        here = threading.get_ident()
        assert await first(1) == here
        assert await first(3) == here, "smaller than one that is short"
        assert await first(SLOW_FROM) != here
        await model.batcher.drain()

    asyncio.run(scene())


def test_a_model_that_fails_on_what_was_made_up_has_no_short_batches(tmp_path: Path, clock: Clock) -> None:
    class Failing(Slow):
        def run(self, inputs: Tensors) -> Tensors:
            raise BackendError(f"not {len(inputs)} of those")

    version = loaded(tmp_path, save_picky)
    assert short_sizes(replace(version, backends=[Failing(version.backends[0], clock)])) == {}
