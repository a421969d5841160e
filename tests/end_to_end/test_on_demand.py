"""Twenty seconds of all kinds of clients on a server that loads models on demand, with every answer checked.

TEST_SCALE lengthens it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from benchmarks.harness.models import STEPS, save_models, save_shift
from benchmarks.harness.server_process import server_process
from halfserve import Client
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.client.errors import DeadlineExceeded, ServerUnavailable
from halfserve.serve.protocol.service import INFER_PATH
from tests.scale import scaled
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.ensemble_folders import save_ensemble

SECONDS = scaled(20)
WAIT_S = 60.0
MIB = 4096  # values per row within a model whose weights take 1 MiB
COUNT = 10  # models of 1 MiB, of which some fit
BOUND_MIB = 6
PINNED, PIPE, BROKEN, HUGE = "pinned", "pipe", "broken", "huge"
PIN = 'parameters { key: "halfserve.pinned" value { string_value: "on" } }'
Random = np.random.Generator
Array = np.ndarray[Any, Any]


def save_repository(path: Path) -> None:
    save_models(path)
    for number in range(COUNT):
        save_shift(path, f"shift_{number}", number, MIB)
    save_shift(path, PINNED, 100, MIB)
    (path / PINNED / "config.pbtxt").write_text(PIN)
    steps = step("shift_0", "x=x", "y=t"), step("shift_1", "x=t", "y=out")
    save_ensemble(path / PIPE, ensemble(*steps, input="x:FP16:64", output="out:FP16:64"))
    (path / BROKEN / "1").mkdir(parents=True)
    (path / BROKEN / "1" / "model.onnx").write_bytes(b"no model")
    save_shift(path, HUGE, 0, 8 * MIB)


def row(random: Random) -> Array:
    return random.integers(-100, 100, (1, 64)).astype(np.float16)


def ask(client: Client, name: str, x: Array, expected: Array, **options: Any) -> None:
    answer = client.infer(name, {"x": x}, **options)
    assert np.array_equal(next(iter(answer.values())), expected), name


def ask_any(client: Client, random: Random, **options: Any) -> None:
    number, x = int(random.integers(COUNT)), row(random)
    ask(client, f"shift_{number}", x, 2 * x + np.float16(number), **options)


def ask_briefly(client: Client, random: Random) -> None:
    """Ask with a deadline that a load may exceed."""
    try:
        ask_any(client, random, timeout_s=float(random.uniform(0.005, 0.2)))
    except DeadlineExceeded:
        return


def ask_and_leave(client: Client, random: Random) -> None:
    """Cancel a request, often while its model is loaded."""
    request = ModelInferRequest(model_name=f"shift_{random.integers(COUNT)}", raw_input_contents=[row(random).tobytes()])
    request.inputs.add(name="x", datatype="FP16", shape=[1, 64])
    with grpc.insecure_channel(client.address) as channel:
        call = channel.unary_unary(INFER_PATH).future(request.SerializeToString(), timeout=WAIT_S)
        time.sleep(random.uniform(0, 0.1))
        call.cancel()


def ask_pinned(client: Client, random: Random) -> None:
    x = row(random)
    ask(client, PINNED, x, 2 * x + np.float16(100))


def ask_pipe(client: Client, random: Random) -> None:
    x = row(random)
    ask(client, PIPE, x, 2 * (2 * x) + np.float16(1))


def ask_for_long(client: Client, random: Random) -> None:
    """Ask for an answer that takes so long that others want the model's memory meanwhile."""
    n = np.array([random.integers(10_000, 60_000)], np.int64)
    assert client.infer(STEPS, {"n": n})["y"] == n


def ask_broken(client: Client, _: Random) -> None:
    with pytest.raises(ServerUnavailable, match="broken/1/model.onnx"):
        client.infer(BROKEN, {"x": np.zeros((1, 64), np.float16)})


def ask_huge(client: Client, _: Random) -> None:
    with pytest.raises(ServerUnavailable, match="raise --max-loaded-mib"):
        client.infer(HUGE, {"x": np.zeros((1, 64), np.float16)})


WORKS = (ask_any, ask_any, ask_any, ask_briefly, ask_and_leave, ask_pinned, ask_pipe, ask_for_long, ask_broken, ask_huge)


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("processes", [1, 2])
def test_every_client_gets_what_it_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # spinning threads would take the cores from the tests beside this one
    save_repository(tmp_path / "models")
    options = ("--load-on-demand", "--max-loaded-mib", str(BOUND_MIB * processes), "--log-format", "json")
    stop, done = threading.Event(), Counter[str]()

    def work(act: Callable[[Client, Random], None], seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            with Client(server.address, retries=0, timeout_s=WAIT_S) as client:
                while not stop.is_set():
                    act(client, random)
                    done[act.__name__] += 1
        finally:
            stop.set()

    several = ("--processes", str(processes)) if processes > 1 else ()
    with server_process(tmp_path / "models", *options, *several) as server, ThreadPoolExecutor(len(WORKS)) as pool:
        working = [pool.submit(work, act, seed) for seed, act in enumerate(WORKS)]
        stop.wait(SECONDS)
        stop.set()
        for one in working:
            one.result()
        log = server.log_text()
        server.process.terminate()
        assert server.process.wait(WAIT_S) == 0
    lines = [json.loads(line) for line in log.splitlines()]
    loaded = Counter(line["message"].split("/")[0] for line in lines if ": loaded" in line["message"])
    assert all(done[act.__name__] for act in WORKS), done
    assert sum(loaded.values()) > 2 * COUNT  # each time but the first, its room was another's
    assert PINNED not in loaded  # since the start
    assert [line for line in lines if line["level"] == "ERROR"] == []
