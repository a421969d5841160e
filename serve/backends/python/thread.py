"""Run a model.py in the server's own process, on the thread of its instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfserve.serve.backends.python.process import ChildFailedError, OnEvent
from halfserve.serve.backends.python_child.model_host import ModelFailedError
from halfserve.serve.backends.python_child.model_server import ModelServer
from halfserve.serve.backends.python_child.server_access import EventAccess, connect, using
from halfserve.serve.backends.python_child.wire import WireTensor


class ModelThread:
    """A running model.py, like a `ChildProcess`. It cannot be killed, and shares modules and Python's lock with the server."""

    def __init__(self, on_event: OnEvent, on_end: Callable[[], None]) -> None:
        """See ChildProcess."""
        self._on_end: Callable[[], None] | None = on_end
        self._access = EventAccess(on_event)
        self._model = ModelServer(self._access)
        connect(self._access)  # for threads that the model starts

    def call(self, header: dict[str, Any], tensors: Sequence[WireTensor] = ()) -> tuple[dict[str, Any], list[WireTensor]]:
        """See ChildProcess.

        Raises:
            ChildFailedError: the model.py failed.
        """
        aligned = [one if one.data.flags.aligned else one._replace(data=one.data.copy()) for one in tensors]
        try:
            with using(self._access):
                return self._model.do(header, aligned)
        except ModelFailedError as error:
            raise ChildFailedError(str(error), error.traceback, error.sent) from None

    def answer(self, header: Mapping[str, Any], tensors: Sequence[WireTensor] = ()) -> None:
        """See ChildProcess."""
        self._access.deliver(header, list(tensors))

    def kill(self) -> None:
        """Nothing but the end of its requests: a thread cannot be killed."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
