from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import onnxruntime as ort
import pytest

from serve.control.giving_way import giving_way
from tests.models import save_mlp

if sys.platform != "linux":
    pytest.skip("threads have scheduling policies on Linux", allow_module_level=True)


def policies() -> dict[int, int]:
    """Of this process's threads, by their numbers."""
    return {int(thread.name): os.sched_getscheduler(int(thread.name)) for thread in Path("/proc/self/task").iterdir()}


def test_the_thread_gives_way_within_and_no_longer() -> None:
    with giving_way():
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_it_is_as_before_when_something_went_wrong_within() -> None:
    with pytest.raises(KeyError), giving_way():
        raise KeyError
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_threads_started_within_are_as_others_afterwards() -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    try:
        with giving_way():
            thread.start()
        assert thread.native_id is not None
        assert os.sched_getscheduler(thread.native_id) == os.SCHED_OTHER
    finally:
        go_on.set()
        thread.join()


def test_a_runtimes_own_threads_are_as_others(tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 3
    before = policies()
    with giving_way():
        session = ort.InferenceSession(save_mlp(tmp_path / "m.onnx"), options, providers=["CPUExecutionProvider"])
    added = policies().keys() - before.keys()
    assert len(added) >= 2
    assert {policies()[thread] for thread in added} == {os.SCHED_OTHER}
    del session


def test_threads_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, asked = threading.Event(), list[int]()
    threads = [threading.Thread(target=go_on.wait) for _ in range(20)]
    ask = os.sched_getscheduler

    def noted(thread: int) -> int:
        asked.append(thread)
        return ask(thread)

    monkeypatch.setattr(os, "sched_getscheduler", noted)
    try:
        for thread in threads[:-1]:
            thread.start()
        with giving_way():
            pass
        with giving_way():
            asked.clear()
            threads[-1].start()
        assert {thread.native_id for thread in threads} & set(asked) == {threads[-1].native_id}
        assert ask(threads[-1].native_id or 0) == os.SCHED_OTHER
    finally:
        go_on.set()
        for thread in threads:
            thread.join()


def test_it_ends_well_while_no_more_files_can_be_opened() -> None:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with giving_way():
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_process_started_within_gives_way_for_good() -> None:
    with giving_way():
        asking = [sys.executable, "-S", "-c", "import os; print(os.sched_getscheduler(0))"]
        answer = subprocess.run(asking, capture_output=True, check=True, text=True).stdout
    assert int(answer) == os.SCHED_BATCH


def test_another_policy_is_left_alone() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # as chrt --batch does
    try:
        with giving_way():
            pass
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_where_it_is_forbidden_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    with giving_way():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
