"""Two minutes of load, reloads, bad input and faults on a server, with every answer checked.

TEST_SCALE lengthens it; --log-cli-level=INFO shows its figures.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from benchmarks.harness.models import save_models
from benchmarks.harness.process_watch import look, watch
from benchmarks.harness.server_process import ServerProcess, server_process
from halfserve import Client
from tests.end_to_end.conftest import SOAK
from tests.scale import scaled
from tests.serve.faults.soaking import fault_injection
from tests.serve.faults.soaking.clients import WORKS, clients
from tests.serve.faults.soaking.fault_injection import Scene, keep_at_it
from tests.serve.faults.soaking.judgement import Report, report
from tests.serve.faults.soaking.tally import Counted, Tally

SECONDS = scaled(120)
THINK_S, PAUSE_S = 0.05, 1.0  # between requests and between faults: the clients take a third of a core
SAMPLE_S = 0.25
STOP_S = 60.0
ACTS = (
    "reloads",
    "bad input",
    "poisoned requests",
    "vanished clients",
    "mangled messages",
    "unloaded",
    "broken loads",
    "hangs",
)


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 600)
def test_a_server_is_after_two_minutes_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # spinning threads would take the cores from the tests beside this one
    save_models(tmp_path / "models")
    options = ("--model-control", "explicit", "--load-model", "*", "--shared-memory")
    log = ("--access-log", "all", "--access-log-file", str(tmp_path / "access.log"))
    with server_process(tmp_path / "models", *options, *log) as server:
        counted, result = soaked(server)
        server.process.terminate()
        code = server.process.wait(STOP_S)
    logging.getLogger(__name__).info("%s", result.figures)
    assert list(result.complaints) == []
    assert (counted.wrongs, code) == (0, 0)
    assert set(counted.answered) >= {"affine", "flip", "large", "shared memory", "stream"}
    assert all(counted.survived.get(act, 0) > 0 for act in ACTS), counted.survived


def soaked(server: ServerProcess) -> tuple[Counted, Report]:
    """What the clients counted, and the verdict."""
    tally, stop, samples = Tally(), threading.Event(), [look(server.process.pid)]
    with grpc.insecure_channel(server.address) as channel, Client(server.address, retries=0) as client:
        scene = Scene(server.address, server.process.pid, client, channel, np.random.default_rng(0), tally)
        threads = [
            threading.Thread(target=keep_at_it, args=(scene, PAUSE_S, stop), name="fault injection"),
            threading.Thread(target=watch, args=(server.process.pid, SAMPLE_S, stop, samples), name="watch"),
        ]
        started = time.monotonic()
        with clients(server.address, WORKS, tally, think_s=THINK_S):
            for thread in threads:
                thread.start()
            threads[-1].join(SECONDS)  # ends earlier where the server does
            # On a busy machine each fault takes longer.
            while scene.number < len(fault_injection.ACTS) and all(thread.is_alive() for thread in threads):
                threads[-1].join(PAUSE_S)
            stop.set()
            for thread in threads:
                thread.join()
        counted = tally.counted()
        return counted, report(counted, samples, scene.recoveries_s, started, time.monotonic(), server.log_text())


@pytest.mark.long
def test_the_soak_begins_before_all_other_tests(request: pytest.FixtureRequest) -> None:
    names = [item.path.name == SOAK for item in request.session.items]
    assert names == sorted(names, reverse=True)
