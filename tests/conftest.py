from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from halfserve.compiled_build import SWITCH, build_in_use
from tests.longest_first import spread
from tests.ports import unused_port

# As `halfserve` itself does, and before any test loads torch: see halfserve/cli.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# What a shell without job control starts in the background has SIGINT ignored, and all that it starts inherits that.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# After an edit of the hot path its sources run. The programs that tests start need not say so again, each by a line.
BUILD = build_in_use()
if BUILD.name == "plain" and BUILD.reason != "not compiled":
    os.environ[SWITCH] = "0"


@pytest.hookimpl(optionalhook=True)  # where tests run without xdist, nobody calls it
def pytest_xdist_auto_num_workers() -> int:
    """Use three workers for two cores: tests wait a third of the time, for processes and sockets."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + (cores + 1) // 2


def pytest_report_header() -> str:
    return f"hot path: {BUILD}"


# A shared machine may stall for a second at any place: how long an example takes proves nothing about the code.
# CI decides about a change, so it tries the same examples each time; whoever works on the code tries new ones.
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("untimed")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length: each worker collects by itself, and some bytes hold the time (a gzip header does)."""
    return f"{len(val)}bytes" if isinstance(val, bytes) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is collected out of the garbage collector: modules and tests live as long as the process.

    Collecting 5,300 tests takes 4 of 10 seconds less, and a later `gc.collect()` sees only what tests have made.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after the plugin that puts tests into a random order
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest tests, each of them on another worker."""
    spread(items, getattr(config, "workerinput", {}).get("workercount", 1))


@pytest.fixture(autouse=True)
def _leaves_logging_alone() -> Iterator[None]:
    """Fail the test that leaves another level for all: it would be a later one, that waits for a warning, which fails."""
    before = logging.root.level, logging.root.manager.disable
    yield
    assert (logging.root.level, logging.root.manager.disable) == before


@pytest.fixture
def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    return unused_port()


@pytest.fixture
def own_modules(tmp_path: Path) -> Path:
    """A user's folder, whose modules have the names of our folders and fail when they are imported."""
    for name in ("amp_core.py", "export.py", "serve.py", "protos/__init__.py", "examples/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'raise AssertionError("imported the user\'s {name}")\n')
    return tmp_path
