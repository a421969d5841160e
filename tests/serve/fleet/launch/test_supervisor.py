"""The real supervisor over a worker that does as it is told."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.serve.fleet.agent.worker_process import program
from halfserve.serve.fleet.launch.supervisor import FIRST_S, FORGET_AFTER_S, LONGEST_S, Backoff
from halfserve.serve.fleet.member.handover import GONE, ConnectionCounts, SupervisorPlan

ROOT = Path(__file__).parents[4]
WORKER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("scripted_worker.py"))]
WAIT_S = 60.0
FAILURES = 12  # starts in a row that fail
SERVED = st.one_of(st.none(), st.floats(0, 1e6))


@contextmanager
def supervised(
    *deeds: str, first_s: float = 0.001, socket_path: Path | None = None, processes: int = 1
) -> Iterator[subprocess.Popen[str]]:
    plan = SupervisorPlan(sockets={}, socket_path=str(socket_path) if socket_path else None, processes=processes)
    command = [sys.executable, "-m", "tests.serve.fleet.launch.quick_supervisor", str(first_s), plan.to_text(), *WORKER, *deeds]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # which ends its worker


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def until_ready(process: subprocess.Popen[str]) -> int:
    """The process number of the worker that is ready now."""
    words = line(process)
    while words[0] != "ready":
        words = line(process)
    return int(words[1])


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], list[str]]:
    """The exit code, what the worker said last, and what the supervisor said in all, without times and numbers of processes."""
    told, errors = process.communicate(timeout=WAIT_S)
    errors = re.sub(r"process \d+", "process N", re.sub(r"after \d+\.\d s", "after T s", errors))
    errors = re.sub(r"^20\S+Z ", "", errors, flags=re.MULTILINE)
    return process.returncode, told.splitlines(), errors.splitlines()


def test_a_worker_that_has_served_is_restarted_after_any_end() -> None:
    with supervised("killed:9", "served:3", "killed:6", "served:75", "served:0", "serve") as process:
        until_ready(process)
        process.terminate()
        code, told, errors = ended(process)
    assert (code, told) == (0, ["got SIGTERM"])
    assert errors == [
        f"WARNING the worker (process N) ended after T s: {how}; the next one starts {when}"
        for how, when in [
            ("SIGKILL; out of memory, or by hand", "now"),
            ("exit code 3", "in 0.001 s"),
            ("SIGABRT; a runtime or a driver gave up", "in 0.001 s"),
            ("exit code 75: its device was lost", "in 0.001 s"),
            ("exit code 0", "in 0.001 s"),
        ]
    ]


def test_a_first_worker_that_never_served_speaks_for_itself() -> None:
    with supervised("exit:3") as process:
        code, told, errors = ended(process)
    assert (code, [words.split()[0] for words in told], errors) == (3, ["start"], [])


def test_a_first_worker_that_was_killed_is_spoken_for() -> None:
    with supervised(f"die:{signal.SIGSEGV:d}") as process:
        code, _, errors = ended(process)
    assert (code, errors) == (139, ["ERROR the server ended before it was ready: SIGSEGV; a runtime or a driver crashed"])


def test_what_a_worker_leaves_behind_is_not_waited_for() -> None:
    with supervised("fork:3") as process:
        code, told, errors = ended(process)
    assert (code, told[1:], errors) == (3, ["orphaned"], [])


@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_that_has_served_comes_back_after_any_number_of_failures(processes: int) -> None:
    deeds = " ".join(["serve", *["exit:2"] * FAILURES, "serve"])
    with supervised(" / ".join([deeds] * processes), processes=processes) as process:
        for worker in [until_ready(process) for _ in range(processes)]:
            os.kill(worker, signal.SIGKILL)
            assert line(process)[0] == "start"  # the supervisor has seen that all were ready, and that one has ended
        for _ in range(processes):
            until_ready(process)
        process.terminate()
        code, _, errors = ended(process)
    assert (code, len(errors)) == (0, (1 + FAILURES) * processes)
    assert {error.partition(" ")[2].partition("ended ")[2] for error in errors if "before" in error} == {
        "before it was ready: exit code 2; the next one starts in 0.001 s"
    }


@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_of_the_terminal_is_passed_on_once(name: signal.Signals) -> None:
    with supervised("leave:4") as process:
        until_ready(process)
        os.killpg(process.pid, name)
        assert ended(process) == (4, ["got SIGTERM"], [])


@pytest.mark.parametrize(("name", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_both_at_once(name: signal.Signals, code: int) -> None:
    with supervised("stubborn") as process:
        until_ready(process)
        process.terminate()
        assert line(process) == ["got", "SIGTERM"]
        process.send_signal(name)
        assert ended(process) == (code, [], [])  # with the end of standard output, which the worker holds as well


@pytest.mark.parametrize(("name", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_before_the_first_worker_is_ready_ends_as_it_would_without(name: signal.Signals, code: int) -> None:
    with supervised("load") as process:
        assert line(process)[0] == "start"
        process.send_signal(name)
        assert ended(process) == (code, [], [])


def test_a_signal_before_the_next_worker_is_ready_is_no_failure() -> None:
    with supervised("served:1", "load") as process:
        assert [line(process)[:2] for _ in range(2)] == [["start", "0"], ["start", "1"]]
        process.terminate()
        assert ended(process)[:2] == (0, [])


def test_a_signal_while_no_worker_is_there_ends_it_at_once() -> None:
    with supervised("served:1", "served:1", first_s=3600) as process:
        assert process.stderr is not None
        for _ in range(2):
            told = process.stderr.readline()
        assert told.endswith("the next one starts in 3600 s\n")
        process.terminate()
        assert ended(process)[0] == 0


def test_a_worker_killed_during_shutdown_is_not_restarted() -> None:
    with supervised("stubborn", "serve") as process:
        worker = until_ready(process)
        process.terminate()
        assert line(process) == ["got", "SIGTERM"]
        os.kill(worker, signal.SIGKILL)
        assert ended(process) == (137, [], [])


def test_the_worker_notices_the_end_of_its_supervisor() -> None:
    with supervised("serve") as process:
        until_ready(process)
        process.kill()
        assert ended(process) == (-9, ["orphaned"], [])


def test_hang_up_is_for_the_worker() -> None:
    with supervised("serve") as process:
        until_ready(process)
        process.send_signal(signal.SIGHUP)
        assert line(process) == ["got", "SIGHUP"]
        process.terminate()
        assert ended(process) == (0, ["got SIGTERM"], [])


def test_hang_up_waits_for_no_worker_that_reads_files_anyway() -> None:
    with supervised("load") as process:
        assert line(process)[0] == "start"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (128 + signal.SIGTERM, [], [])


def test_a_unix_socket_goes_with_the_supervisor(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    path.touch()
    with supervised("killed:9", "serve", socket_path=path) as process:
        until_ready(process)
        assert path.exists()
        process.terminate()
        assert ended(process)[0] == 0
    assert not path.exists()


def test_a_worker_is_started_once_there_are_files_again() -> None:
    with supervised("serve", *["serve"] * 5, first_s=0.5) as process:
        worker = until_ready(process)
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        os.kill(worker, signal.SIGKILL)
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(2)]
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        assert said[1].endswith(" ERROR the worker cannot be started: Too many open files\n")
        until_ready(process)
        process.terminate()
        assert ended(process)[0] == 0


def test_one_of_several_workers_is_replaced_while_the_others_serve() -> None:
    with supervised("serve / serve serve", processes=2) as process:
        first = until_ready(process)
        second = until_ready(process)  # started once the first one was ready
        os.kill(second, signal.SIGKILL)
        assert until_ready(process) not in {first, second}
        process.terminate()
        code, told, errors = ended(process)
    assert (code, told) == (0, ["got SIGTERM"] * 2)
    assert errors == [
        "WARNING worker 2 of 2 (process N) ended after T s: SIGKILL; out of memory, or by hand; the next one starts now"
    ]


def test_where_the_first_worker_cannot_serve_no_other_one_is_started() -> None:
    with supervised("exit:3 / serve / serve", processes=3) as process:
        code, told, errors = ended(process)
    assert (code, len(told), errors) == (3, 1, [])


def test_a_worker_that_cannot_start_beside_the_first_one_ends_all() -> None:
    with supervised("serve / die:9", processes=2) as process:
        code, told, errors = ended(process)
    assert (code, told[-1]) == (137, "got SIGTERM")
    assert errors == ["ERROR worker 2 of 2 ended before it was ready: SIGKILL; out of memory, or by hand"]


def test_a_worker_that_cannot_come_back_leaves_the_others_serving() -> None:
    failures = " ".join(["exit:2"] * FAILURES)
    with supervised(f"serve / served:1 {failures} serve", processes=2) as process:
        assert [line(process)[0] for _ in range(3)] == ["start", "ready", "start"]
        while (words := line(process))[0] != "ready":
            assert words[0] == "start"
        process.terminate()
        assert ended(process)[0] == 0


def test_the_folder_of_several_workers_goes_with_the_supervisor(tmp_path: Path) -> None:
    ConnectionCounts.create(tmp_path, 2)
    counts = ConnectionCounts(tmp_path)
    counts.set(1, 0)
    plan = SupervisorPlan(sockets={}, socket_path=None, processes=2, folder=str(tmp_path))
    command = [sys.executable, "-m", "halfserve.serve.fleet.launch.supervisor", plan.to_text(), *WORKER, "exit:1 / serve"]
    assert subprocess.run(command, capture_output=True, cwd=ROOT, timeout=WAIT_S, check=False).returncode == 1
    assert not tmp_path.exists()
    assert counts.fewest() == GONE  # of a worker that has ended


def test_a_program_that_is_not_there_is_one_line() -> None:
    plan = SupervisorPlan({}, None).to_text()
    command = [sys.executable, "-m", "halfserve.serve.fleet.launch.supervisor", plan, "/no/such/python"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (126, 1)
    assert "ERROR the worker cannot be started: /no/such/python: No such file or directory" in done.stderr


def test_the_first_restart_is_immediate_and_later_ones_back_off() -> None:
    backoff = Backoff()
    assert [backoff.ended(1.0) for _ in range(10)] == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]
    assert backoff.ended(FORGET_AFTER_S) == 0
    assert backoff.ended(1.0) == FIRST_S


@given(st.lists(SERVED, max_size=40))
def test_waits_stay_in_their_bounds_and_only_a_minute_of_service_shortens_them(lives: list[float | None]) -> None:
    backoff, before = Backoff(), 0.0
    for served_s in lives:
        wait_s = backoff.ended(served_s)
        assert 0 <= wait_s <= LONGEST_S
        assert wait_s >= before or (served_s is not None and served_s >= FORGET_AFTER_S)
        before = wait_s


def test_only_a_checkout_as_current_folder_may_hold_our_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert program("halfserve") == [sys.executable, "-m", "halfserve"]
    monkeypatch.chdir(tmp_path)
    assert program("halfserve") == [sys.executable, "-P", "-m", "halfserve"]
