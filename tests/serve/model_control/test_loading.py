"""The loader's thread, and loads that take too long."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.background_threads import Worker, pause
from halfserve.serve.model_control import switch
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.model_control.loader_thread import LoaderThread
from halfserve.serve.model_control.model_control import ModelControl
from tests.models import save_mlp
from tests.serve.ensemble_folders import CHAIN, save_add, save_ensemble
from tests.serve.model_control.controlled import HeldRuntime, ask, control, lines
from tests.serve.running_server import WAIT_S, RunningServer, running_server
from tests.serve.standing_still import StandingLoop

T = TypeVar("T")
linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have scheduling policies on Linux")


def on_the_thread(function: Callable[[], T]) -> T:
    async def main() -> T:
        thread = LoaderThread()
        try:
            return await thread.run(function)
        finally:
            thread.stop()

    return asyncio.run(main())


@linux
def test_the_loader_thread_runs_under_sched_batch() -> None:
    assert on_the_thread(lambda: os.sched_getscheduler(0)) == os.SCHED_BATCH


def test_a_functions_error_is_raised_and_the_thread_continues() -> None:
    def fail() -> None:
        raise KeyError("broken")

    async def main() -> int:
        thread = LoaderThread()
        try:
            with pytest.raises(KeyError, match="broken"):
                await thread.run(fail)
            return await thread.run(lambda: 7)
        finally:
            thread.stop()

    assert asyncio.run(main()) == 7


def test_functions_run_in_order_on_one_thread() -> None:
    async def main() -> tuple[list[int], set[int]]:
        thread, order, idents = LoaderThread(), list[int](), set[int]()

        def work(number: int) -> None:
            order.append(number)
            idents.add(threading.get_ident())

        try:
            await asyncio.gather(*(thread.run(work, number) for number in range(20)))
            return order, idents
        finally:
            thread.stop()

    order, idents = asyncio.run(main())
    assert order == list(range(20))
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_work_pauses_once_there_are_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[int] = []  # which thread did; those of tests before may still do
    monkeypatch.setattr("time.sleep", lambda _: rested.append(threading.get_ident()))

    async def main() -> tuple[int, int]:
        thread = LoaderThread()
        try:
            ours = await thread.run(threading.get_ident)
            await thread.run(pause)
            before = rested.count(ours)
            thread.in_service = True
            await thread.run(pause)
            return before, rested.count(ours)
        finally:
            thread.stop()

    assert asyncio.run(main()) == (0, 2), "in front of it and where it says"


def test_a_hung_function_is_abandoned_and_another_thread_goes_on() -> None:
    release, left = threading.Event(), threading.Event()

    def hang() -> str:
        assert release.wait(60)
        left.set()
        return "too late"

    async def main() -> tuple[list[int], str]:
        thread = LoaderThread()
        try:
            hanging = asyncio.ensure_future(thread.run(hang, limit_s=0.05))
            behind = [asyncio.ensure_future(thread.run(lambda n=n: n)) for n in range(3)]
            with pytest.raises(TimeoutError, match=r"not done within 0\.05 s"):
                await hanging
            done = await asyncio.gather(*behind)
            release.set()
            await asyncio.to_thread(left.wait, 20)
            return done, await thread.run(lambda: "next", limit_s=20)
        finally:
            release.set()
            thread.stop()

    assert asyncio.run(main()) == ([0, 1, 2], "next")


def test_a_hung_load_is_given_up_even_without_a_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    release, asked = threading.Event(), list[str]()

    class Scarce(Worker):
        def __init__(self, name: str) -> None:
            asked.append(name)
            if len(asked) < 3:
                raise RuntimeError("can't start new thread")
            super().__init__(name)

    async def main() -> int:
        thread = LoaderThread("slow")
        monkeypatch.setattr("halfserve.serve.model_control.loader_thread.Worker", Scarce)
        monkeypatch.setattr("halfserve.serve.model_control.loader_thread.AGAIN_S", 0.01)
        try:
            hanging = asyncio.ensure_future(thread.run(lambda: release.wait(60), limit_s=0.05))
            behind = asyncio.ensure_future(thread.run(lambda: 7))
            with pytest.raises(TimeoutError, match=r"not done within 0\.05 s"):
                await asyncio.wait_for(hanging, 60)
            return await asyncio.wait_for(behind, 60)
        finally:
            release.set()
            thread.stop()

    assert asyncio.run(main()) == 7
    assert asked == ["slow"] * 3


def test_the_limit_counts_from_its_beginning() -> None:
    async def main() -> list[str]:
        thread, first = LoaderThread(), threading.Event()
        try:
            both = [
                asyncio.ensure_future(thread.run(lambda: first.wait(WAIT_S) and "first")),
                asyncio.ensure_future(thread.run(lambda: "second", limit_s=WAIT_S)),
            ]
            await asyncio.sleep(0)  # both are given to the thread
            loop.stand_still(2 * WAIT_S, lambda: None)
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # a time limit that is over has been looked at
            assert not any(one.done() for one in both)
            first.set()
            return [str(done) for done in await asyncio.gather(*both)]
        finally:
            first.set()
            thread.stop()

    loop = StandingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(main()) == ["first", "second"]


LIMIT_S = 0.5


@contextmanager
def controlling(
    root: Path, runtime: OnnxRuntime, release: threading.Event, **options: Any
) -> Iterator[tuple[RunningServer, ModelControl, triton.InferenceServerClient]]:
    """A server without models, what controls its models, and a client; `release` is set at the end."""
    with running_server(list) as server, triton.InferenceServerClient(server.address) as client:
        made = server.call(lambda: control(server.core, root, ControlMode.EXPLICIT, runtime, **options))
        try:
            server.run(made.start())
            yield server, made, client
        finally:
            release.set()
            server.call(made.close)


def save_models(root: Path, *names: str) -> None:
    for name in names:
        save_mlp(root / name / "1" / "model.onnx")


@pytest.mark.parametrize("stuck", ["version_fingerprint", "models_below"])
def test_files_that_cannot_be_looked_at_in_time_are_not_in_the_others_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    """As those of a file server that has gone."""
    save_models(tmp_path, "stuck", "well")
    release, real = threading.Event(), getattr(switch, stuck)

    def look(*arguments: Any, **options: Any) -> Any:
        assert "stuck" not in str(arguments) or release.wait(WAIT_S)
        return real(*arguments, **options)

    monkeypatch.setattr(switch, stuck, look)
    with controlling(tmp_path, OnnxRuntime(), release, load_limit_s=LIMIT_S) as (_, made, client):
        with pytest.raises(InferenceServerException, match=r"stuck: its files were not looked at within 0\.5 s"):
            client.load_model("stuck", client_timeout=WAIT_S)
        made._switch._load_limit_s = WAIT_S  # on a busy machine a good load may take longer than LIMIT_S
        client.load_model("well", client_timeout=WAIT_S)
        assert client.is_model_ready("well")


def test_a_load_that_hangs_is_refused_and_others_go_on(tmp_path: Path) -> None:
    save_models(tmp_path, "stuck", "well")
    runtime = HeldRuntime("stuck")
    with controlling(tmp_path, runtime, runtime.release, load_limit_s=LIMIT_S) as (server, made, client):
        with pytest.raises(InferenceServerException, match=r"within 0\.5 s \(--load-seconds\), and is given up"):
            client.load_model("stuck", client_timeout=WAIT_S)
        made._switch._load_limit_s = WAIT_S  # on a busy machine a good load may take longer than LIMIT_S
        client.load_model("well", client_timeout=WAIT_S)
        assert client.is_model_ready("well")
        runtime.release.set()
        assert runtime.ended.wait(WAIT_S)
        client.load_model("well", client_timeout=WAIT_S)
        assert [line[:3] for line in lines(server)] == [("stuck", "1", "UNAVAILABLE"), ("well", "1", "READY")]
        assert len(ask(client, "well")) == 10


def test_a_step_is_unloaded_after_the_load_of_its_ensemble(tmp_path: Path) -> None:
    save_add(tmp_path / "one", 1)
    save_add(tmp_path / "ten", 10)
    save_ensemble(tmp_path / "chain", CHAIN)
    runtime = HeldRuntime("ten")
    with controlling(tmp_path, runtime, runtime.release) as (server, made, client), ThreadPoolExecutor(1) as pool:
        loading = pool.submit(client.load_model, "chain", client_timeout=WAIT_S)
        try:
            assert runtime.entered.wait(WAIT_S)
            unloading = server.call(lambda: asyncio.ensure_future(made.unload("one")))
            server.call(lambda: None)
        finally:
            runtime.release.set()
        loading.result(WAIT_S)
        server.run(asyncio.wait_for(unloading, WAIT_S))
        assert [client.is_model_ready(name) for name in ("chain", "one", "ten")] == [False, False, True]


def test_the_index_does_not_wait_for_a_load(tmp_path: Path) -> None:
    save_models(tmp_path, "a", "b")
    runtime = HeldRuntime("a", "b")
    with controlling(tmp_path, runtime, runtime.release) as (_, _, client), ThreadPoolExecutor(1) as pool:
        loading = pool.submit(client.load_model, "a", client_timeout=WAIT_S)
        try:
            assert runtime.entered.wait(WAIT_S)
            save_models(tmp_path, "c")
            index = client.get_model_repository_index(client_timeout=WAIT_S).models
            assert [(m.name, m.version, m.state) for m in index] == [
                ("a", "1", "LOADING"),
                ("b", "", "UNAVAILABLE"),
                ("c", "", "UNAVAILABLE"),
            ]
        finally:
            runtime.release.set()
        loading.result(WAIT_S)
