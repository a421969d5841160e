"""How many threads a runtime is given on the CPU where this process may not use all of the machine's cores.

ONNX Runtime counts those of the machine, whatever a CPU limit or an affinity allows. Threads beyond a limit use it up at once,
then all of them, the event loop's too, stand still for the rest of the system's period of 100 ms.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from serve.engine.resource_limits import group_folders


def fewer_cores() -> int:
    """How many cores this process may use, where these are fewer than the machine has; 0 where it may use all."""
    there = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    mine = min([mine, *_quotas()])
    return mine if mine < there else 0


def _quotas() -> list[int]:
    """The CPU limits of this process's control groups, in whole cores."""
    texts = [_read(folder, "cpu.max") for folder in group_folders()]
    texts += [_read(folder, "cpu.cfs_quota_us", "cpu.cfs_period_us") for folder in group_folders("cpu")]
    return [quota for text in texts if (quota := _cores(text))]


def _read(folder: Path, *names: str) -> str:
    try:
        return " ".join((folder / name).read_text() for name in names)
    except OSError:
        return ""


def _cores(text: str) -> int:
    """Of a limit's time and the period that it is for; 0 where there is none ("max", or -1)."""
    try:
        time, period = map(int, text.split())
    except ValueError:
        return 0
    return math.ceil(time / period) if time > 0 else 0
