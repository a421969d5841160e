"""Whom a cancellation is meant for: asyncio has one exception for a task that is cancelled and for a call that is."""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Whether somebody has cancelled the task that runs now; False where only what it waits for was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
