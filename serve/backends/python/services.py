"""Services of the server for a running model.py: logs, metrics, and requests to other models."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halfserve.serve.backends.python.custom_metrics import CustomMetrics
from halfserve.serve.backends.python.model_requests import CopyCalls
from halfserve.serve.backends.python.process_messages import code_of
from halfserve.serve.backends.python_child.wire import WireTensor
from halfserve.serve.engine.background_threads import Worker
from halfserve.serve.engine.errors import BackendError, FailedPreconditionError, InferenceError
from halfserve.serve.engine.model_calls import ModelCalls

logger = logging.getLogger(__name__)

LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)  # index: Triton's number of the level
Answer = Callable[[dict[str, Any], Sequence[WireTensor]], None]


class Services:
    """Services that all Python models of a server share.

    Attributes:
        metrics: metrics that the models declare.
        calls: reaches the other models; None until the server has a core.
    """

    def __init__(self) -> None:
        self.metrics = CustomMetrics()
        self.calls: ModelCalls | None = None

    def connected(self) -> ModelCalls:
        """Return the way to other models.

        Raises:
            FailedPreconditionError: the server has no core yet.
        """
        if self.calls is None:
            raise FailedPreconditionError("this server does not let models call models")
        return self.calls


class CopyServices:
    """Services of the server for one copy of a model. Events come on one thread; replies leave on others.

    Attributes:
        calls: the copy's requests to other models.
        answer: sends a reply to the copy, and may block. Set before the first event.
    """

    def __init__(self, services: Services, label: str) -> None:
        self._services = services
        self._label = label
        self.calls = CopyCalls(services.connected, label, self.reply)
        self.answer: Answer = _discard
        self._starting = threading.Lock()
        self._replies: Worker | None = None
        # Each returns the reply; None where it comes later, or not at all.
        self._handlers: dict[str, Callable[[Mapping[str, Any], list[WireTensor]], dict[str, Any] | None]] = {
            "log": self._log,
            "failed": self._failed,
            "sync": lambda *_: {},  # its reply says that all events before have been handled
            "metric": self._metric,
            "metric_family": self._metric_family,
            "metric_new": self._metric_new,
            "metric_value": self._metric_value,
            "infer": self.calls.infer,
            "abandon": self.calls.abandon,
            "cancel": self.calls.cancel,
            "read": self.calls.read,
            "is_ready": self.calls.is_ready,
            "load_model": self.calls.load_model,
            "unload_model": self.calls.unload_model,
        }

    def handle(self, header: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        """Handle one event, and reply to it if it is a call."""
        try:
            reply = self._handlers[header["k"]](header, tensors)
        except InferenceError as error:
            reply = {"error": code_of(error)}
        except KeyError as error:
            reply = {"error": code_of(BackendError(f"{header['k']}: there is no {error}"))}
        if reply is not None and "call" in header and header["k"] != "abandon":
            self.reply({"call": header["call"], **reply}, [])

    def stop(self) -> None:
        """Cancel the requests of the copy, which has gone."""
        self.calls.stop()
        if self._replies is not None:
            self._replies.stop()

    def reply(self, header: dict[str, Any], tensors: Sequence[WireTensor]) -> None:
        """Send a reply, from a thread that may wait for the copy to read."""
        with self._starting:
            if self._replies is None:
                self._replies = Worker(f"replies to {self._label}")
        self._replies.submit(self.answer, header, tensors)

    def _log(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        logger.log(LEVELS[header["level"]], "%s: %s", self._label, header["text"], extra={"model": self._label})

    def _failed(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        log_failure(self._label, header["text"], header["trace"])

    def _metric(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        self._services.metrics.change(header["name"], header["labels"], header["action"], header["value"])

    def _metric_family(self, header: Mapping[str, Any], _: list[WireTensor]) -> dict[str, Any]:
        self._services.metrics.declare(header["name"], header["text"], header["kind"])
        return {}

    def _metric_new(self, header: Mapping[str, Any], _: list[WireTensor]) -> dict[str, Any]:
        self._services.metrics.add(header["name"], header["labels"], header["buckets"])
        return {}

    def _metric_value(self, header: Mapping[str, Any], _: list[WireTensor]) -> dict[str, Any]:
        return {"value": self._services.metrics.value(header["name"], header["labels"])}


def log_failure(label: str, text: str, trace: str) -> None:
    """Log the failure of a model's execute, with the traceback of its process."""
    logger.error("%s: execute failed: %s", label, text, extra={"model": label, "trace": trace})


def _discard(_: dict[str, Any], __: Sequence[WireTensor]) -> None:
    """Discard a reply, because there is no copy yet."""
