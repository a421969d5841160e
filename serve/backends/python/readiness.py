"""Asks a Python model whether it is ready, by its own is_ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from halfserve.serve.engine.model_calls import ModelCalls

logger = logging.getLogger(__name__)

READY_S: Final = 5.0  # time limit of an answer, as in Triton


class ReadinessCheck:
    """The readiness of one copy of a model. The copy is asked once at a time: who asks meanwhile gets the same answer."""

    def __init__(self, connected: Callable[[], ModelCalls], label: str, ask: Callable[[], None]) -> None:
        """Make the check of one copy. `ask` sends the question, whose answer `came` takes."""
        self._connected = connected
        self._label = label
        self._ask = ask
        self._answer: asyncio.Future[bool] | None = None  # to the question that was asked
        self._latest_error = ""

    async def is_ready(self) -> bool:
        """Return what the model says; False if it fails, or does not answer within READY_S. On the event loop."""
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
            self._ask()
        try:
            async with asyncio.timeout(READY_S):
                return await asyncio.shield(self._answer)
        except TimeoutError:
            self._report(f"it has not answered within {READY_S:g} s")
            return False

    def came(self, header: Mapping[str, Any]) -> None:
        """Take the answer, on any thread."""
        self._connected().soon(partial(self._take, ready=header["ready"], error=header["error"]))

    def ended(self) -> None:
        """Note that the copy has gone, on any thread."""
        self._connected().soon(partial(self._take, ready=False, error=""))

    def _take(self, *, ready: bool, error: str) -> None:
        self._report(error)
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(ready)

    def _report(self, error: str) -> None:
        """Log an error, unless it is the latest one, because probes ask again and again."""
        if error and error != self._latest_error:
            logger.warning("%s: is_ready failed: %s", self._label, error, extra={"model": self._label})
        self._latest_error = error
