from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.export.conversions.crash_pool import Crash, CrashPool

pytestmark = pytest.mark.long


def work(what: str) -> str:
    """What a piece of work may do."""
    if what == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        os._exit(7)
    if what == "raise":
        raise ValueError("no good\nand a second line")
    if what == "hang":
        threading.Event().wait()
    if what == "tell":
        return str(os.getpid())
    return f"did {what}"


def test_what_crashes_is_an_answer_and_the_rest_is_done() -> None:
    with CrashPool(work, workers=1) as pool:
        found = list(pool.map((what,) for what in ("a", "die", "b", "raise", "exit", "c")))
    assert found == [
        "did a",
        Crash("killed by SIGSEGV"),
        "did b",
        Crash("ValueError: no good"),
        Crash("ended with status 7"),
        "did c",
    ]


def test_what_hangs_is_ended() -> None:
    with CrashPool(work, workers=1, timeout_seconds=0.2) as pool:
        assert list(pool.map([("hang",)])) == [Crash("no answer within 0.2 s")]


def test_children_work_again_in_the_next_map() -> None:
    with CrashPool(work, workers=1) as pool:
        assert len({told for _ in range(3) for told in pool.map([("tell",)])}) == 1
